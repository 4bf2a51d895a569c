"""Quantised safetensors checkpoints: GPTQ, AWQ, compressed-tensors, FP8 and MXFP4.

A matrix is given in the nearest storage type that holds its numbers exactly, or widened to floats. A weight is the
exact product `scale * (level - zero)`; engines that dequantise in 16 bits round it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, UInt8

from foretell.model.load.quantization_config import Layout, Quantization, Scheme
from foretell.model.load.weights import SafetensorsWeights, Storage, Weights, candidate_names, refuse_quantized
from foretell.model.stored_matrix import StoredMatrix

Tensor = torch.Tensor
_GROUP = 32
"""Inputs per scale of the storage types."""
_SCALES = ("F32", "F16", "BF16", "F8_E8M0")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of every nibble of a word, from the lowest."""
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS, _E8M0_NAN = 127, 255
_WEIGHT = ".weight"


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


def _pack(kind: str, heads: tuple[Tensor, ...], levels: UInt8[Tensor, "o n b"]) -> StoredMatrix:
    """Blocks of 16-bit numbers, then the bytes of the levels."""
    parts = [h.contiguous().view(torch.uint8).view(*h.shape, 2) for h in heads]
    data = torch.cat([*parts, levels], -1)
    return StoredMatrix(kind, data.shape[1] * _GROUP, data.flatten(1))  # type: ignore[arg-type]


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
class MXFP4Matrix(QuantizedMatrix):
    """E2M1 values with an exponent per 32 inputs (OCP microscaling formats, arXiv 2310.10537)."""

    blocks: UInt8[Tensor, "o n 16"]
    """Values 2k and 2k + 1 in the low and high half of byte k."""
    exponent: UInt8[Tensor, "o n"]

    def _values(self) -> UInt8[Tensor, "o n 32"]:
        return torch.stack((self.blocks & 15, self.blocks >> 4), -1).flatten(2)

    def widen(self) -> Float[Tensor, "o i"]:
        """The numbers in float32, all of which bfloat16 holds too."""
        table = torch.tensor([*_MXFP4_VALUES, *(-v for v in _MXFP4_VALUES)])
        scale = torch.ldexp(torch.ones(self.exponent.shape), self.exponent.int() - _E8M0_BIAS)
        return (table[self._values().int()] * scale[..., None]).flatten(1)

    def stored(self) -> StoredMatrix:
        """MXFP4 in the order of GGUF."""
        data = torch.cat([self.exponent[..., None], _nibbles(self._values())], -1)
        return StoredMatrix("MXFP4", data.shape[1] * _GROUP, data.flatten(1))


class _Module:
    """The tensors of one quantised module, with checks of their shapes."""

    def __init__(self, name: str, inner: SafetensorsWeights) -> None:
        self.name, self._inner = name, inner

    def find(self, suffix: str) -> Tensor | None:
        return self._inner.get(self.name + suffix)

    def require(self, suffix: str) -> Tensor:
        found = self.find(suffix)
        if found is None:
            raise ValueError(f"{self._inner.source}: the checkpoint has no {self.name}{suffix}; is it complete?")
        return found

    def shaped(self, suffix: str, *shape: int) -> Tensor:
        """The tensor with this suffix, of this shape."""
        found = self.require(suffix)
        if tuple(found.shape) != shape:
            raise self.wrong(suffix, f"has shape {tuple(found.shape)}, its other tensors ask for {shape}")
        return found

    def wrong(self, suffix: str, reason: str) -> ValueError:
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


class _Format(ABC):
    """Reads the modules of one layout, by the suffixes of their tensors."""

    def __init__(self, required: Suffixes, optional: Suffixes | None = None) -> None:
        self.required, self.optional = required, optional or {}

    @abstractmethod
    def read(self, module: _Module, scheme: Scheme) -> QuantizedMatrix:
        """The matrix of a module."""


class _GPTQ(_Format):
    def read(self, module: _Module, scheme: Scheme) -> QuantizedMatrix:
        words = module.require(".qweight")
        inputs, outputs = words.shape[0] * 32 // scheme.bits, words.shape[1]
        group_of = module.groups(scheme, inputs, module.find(".g_idx"))
        count = -(-inputs // (scheme.group or inputs))
        zero = unpack_bits(module.shaped(".qzeros", count, -(-outputs * scheme.bits // 32)), scheme.bits, outputs)
        last = (1 << scheme.bits) - 1
        if scheme.zero_offset and int(zero.max()) == last:
            raise module.wrong(".qzeros", f"stores the zero point {last}, which programs read as 0 or as {last + 1}")
        scale = module.shaped(".scales", count, outputs)
        level = unpack_bits(words.T.contiguous(), scheme.bits, inputs)
        return IntegerMatrix(scheme.bits, level, scale.T, zero.T.int() + scheme.zero_offset, group_of)


class _AWQ(_Format):
    def read(self, module: _Module, scheme: Scheme) -> QuantizedMatrix:
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


class _Packed(_Format):
    def read(self, module: _Module, scheme: Scheme) -> QuantizedMatrix:
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
            zero = unpack_bits(packed.T.contiguous(), scheme.bits, outputs).T.int()
        return IntegerMatrix(scheme.bits, unpack_bits(words, scheme.bits, inputs), scale, zero, group_of)


def _columns(scale: Tensor) -> int:
    """Scales per output; a tensor without axes, or with one number per output, has one."""
    return scale.shape[1] if scale.ndim == 2 else 1


class _Integers(_Format):
    def read(self, module: _Module, scheme: Scheme) -> QuantizedMatrix:
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


class _Float8(_Format):
    def read(self, module: _Module, scheme: Scheme) -> QuantizedMatrix:
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


class _MXFP4(_Format):
    """compressed-tensors: rows of bytes; gpt-oss: experts of rows of blocks, whose experts become one list of rows."""

    def read(self, module: _Module, scheme: Scheme) -> QuantizedMatrix:
        values, scales = self.required
        blocks, exponent = module.require(values), module.require(scales)
        groups = exponent.shape[-1]
        if blocks.numel() != exponent.numel() * 16 or blocks.shape[: exponent.ndim - 1] != exponent.shape[:-1]:
            raise module.wrong(scales, f"has shape {tuple(exponent.shape)}, its values {tuple(blocks.shape)}")
        if int(exponent.max()) == _E8M0_NAN:
            raise module.wrong(scales, "holds the exponent of not-a-number")
        return MXFP4Matrix(blocks.reshape(-1, groups, 16), exponent.reshape(-1, groups))


_INDEX, _BYTES = ("I32", "I64"), ("U8",)
_FORMATS: Mapping[Layout, tuple[_Format, ...]] = {
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
}
_NOT_READ = (
    ".input_scale", ".output_scale", ".activation_scale", ".input_zero_point", ".output_zero_point", ".k_scale",
    ".v_scale", ".q_scale", ".kv_scale", ".input_scale_ub", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
"""Suffixes of tensors that quantise activations or the KV cache, which stay in the dtype of the model here."""


def unpack_bits(words: Int32[Tensor, "r w"], bits: int, count: int) -> UInt8[Tensor, "r n"]:
    """The first `count` fields of `bits` bits of every row of a dense bit stream, the lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    if bits == 4:
        data = torch.stack((data & 15, data >> 4), -1).flatten(1)
    elif bits != 8:
        each = np.unpackbits(data.numpy(), axis=1, bitorder="little")[:, : count * bits].reshape(
            len(words), count, bits
        )
        data = torch.from_numpy(np.packbits(each, axis=2, bitorder="little")[..., 0])
    return data[:, :count]


class QuantizedWeights(Weights):
    """A quantised checkpoint in safetensors: `get` widens, `matrix` keeps the bytes where a storage type holds them.

    Raises:
        ValueError: a tensor that the configuration does not explain, one that is missing, or a damaged file.
    """

    def __init__(self, path: Path, quantization: Quantization) -> None:
        self.source, self._quantization = str(path), quantization
        found: dict[str, tuple[Path, str]] = {}

        def note(file: Path, name: str, dtype: str) -> None:
            found[name] = (file, dtype)

        self._inner = SafetensorsWeights(path, note)
        self.files = [*self._inner.files, path / "config.json"]
        self._modules: dict[str, tuple[_Format, Scheme]] = {}
        for name, (file, dtype) in found.items():
            self._find_module(file, name, dtype)
        if not self._modules:
            raise ValueError(
                f"{path}: config.json says that the checkpoint is quantised with {quantization.method}, and none of "
                "its tensors is; download it again"
            )
        for module, (form, _) in self._modules.items():
            self._check_module(module, form, {name: dtype for name, (_, dtype) in found.items()})
        self.widened: dict[str, str] = {}
        """Why matrices were widened, by name; `matrix` adds to it."""

    def _find_module(self, file: Path, name: str, dtype: str) -> None:
        """Note the module that a tensor belongs to; refuse what belongs to none."""
        for _, scheme in self._quantization.schemes:
            for form in _FORMATS[scheme.layout]:
                suffix = next((s for s in (*form.required, *form.optional) if name.endswith(s)), None)
                if suffix is None or (suffix == _WEIGHT and dtype not in form.required[suffix]):
                    continue
                module = name.removesuffix(suffix)
                own = self._quantization.scheme_of(module)
                if own is None or self._quantization.ignores(module):
                    raise ValueError(
                        f"{file}: {name} is quantised, and quantization_config says that {module} is not; "
                        "download it again"
                    )
                if own == scheme:
                    self._modules[module] = form, scheme
                    return
        if not name.endswith(_NOT_READ):
            refuse_quantized(file, name, dtype)

    def _check_module(self, module: str, form: _Format, dtypes: Mapping[str, str]) -> None:
        for suffix, allowed in {**form.required, **form.optional}.items():
            dtype = dtypes.get(module + suffix)
            if dtype is None and suffix in form.required:
                raise ValueError(f"{self.source}: the checkpoint has no {module}{suffix}; is it complete?")
            if dtype is not None and dtype not in allowed:
                raise ValueError(
                    f"{self.source}: {module}{suffix} is {dtype}, and its quantization_config asks for "
                    f"{' or '.join(allowed)}; download it again"
                )

    def _read(self, name: str) -> QuantizedMatrix | None:
        """The quantised matrix of this name; None: it is not quantised."""
        for candidate in candidate_names(name.removesuffix(_WEIGHT)):
            if candidate in self._modules:
                form, scheme = self._modules[candidate]
                return form.read(_Module(candidate, self._inner), scheme)
        return None

    def get(self, name: str) -> Float[Tensor, "*shape"] | None:
        """The tensor of this name, a quantised matrix in float32; None: there is none.

        Experts in MXFP4 have the shape that they have unquantised: experts, inputs, outputs.
        """
        if name.endswith(_WEIGHT):
            found = self._read(name)
            return self._inner.get(name) if found is None else found.widen()
        packed = self._read(name) if self._quantization.method == "mxfp4" else None
        if packed is None:
            return self._inner.get(name)
        wide = packed.widen().bfloat16()
        return wide.view(len(self._inner.get(name + "_scales")), -1, wide.shape[1]).transpose(1, 2)  # type: ignore[arg-type]

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        """The matrix of this name and shape in the nearest storage type; of experts, their outputs as rows.

        Raises:
            ValueError: it is missing or has another shape.
        """
        found = self._read(name)
        if found is None:
            return self._inner.matrix(name, outputs, inputs)
        stored = found.stored()
        if isinstance(stored, str):
            self.widened[name] = stored
            stored = _narrowest(found.widen())
        self._checked(name, torch.empty(stored.shape, device="meta"), (outputs, inputs))
        return replace(stored, release_pages=self.release_pages)

    @property
    def storage(self) -> Storage:
        """Quantised."""
        return "quantized"

    def maps(self, name: str) -> bool:
        """Whether it is not quantised."""
        return all(candidate not in self._modules for candidate in candidate_names(name.removesuffix(_WEIGHT)))

    def head_matrix(self, vocab: int, hidden: int) -> StoredMatrix:
        """The output matrix in the nearest storage type."""
        return self.matrix("lm_head.weight", vocab, hidden)

    def expert_matrices(self, name: str, count: int, outputs: int, inputs: int) -> Iterator[StoredMatrix]:
        """The matrices of all experts; of blocks, their bytes.

        Raises:
            ValueError: the tensor is missing or has another shape.
        """
        if self._read(name) is None:
            return self._inner.expert_matrices(name, count, outputs, inputs)
        whole = self.matrix(name, count * outputs, inputs)
        each = whole.data.view(count, outputs, -1)
        return (StoredMatrix(whole.kind, inputs, rows, self.release_pages) for rows in each)

    def head(self, vocab: int, hidden: int) -> Tensor:
        """The output matrix; required, as in `SafetensorsWeights`.

        Raises:
            ValueError: it is missing or has another shape.
        """
        found: Tensor = self.require("lm_head.weight", vocab, hidden)
        return found

    def release_pages(self) -> None:
        """Return the files' memory pages to the system."""
        self._inner.release_pages()


def _narrowest(values: Float[Tensor, "o i"]) -> StoredMatrix:
    """The numbers in bfloat16 where it holds them, else in float32."""
    narrow = values.bfloat16()
    return StoredMatrix.of(narrow if torch.equal(narrow.float(), values) else values)
