"""How the weights of a quantised safetensors checkpoint are stored: `quantization_config` of its `config.json`."""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from foretell.utils.validation import Fields

Layout = Literal["gptq", "awq", "packed", "integers", "float8", "mxfp4", "nvfp4", "mlx"]
"""Tensors of a quantised matrix: those of GPTQ, of AWQ (gemm), `weight_packed` of compressed-tensors, a `weight` of
int8 or of float8 with scales, blocks with shared exponents (OCP microscaling) or scales of float8, and words with
scales and biases."""
QUANTIZED_ADVICE = "take the checkpoint in bfloat16, float16 or float32, or a GGUF file of the model"
"""Advice in the error about a quantised checkpoint that is not supported."""
_KEYS = ("quantization_config", "compression_config", "quantization")
_ANY_LINEAR = "Linear"
_PATTERN = "re:"
_GPTQ_BITS, _PACKED_BITS = (2, 3, 4, 8), tuple(range(1, 9))
_GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""What is added to a stored zero point, by `checkpoint_format`."""
_COMPRESSED_LAYOUTS: Mapping[str, Layout] = {
    "pack-quantized": "packed", "int-quantized": "integers", "float-quantized": "float8",
    "mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4",
}  # fmt: skip
_MX_GROUP, _NV_GROUP = 32, 16
MLX = "MLX"
"""Method of a `config.json` that gives bits and names none."""
_MLX_BITS, _MLX_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)


@dataclass(frozen=True)
class Scheme:
    """How the matrices of some modules are stored."""

    layout: Layout
    bits: int
    group: int = 0
    """Inputs that share a scale; 0: all."""
    symmetric: bool = False
    """Whether there are no zero points in the file."""
    zero_offset: int = 0
    """Added to stored zero points."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, where it is not one output."""


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a checkpoint: schemes by the modules that they apply to."""

    method: str
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    """Targets and scheme; a target is a module's name, `re:` with a pattern of names, or `Linear` for all."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: names, and patterns after `re:`."""

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module; a name or pattern of it counts more than `Linear`. None: no target is this module."""
        named = (scheme for targets, scheme in self.schemes if _matches(module, targets))
        general = (scheme for targets, scheme in self.schemes if _ANY_LINEAR in targets)
        return next(named, None) or next(general, None)

    def ignores(self, module: str) -> bool:
        """Whether the configuration says that this module is not quantised."""
        return _matches(module, self.ignored)


def _matches(module: str, targets: tuple[str, ...]) -> bool:
    return any(
        re.match(target.removeprefix(_PATTERN), module) is not None if target.startswith(_PATTERN) else target == module
        for target in targets
    )


def quantization_method(raw: Mapping[str, Any]) -> str | None:
    """The quantisation method named in a `config.json`; None: there is none."""
    section = _section(raw)
    if section is None:
        return None
    key, value = section
    values = value if isinstance(value, Mapping) else {}
    method = values.get("quant_method") or values.get("format") or values.get("quant_algo")
    return str(method or (MLX if "bits" in values else key))


def _section(raw: Mapping[str, Any]) -> tuple[str, Any] | None:
    text = raw.get("text_config")
    for holder in (raw, text if isinstance(text, Mapping) else {}):
        for key in _KEYS:
            if holder.get(key):
                return key, holder[key]
    return None


def refuse_quantization(raw: Mapping[str, Any], source: str) -> None:
    """Refuse the `config.json` of a quantised checkpoint.

    Raises:
        ValueError: it names a quantisation.
    """
    method = quantization_method(raw)
    if method is not None:
        raise _unsupported(source, method)


def parse_quantization(raw: Mapping[str, Any], source: str) -> Quantization | None:
    """The quantisation that a `config.json` describes; None: there is none.

    Activations that the configuration quantises too stay in the dtype of the model.

    Raises:
        ValueError: a method, format or number of bits that is not supported, or a value of a wrong type.
    """
    section, method = _section(raw), quantization_method(raw)
    if section is None or method is None:
        return None
    key, value = section
    if method not in _METHODS or not isinstance(value, Mapping):
        raise _unsupported(source, method)
    return _METHODS[method](Fields(value, source, f"{key}."))


def _unsupported(source: str, what: str) -> ValueError:
    return ValueError(f"{source}: a checkpoint quantised with {what}, which is not supported; {QUANTIZED_ADVICE}")


def _one_of(read: Fields, name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise read.wrong(name, f"one of {', '.join(map(str, known))}", value)


def _group(read: Fields, name: str = "group_size") -> int:
    """Inputs per scale; the file's -1 and null become 0."""
    size = int(read.number(name, default=-1))
    if size != -1 and size < 1:
        raise read.wrong(name, "-1 or at least 1", size)
    return max(size, 0)


def _gptq(read: Fields) -> Quantization:
    """GPTQ (Frantar et al., arXiv 2210.17323) as AutoGPTQ and GPTQModel write it."""
    bits, stored = read.integer("bits"), read.text("checkpoint_format", default="gptq")
    _one_of(read, "bits", bits, _GPTQ_BITS)
    _one_of(read, "checkpoint_format", stored, tuple(_GPTQ_FORMATS))
    if read.flag("is_marlin_format", default=False):
        raise read.wrong("is_marlin_format", "false", True)
    if read.fields("dynamic").raw:
        raise read.wrong("dynamic", "empty: settings per module are not supported", dict(read.fields("dynamic").raw))
    scheme = Scheme("gptq", bits, _group(read), zero_offset=_GPTQ_FORMATS[stored])
    return Quantization("gptq", (((_ANY_LINEAR,), scheme),), read.texts("modules_to_not_convert"))


def _awq(read: Fields) -> Quantization:
    """AWQ (Lin et al., arXiv 2306.00978) as AutoAWQ writes it."""
    bits, version = read.integer("bits", "w_bit"), read.text("version", default="gemm").lower()
    _one_of(read, "bits", bits, (4,))
    _one_of(read, "version", version, ("gemm",))
    if not read.flag("zero_point", default=True):
        raise read.wrong("zero_point", "true", False)
    scheme = Scheme("awq", bits, _group(read, "group_size" if read.has("group_size") else "q_group_size"))
    return Quantization("awq", (((_ANY_LINEAR,), scheme),), read.texts("modules_to_not_convert"))


def _fp8(read: Fields) -> Quantization:
    """float8 weights with one scale per matrix, per output or per block (DeepSeek-V3, arXiv 2412.19437)."""
    _one_of(read, "fmt", read.text("fmt", default="e4m3"), ("e4m3", "float8_e4m3fn"))
    block = read.integers("weight_block_size")
    if block and (len(block) != 2 or min(block) < 1):
        raise read.wrong("weight_block_size", "two integers of at least 1", list(block))
    scheme = Scheme("float8", 8, symmetric=True, block=(block[0], block[1]) if block else None)
    ignored = (*read.texts("modules_to_not_convert"), *read.texts("ignored_layers"))
    return Quantization(read.text("quant_method"), (((_ANY_LINEAR,), scheme),), ignored)


def _mxfp4(read: Fields) -> Quantization:
    scheme = Scheme("mxfp4", 4, _MX_GROUP, symmetric=True)
    return Quantization("mxfp4", (((_ANY_LINEAR,), scheme),), read.texts("modules_to_not_convert"))


def _modelopt(read: Fields) -> Quantization:
    """NVFP4 as NVIDIA's Model Optimizer writes it; what it leaves out is named with wildcards."""
    _one_of(read, "quant_algo", read.text("quant_algo"), ("NVFP4",))
    scheme = Scheme("nvfp4", 4, _NV_GROUP, symmetric=True)
    ignored = tuple(_PATTERN + fnmatch.translate(name) for name in read.texts("ignore"))
    return Quantization("modelopt", (((_ANY_LINEAR,), scheme),), ignored)


def _mlx(read: Fields) -> Quantization:
    """The affine mode of `mlx.core.quantize`; a module's own settings, or false, are under its name."""
    own = {name: read.fields(name) for name, value in read.raw.items() if isinstance(value, Mapping)}
    schemes = [((_ANY_LINEAR,), _mlx_scheme(read)), *(((name,), _mlx_scheme(each)) for name, each in own.items())]
    return Quantization(MLX, tuple(schemes), tuple(name for name, value in read.raw.items() if value is False))


def _mlx_scheme(read: Fields) -> Scheme:
    bits, group = read.integer("bits"), read.integer("group_size", default=64)
    _one_of(read, "mode", read.text("mode", default="affine"), ("affine",))
    _one_of(read, "bits", bits, _MLX_BITS)
    _one_of(read, "group_size", group, _MLX_GROUPS)
    return Scheme("mlx", bits, group)


def _compressed_tensors(read: Fields) -> Quantization:
    status, stored = read.text("quantization_status", default="compressed"), read.text("format")
    _one_of(read, "quantization_status", status, ("compressed", "frozen"))
    for name in ("transform_config", "sparsity_config"):
        content = dict(read.fields(name).raw)
        if content and content.get("format") != "dense" and (content.get("config_groups") or "format" in content):
            raise read.wrong(name, "absent: it is not supported", content)
    groups = read.fields("config_groups")
    schemes = tuple(_compressed_group(groups.fields(name), stored) for name in groups.raw)
    if not schemes:
        raise read.wrong("config_groups", "a group of modules at least", {})
    return Quantization("compressed-tensors", schemes, read.texts("ignore"))


def _compressed_group(group: Fields, stored: str) -> tuple[tuple[str, ...], Scheme]:
    weights, stored = group.fields("weights"), group.text("format", default=stored)
    kind, bits = weights.text("type", default="int"), weights.integer("num_bits", default=8)
    if stored == "naive-quantized":
        stored = "int-quantized" if kind == "int" else "float-quantized"
    _one_of(group, "format", stored, (*_COMPRESSED_LAYOUTS, "naive-quantized"))
    layout = _COMPRESSED_LAYOUTS[stored]
    _one_of(weights, "type", kind, ("int",) if layout in ("packed", "integers") else ("float",))
    _one_of(weights, "num_bits", bits, {"float8": (8,), "mxfp4": (4,), "nvfp4": (4,)}.get(layout, _PACKED_BITS))
    strategy = weights.text("strategy", default="")
    _one_of(weights, "strategy", strategy, ("", "tensor", "channel", "group", "block", "tensor_group"))
    block = _block_structure(weights) if strategy == "block" else None
    for name in ("input_activations", "output_activations"):
        group.fields(name)
    scheme = Scheme(
        layout,
        bits,
        _group(weights),
        weights.flag("symmetric", default=True),
        block=block,
    )
    return group.texts("targets"), scheme


def _block_structure(weights: Fields) -> tuple[int, int]:
    """Outputs and inputs per scale: two integers, or a text as 128x128."""
    structure = weights.raw.get("block_structure")
    if isinstance(structure, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", structure):
        structure = [int(part) for part in structure.split("x")]
    block = Fields({"block_structure": structure}, weights.source).integers("block_structure")
    if len(block) != 2 or min(block) < 1:
        raise weights.wrong("block_structure", "two integers of at least 1", structure)
    return block[0], block[1]


_METHODS: Mapping[str, Callable[[Fields], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    MLX: _mlx,
}
