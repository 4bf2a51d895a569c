"""Matrices of quantised checkpoints, unpacked.

A matrix is given in the nearest storage type that holds its numbers exactly, or widened to floats. A weight is the
exact product `scale * (level - zero)`; engines that dequantise in 16 bits round it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8

from foretell.model.matrices.stored import StoredMatrix

Tensor = torch.Tensor
_GROUP = 32
"""Inputs per scale of the storage types."""
_FOUR_BIT_FLOATS = torch.tensor([sign * v for sign in (1, -1) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
"""Numbers of E2M1."""
_E8M0_BIAS = 127


class QuantizedMatrix(ABC):
    """A quantised matrix, unpacked."""

    @abstractmethod
    def widen(self) -> Float[Tensor, "o i"]:
        """The numbers in float32."""

    @abstractmethod
    def stored(self) -> StoredMatrix | str:
        """The matrix in the storage type that holds the same numbers; or why there is none."""


@dataclass(frozen=True)
class IntegerMatrix(QuantizedMatrix):
    """`scale * (level - zero)` with a scale and a zero point per output and group of inputs."""

    bits: int
    level: UInt8[Tensor, "o i"]
    scale: Float[Tensor, "o g"]
    zero: Int[Tensor, "o g"]
    group_of: Int[Tensor, " i"]
    """The group of every input."""

    def widen(self) -> Float[Tensor, "o i"]:
        """The numbers in float32: exact for scales of 16 bits."""
        centred = self.level.to(torch.int16) - self.zero.to(torch.int16)[:, self.group_of]
        return self.scale.float()[:, self.group_of] * centred

    def stored(self) -> StoredMatrix | str:
        """Q4_0 or Q4_Z up to 4 bits, else Q8_0."""
        outputs, inputs = self.level.shape
        if inputs % _GROUP:
            return f"{inputs} inputs are no multiple of {_GROUP}"
        groups = self.group_of.view(-1, _GROUP)
        if not bool((groups == groups[:, :1]).all()):
            return f"{_GROUP} consecutive inputs have several scales"
        scale = self.scale[:, groups[:, 0]].contiguous()
        half = scale.half()
        if not torch.equal(half.float(), scale.float()):
            return "float16 does not hold its scales"
        zero, levels = self.zero[:, groups[:, 0]], self.level.view(outputs, -1, _GROUP)
        if self.bits > 4:
            return _q8_0(levels.to(torch.int16) - zero[..., None].to(torch.int16), half)
        shift = 8 - zero.flatten()[0]
        if bool((zero + shift == 8).all()) and 0 <= shift <= 16 - (1 << self.bits):
            return _pack("Q4_0", (half,), _nibbles(levels + shift.to(torch.uint8)))
        return _pack("Q4_Z", (half, zero.half()), _nibbles(levels))


def _q8_0(centred: Int[Tensor, "o n 32"], scale: Float[Tensor, "o n"]) -> StoredMatrix | str:
    if int(centred.min()) < -128 or int(centred.max()) > 127:
        return "its levels less their zero points are no int8"
    return _pack("Q8_0", (scale,), centred.to(torch.int8).view(torch.uint8))


def _nibbles(levels: UInt8[Tensor, "o n 32"]) -> UInt8[Tensor, "o n 16"]:
    """Two levels per byte, in the order of Q4_0: levels 0 to 15 in the low halves."""
    return levels[..., :16] | levels[..., 16:] << 4


def _pairs(raw: UInt8[Tensor, "o n b"]) -> UInt8[Tensor, "o n l"]:
    """Levels 2k and 2k + 1 in the low and high half of byte k."""
    return torch.stack((raw & 15, raw >> 4), -1).flatten(2)


def _pack(kind: str, heads: tuple[Tensor, ...], levels: UInt8[Tensor, "o n b"]) -> StoredMatrix:
    """Blocks of 16-bit numbers, then the bytes of the levels."""
    parts = [h.contiguous().view(torch.uint8).view(*h.shape, 2) for h in heads]
    data = torch.cat([*parts, levels], -1)
    return StoredMatrix(kind, data.shape[1] * _GROUP, data.flatten(1))  # type: ignore[arg-type]


@dataclass(frozen=True)
class AffineMatrix(QuantizedMatrix):
    """`scale * level + bias` with a scale and a bias per output and group of inputs, a multiple of 32."""

    bits: int
    level: UInt8[Tensor, "o i"]
    scale: Float[Tensor, "o g"]
    bias: Float[Tensor, "o g"]

    def widen(self) -> Float[Tensor, "o i"]:
        """The numbers in float32, rounded once from scales and biases of 16 bits."""
        level = self.level.float().view(*self.scale.shape, -1)
        return (level * self.scale.float()[..., None] + self.bias.float()[..., None]).flatten(1)

    def stored(self) -> StoredMatrix | str:
        """Q4_1 up to 4 bits."""
        if self.bits > 4:
            return f"no storage type holds levels of {self.bits} bits with biases"
        halves = tuple(each.half() for each in (self.scale, self.bias))
        if not all(torch.equal(h.float(), own.float()) for h, own in zip(halves, (self.scale, self.bias), strict=True)):
            return "float16 does not hold its scales and biases"
        blocks = self.level.shape[1] // _GROUP // self.scale.shape[1]
        heads = tuple(each.repeat_interleave(blocks, 1) for each in halves)
        return _pack("Q4_1", heads, _nibbles(self.level.view(len(self.level), -1, _GROUP)))


@dataclass(frozen=True)
class Float8Matrix(QuantizedMatrix):
    """`scale * value` with float8 values and a scale per block of outputs and inputs."""

    value: Float[Tensor, "o i"]
    scale: Float[Tensor, "a b"]
    block: tuple[int, int]

    def widen(self) -> Float[Tensor, "o i"]:
        """The products in float32."""
        (rows, columns), scale = self.block, self.scale.float()
        wide = scale.repeat_interleave(columns, 1)[:, : self.value.shape[1]]
        return self.value.float() * wide.repeat_interleave(rows, 0)[: self.value.shape[0]]

    def stored(self) -> StoredMatrix | str:
        """No storage type holds float8."""
        return "no storage type holds float8"


@dataclass(frozen=True)
class FourBitFloatMatrix(QuantizedMatrix):
    """E2M1 values with an exponent per 32 inputs (MXFP4 of the OCP microscaling formats, arXiv 2310.10537), or with a
    scale in E4M3 per 16 inputs and a factor for all (NVFP4).
    """

    packed: UInt8[Tensor, "o n b"]
    scale: UInt8[Tensor, "o n"]
    """The bytes of exponents or scales."""
    factor: Float[Tensor, "1"] | None = None
    """None: MXFP4."""

    def widen(self) -> Float[Tensor, "o i"]:
        """The numbers in float32: of MXFP4, all of which bfloat16 holds, or of scales times the factor, rounded."""
        if self.factor is None:
            scale = torch.ldexp(torch.ones(self.scale.shape), self.scale.int() - _E8M0_BIAS)
        else:
            scale = self.scale.view(torch.float8_e4m3fn).float() * self.factor
        return (_FOUR_BIT_FLOATS[_pairs(self.packed).int()] * scale[..., None]).flatten(1)

    def stored(self) -> StoredMatrix | str:
        """The same in the order of GGUF."""
        values, (outputs, groups) = _pairs(self.packed), self.scale.shape
        if self.factor is None:
            data = torch.cat([self.scale[..., None], _nibbles(values)], -1)
            return StoredMatrix("MXFP4", groups * _GROUP, data.flatten(1))
        if groups % 4:
            return f"{16 * groups} inputs are no multiple of 64"
        levels, scale = values[..., :8] | values[..., 8:] << 4, self.scale.view(outputs, -1, 4)
        factor = self.factor.view(torch.uint8).expand(*scale.shape[:2], 4)
        data = torch.cat([factor, scale, levels.view(outputs, -1, 32)], -1)
        return StoredMatrix("NVFP4", 16 * groups, data.flatten(1))
