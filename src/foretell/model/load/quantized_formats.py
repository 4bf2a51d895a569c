"""Layouts of quantised checkpoints in safetensors: GPTQ, AWQ, compressed-tensors, FP8, MXFP4, NVFP4 and MLX."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Int, Int32, UInt8

from foretell.model.load.quantization_config import Layout, Scheme
from foretell.model.load.quantized_matrix import (
    AffineMatrix,
    Float8Matrix,
    FourBitFloatMatrix,
    IntegerMatrix,
    QuantizedMatrix,
)
from foretell.model.load.weights import SafetensorsWeights

Tensor = torch.Tensor
_SCALES = ("F32", "F16", "BF16", "F8_E8M0")
_E8M0_NAN = 255
_E4M3_MOST = 0x7E
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of every nibble of a word, from the lowest."""


class QuantizedModule:
    """The tensors of one quantised module, with checks of their shapes."""

    def __init__(self, name: str, inner: SafetensorsWeights) -> None:
        self.name, self._inner = name, inner

    def find(self, suffix: str) -> Tensor | None:
        """The tensor with this suffix, or None."""
        return self._inner.get(self.name + suffix)

    def require(self, suffix: str) -> Tensor:
        """The tensor with this suffix.

        Raises:
            ValueError: it is missing.
        """
        tensor = self.find(suffix)
        if tensor is None:
            raise ValueError(f"{self._inner.source}: the checkpoint has no {self.name}{suffix}; is it complete?")
        return tensor

    def shaped(self, suffix: str, *shape: int) -> Tensor:
        """The tensor with this suffix, of this shape."""
        tensor = self.require(suffix)
        if tuple(tensor.shape) != shape:
            raise self.wrong(suffix, f"has shape {tuple(tensor.shape)}, its other tensors ask for {shape}")
        return tensor

    def wrong(self, suffix: str, reason: str) -> ValueError:
        """An error that names a tensor of the module."""
        return ValueError(f"{self._inner.source}: {self.name}{suffix} {reason}; download it again")

    def groups(self, scheme: Scheme, inputs: int, index: Tensor | None) -> Int[Tensor, " i"]:
        """The group of every input, by the group size or by the index in the file."""
        size = scheme.group or inputs
        if index is None:
            return torch.arange(inputs) // size
        if index.shape != (inputs,) or int(index.min()) < 0 or int(index.max()) * size >= inputs:
            raise self.wrong("", f"has an index of groups that does not fit {inputs} inputs in groups of {size}")
        return index.long()


Suffixes = Mapping[str, tuple[str, ...]]
"""Dtypes that the tensor with a suffix may have."""


class QuantizedFormat(ABC):
    """Reads the modules of one layout, by the suffixes of their tensors."""

    def __init__(self, required: Suffixes, optional: Suffixes | None = None) -> None:
        self.required, self.optional = required, optional or {}

    @abstractmethod
    def read(self, module: QuantizedModule, scheme: Scheme) -> QuantizedMatrix:
        """The matrix of a module."""


class _GPTQ(QuantizedFormat):
    def read(self, module: QuantizedModule, scheme: Scheme) -> QuantizedMatrix:
        words = module.require(".qweight")
        inputs, outputs = words.shape[0] * 32 // scheme.bits, words.shape[1]
        group_of = module.groups(scheme, inputs, module.find(".g_idx"))
        count = -(-inputs // (scheme.group or inputs))
        zero = unpack_bits(module.shaped(".qzeros", count, -(-outputs * scheme.bits // 32)), scheme.bits, outputs)
        last = (1 << scheme.bits) - 1
        if scheme.zero_offset and int(zero.max()) == last:
            raise module.wrong(".qzeros", f"stores the zero point {last}, which programs read as 0 or as {last + 1}")
        scale = module.shaped(".scales", count, outputs)
        level = unpack_bits(words.T, scheme.bits, inputs)
        return IntegerMatrix(scheme.bits, level, scale.T, zero.T.int() + scheme.zero_offset, group_of)


class _AWQ(QuantizedFormat):
    def read(self, module: QuantizedModule, scheme: Scheme) -> QuantizedMatrix:
        words = module.require(".qweight")
        inputs, outputs = words.shape[0], words.shape[1] * 8
        group_of = module.groups(scheme, inputs, None)
        count = int(group_of[-1]) + 1
        zero = _unpack_awq(module.shaped(".qzeros", count, words.shape[1]))
        scale = module.shaped(".scales", count, outputs)
        return IntegerMatrix(4, _unpack_awq(words).T.contiguous(), scale.T, zero.T.int(), group_of)


def _unpack_awq(words: Int32[Tensor, "i w"]) -> UInt8[Tensor, "i o"]:
    place = torch.tensor(_AWQ_ORDER).argsort()
    return unpack_bits(words, 4, words.shape[1] * 8).view(len(words), -1, 8)[..., place].flatten(1)


class _Packed(QuantizedFormat):
    def read(self, module: QuantizedModule, scheme: Scheme) -> QuantizedMatrix:
        words, shape = module.require(".weight_packed"), module.require(".weight_shape").flatten().tolist()
        if len(shape) != 2 or words.shape != (shape[0], -(-shape[1] * scheme.bits // 32)):
            raise module.wrong(".weight_packed", f"has shape {tuple(words.shape)} and holds a matrix of {shape}")
        outputs, inputs = shape
        group_of = module.groups(scheme, inputs, module.find(".weight_g_idx"))
        scale = module.require(".weight_scale").view(-1, _columns(module.require(".weight_scale"))).expand(outputs, -1)
        count = -(-inputs // (scheme.group or inputs))
        if scale.shape[1] != count:
            raise module.wrong(".weight_scale", f"has {scale.shape[1]} scales per output, found {count} groups")
        zero = torch.full(scale.shape, 1 << (scheme.bits - 1), dtype=torch.int32)
        if not scheme.symmetric:
            packed = module.shaped(".weight_zero_point", -(-outputs * scheme.bits // 32), count)
            zero = unpack_bits(packed.T, scheme.bits, outputs).T.int()
        return IntegerMatrix(scheme.bits, unpack_bits(words, scheme.bits, inputs), scale, zero, group_of)


def _columns(scale: Tensor) -> int:
    """Scales per output; a tensor without axes, or with one number per output, has one."""
    return scale.shape[1] if scale.ndim == 2 else 1


class _Integers(QuantizedFormat):
    def read(self, module: QuantizedModule, scheme: Scheme) -> QuantizedMatrix:
        value, scale = module.require(".weight"), module.require(".weight_scale")
        outputs, inputs = value.shape
        group_of = module.groups(scheme, inputs, module.find(".weight_g_idx"))
        count, scale = int(group_of.max()) + 1, scale.view(-1, _columns(scale)).expand(outputs, -1)
        if scale.shape[1] != count:
            raise module.wrong(".weight_scale", f"has {scale.shape[1]} scales per output, found {count} groups")
        zero, stored = torch.full(scale.shape, 128, dtype=torch.int32), module.find(".weight_zero_point")
        if stored is not None:
            zero = zero + stored.int().view(-1, _columns(stored))
        return IntegerMatrix(8, (value.to(torch.int16) + 128).to(torch.uint8), scale, zero, group_of)


class _Float8(QuantizedFormat):
    def read(self, module: QuantizedModule, scheme: Scheme) -> QuantizedMatrix:
        value, scale = module.require(".weight"), module.find(".weight_scale_inv")
        suffix = ".weight_scale" if scale is None else ".weight_scale_inv"
        scale = module.require(suffix)
        outputs, inputs = value.shape
        if scale.dtype == torch.uint8:
            raise module.wrong(suffix, "is no float")
        columns = _columns(scale)
        block = scheme.block if scheme.block and scale.numel() > 1 else (outputs if scale.numel() == 1 else 1, inputs)
        scale = scale.view(-1, columns)
        if scale.shape != (-(-outputs // block[0]), -(-inputs // block[1])):
            raise module.wrong(suffix, f"has shape {tuple(scale.shape)} for blocks of {block[0]} x {block[1]}")
        return Float8Matrix(value, scale, block)


class _MXFP4(QuantizedFormat):
    """compressed-tensors: rows of bytes; gpt-oss: experts of rows of blocks, whose experts become one list of rows."""

    def read(self, module: QuantizedModule, scheme: Scheme) -> QuantizedMatrix:
        values, scales = self.required
        blocks, exponent = module.require(values), module.require(scales)
        groups = exponent.shape[-1]
        if blocks.numel() != exponent.numel() * 16 or blocks.shape[: exponent.ndim - 1] != exponent.shape[:-1]:
            raise module.wrong(scales, f"has shape {tuple(exponent.shape)}, its values {tuple(blocks.shape)}")
        if int(exponent.max()) == _E8M0_NAN:
            raise module.wrong(scales, "holds the exponent of not-a-number")
        return FourBitFloatMatrix(blocks.reshape(-1, groups, 16), exponent.reshape(-1, groups))


class _NVFP4(QuantizedFormat):
    """Of compressed-tensors, whose factor divides, and of modelopt, whose factor multiplies."""

    def read(self, module: QuantizedModule, scheme: Scheme) -> QuantizedMatrix:
        values, scales, factor = self.required
        packed, scale = module.require(values), module.require(scales).view(torch.uint8)
        number = module.require(factor).float().flatten()
        if packed.ndim != 2 or (len(packed), packed.shape[1]) != (len(scale), 8 * scale.shape[-1]) or len(number) != 1:
            raise module.wrong(scales, f"has shape {tuple(scale.shape)}, its values {tuple(packed.shape)}")
        if int(scale.max()) > _E4M3_MOST:
            raise module.wrong(scales, "holds a negative scale or not-a-number")
        number = 1 / number if factor == ".weight_global_scale" else number
        return FourBitFloatMatrix(packed.view(*scale.shape, 8), scale, number)


class _MLX(QuantizedFormat):
    """Words with the lowest bits first, as `mlx.core.quantize` describes them."""

    def read(self, module: QuantizedModule, scheme: Scheme) -> QuantizedMatrix:
        words = module.require(".weight")
        if words.ndim != 2:
            raise module.wrong(".weight", f"has {words.ndim} axes")
        outputs, inputs = words.shape[0], words.shape[1] * 32 // scheme.bits
        scale, bias = (module.shaped(suffix, outputs, inputs // scheme.group) for suffix in (".scales", ".biases"))
        return AffineMatrix(scheme.bits, unpack_bits(words, scheme.bits, inputs), scale, bias)


_INDEX, _BYTES = ("I32", "I64"), ("U8",)
FORMATS: Mapping[Layout, tuple[QuantizedFormat, ...]] = {
    "gptq": (_GPTQ({".qweight": ("I32",), ".qzeros": ("I32",), ".scales": _SCALES}, {".g_idx": _INDEX}),),
    "awq": (_AWQ({".qweight": ("I32",), ".qzeros": ("I32",), ".scales": _SCALES}),),
    "packed": (
        _Packed(
            {".weight_packed": ("I32",), ".weight_scale": _SCALES, ".weight_shape": _INDEX},
            {".weight_zero_point": ("I32",), ".weight_g_idx": _INDEX},
        ),
    ),
    "integers": (
        _Integers(
            {".weight": ("I8",), ".weight_scale": _SCALES},
            {".weight_zero_point": ("I8", "I32"), ".weight_g_idx": _INDEX},
        ),
    ),
    "float8": (_Float8({".weight": ("F8_E4M3",)}, {".weight_scale": _SCALES, ".weight_scale_inv": _SCALES}),),
    "mxfp4": (
        _MXFP4({".weight_packed": _BYTES, ".weight_scale": _BYTES}),
        _MXFP4({"_blocks": _BYTES, "_scales": _BYTES}),
    ),
    "nvfp4": (
        _NVFP4({".weight_packed": _BYTES, ".weight_scale": ("F8_E4M3",), ".weight_global_scale": ("F32",)}),
        _NVFP4({".weight": _BYTES, ".weight_scale": ("F8_E4M3",), ".weight_scale_2": ("F32",)}),
    ),
    "mlx": (_MLX({".weight": ("U32",), ".scales": _SCALES, ".biases": _SCALES}),),
}
NOT_READ = (
    ".input_scale", ".output_scale", ".activation_scale", ".input_zero_point", ".output_zero_point", ".k_scale",
    ".v_scale", ".q_scale", ".kv_scale", ".input_scale_ub", ".input_global_scale", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
"""Suffixes of tensors that quantise activations or the KV cache, which stay in the dtype of the model here."""


def unpack_bits(words: Int32[Tensor, "r w"], bits: int, count: int) -> UInt8[Tensor, "r n"]:
    """The first `count` fields of `bits` bits of every row of a dense bit stream, the lowest bits first."""
    data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        data = torch.stack((data & 15, data >> 4), -1).flatten(1)
    elif bits != 8:
        each = np.unpackbits(data.numpy(), axis=1, bitorder="little")[:, : count * bits].reshape(
            len(words), count, bits
        )
        data = torch.from_numpy(np.packbits(each, axis=2, bitorder="little")[..., 0])
    return data[:, :count]
