"""Rotary position embedding and its scaling for long contexts, read from Hugging Face and GGUF configurations.

`dynamic` and `longrope` depend on the length of the text in their papers. Here the context that the model is opened
with fixes them (as in vLLM): a token's numbers must not depend on what shares its batch, nor on later tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from foretell.utils.validation import Fields

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
_ORIGINAL = "original_max_position_embeddings"
_ROUNDING = 1e-6
"""Of a share of a head, in dimensions."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and its scaling for long contexts."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    """Tokens of context before scaling."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Factor on cosine and sine of `yarn` and `longrope`; None: by the paper's formula."""
    truncate: bool = True
    """YaRN: whether the bounds of the interpolated dimensions are rounded to integers."""
    fraction: float = 1.0
    """Share of a head's dimensions that is rotated."""
    divisors: tuple[float, ...] = ()
    """Divisors of the frequencies, in addition to the scaling (GGUF files store Llama 3's scaling this way)."""
    short_factor: tuple[float, ...] = ()
    """LongRoPE: divisors of the frequencies in a context of at most `original_context` tokens."""
    long_factor: tuple[float, ...] = ()
    """LongRoPE: divisors of the frequencies in longer contexts."""

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head, from the first on, that the tables cover."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.fraction + _ROUNDING)

    def default_context(self, trained: int) -> int:
        """Tokens of context that a model trained for `trained` positions is opened with: of `longrope` the context
        before scaling, as its two sets of factors suit short or long texts.
        """
        return min(self.original_context, trained) if self.kind == "longrope" else trained

    def longest_context(self, trained: int) -> int:
        """Tokens of context that these positions are made for."""
        if self.kind in ("dynamic", "yarn"):
            return max(trained, int(self.factor * self.original_context))
        return trained


_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Which dimensions rotate by time, height and width of an image, which for text are all the same position."""
_COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL, "finetuned", *_OF_IMAGES)
_KEYS: Mapping[RopeKind, tuple[str, ...]] = {
    "default": ("factor",),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "short_factor", "long_factor", "attention_factor"),
    "proportional": ("factor",),
}
"""Keys of the parameters of every kind; others are refused, so that no scaling is read past."""
_OLD_NAMES = {"su": "longrope"}


def read_rope(
    read: Fields, theta: float, trained: int, head_dim: int, whole: Fields | None = None, fraction: float = 1.0
) -> RopeConfig:
    """The rotary embedding that an object of a Hugging Face configuration describes.

    `trained`: the configuration's `max_position_embeddings`. `whole`: the configuration, whose own
    `original_max_position_embeddings` comes first. `theta`, `fraction`: what the object's missing keys default to.

    Raises:
        ValueError: the kind or a key is not supported, or a value is out of range.
    """
    name = read.text("rope_type", "type", default="default")
    name = _OLD_NAMES.get(name, name)
    if name not in get_args(RopeKind):
        raise ValueError(
            f"{read.source}: rotary scaling {name!r} is not supported; known: {', '.join(get_args(RopeKind))}"
        )
    kind: RopeKind = name  # type: ignore[assignment]
    unknown = [key for key, value in read.raw.items() if value is not None and key not in _COMMON_KEYS + _KEYS[kind]]
    if unknown:
        raise read.wrong(unknown[0], f"left out: the {kind} rotary embedding has no such key", read.raw[unknown[0]])
    rope = RopeConfig(
        theta=read.positive("rope_theta", default=theta),
        kind=kind,
        original_context=_original_context(read, trained, whole),
        fraction=read.positive("partial_rotary_factor", default=fraction),
    )
    dim = rope.rotary_dim(head_dim)
    if rope.fraction > 1 or dim < 2 or dim % 2:
        raise read.wrong("partial_rotary_factor", f"an even part of {head_dim} dimensions", rope.fraction)
    return _read_scaling(read, rope, trained, dim)


def _original_context(read: Fields, trained: int, whole: Fields | None) -> int:
    holder = whole if whole is not None and whole.has(_ORIGINAL) else read
    return holder.integer(_ORIGINAL, default=trained, least=1)


def _read_scaling(read: Fields, rope: RopeConfig, trained: int, dim: int) -> RopeConfig:
    if rope.kind == "default":
        if read.number("factor", default=1.0) != 1:
            raise read.wrong("factor", "1 without a scaling; name one with rope_type", read.raw["factor"])
        return replace(rope, original_context=trained)
    if rope.kind in ("yarn", "longrope"):
        rope = replace(rope, factor=read.positive("factor", default=trained / rope.original_context))
        return _read_yarn(read, rope) if rope.kind == "yarn" else _read_longrope(read, rope, dim)
    rope = replace(rope, factor=read.positive("factor", default=1.0 if rope.kind == "proportional" else None))
    if rope.kind == "dynamic":
        if dim <= 2:
            raise read.wrong("rope_type", f"another one for {dim} rotary dimensions", rope.kind)
        return replace(rope, original_context=trained)
    if rope.kind != "llama3":
        return rope
    low, high = read.positive("low_freq_factor", default=1.0), read.positive("high_freq_factor", default=4.0)
    if high < low:
        raise read.wrong("high_freq_factor", f"at least low_freq_factor {low}", high)
    return replace(rope, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(read: Fields, rope: RopeConfig) -> RopeConfig:
    """YaRN's own keys; its attention factor may also be given by `mscale` and `mscale_all_dim` (DeepSeek)."""
    if rope.theta <= 1:
        raise read.wrong("rope_theta", "above 1 for yarn", rope.theta)
    attention = _attention_factor(read)
    scales = [read.number(name, default=0.0, least=0) for name in ("mscale", "mscale_all_dim")]
    if attention is None and all(scales):
        above, below = (0.1 * scale * math.log(max(rope.factor, 1)) + 1 for scale in scales)
        attention = above / below
    return replace(
        rope,
        beta_fast=read.number("beta_fast", default=32.0, least=0) or 32.0,
        beta_slow=read.number("beta_slow", default=1.0, least=0) or 1.0,
        attention_factor=attention,
        truncate=read.flag("truncate", default=True),
    )


def _attention_factor(read: Fields) -> float | None:
    return read.number("attention_factor", least=0) if read.has("attention_factor") else None


def _read_longrope(read: Fields, rope: RopeConfig, dim: int) -> RopeConfig:
    factors = {name: read.numbers(name) for name in ("short_factor", "long_factor")}
    for name, values in factors.items():
        if len(values) != dim // 2 or min(values) <= 0:
            raise read.wrong(name, f"{dim // 2} numbers above zero", read.raw[name])
    attention = _attention_factor(read)
    if attention is None and rope.original_context == 1:
        raise read.wrong(_ORIGINAL, "above 1 for longrope", 1)
    return replace(
        rope, attention_factor=attention, short_factor=factors["short_factor"], long_factor=factors["long_factor"]
    )


_GGUF_SCALING, _GGUF_OLD_FACTOR = "rope.scaling.", "rope.scale_linear"
_GGUF_KEYS = {
    "type", "factor", "original_context_length", "finetuned", "attn_factor", "yarn_log_multiplier", "yarn_beta_fast",
    "yarn_beta_slow", "yarn_ext_factor", "yarn_attn_factor",
}  # fmt: skip
_GGUF_FIXED = {"yarn_log_multiplier": 0.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0}
"""Keys of which only llama.cpp's default is supported."""


def read_gguf_rope(read: Fields, trained: int, head_dim: int, factors: Mapping[str, Sequence[float]]) -> RopeConfig:
    """The rotary embedding of a GGUF file, as llama.cpp reads it.

    `factors`: the file's tensors `rope_freqs`, `rope_factors_short` and `rope_factors_long`, those that it has.

    Raises:
        ValueError: the kind or a key is not supported, or a value is out of range.
    """
    for key, value in read.raw.items():
        if key.startswith(_GGUF_SCALING) and key.removeprefix(_GGUF_SCALING) not in _GGUF_KEYS:
            raise read.wrong(key, "left out: this key is not supported", value)
    for name, default in _GGUF_FIXED.items():
        if read.number(_GGUF_SCALING + name, default=default) != default:
            raise read.wrong(
                _GGUF_SCALING + name, f"{default:g}: no other value is supported", read.raw[_GGUF_SCALING + name]
            )
    scaling = Fields({name: read.raw.get(_GGUF_SCALING + name) for name in _GGUF_KEYS}, read.source, "rope scaling: ")
    if not scaling.number("factor", default=0.0):
        scaling = Fields({**scaling.raw, "factor": read.raw.get(_GGUF_OLD_FACTOR)}, read.source, "rope scaling: ")
    kind = scaling.text("type", default="linear" if scaling.number("factor", default=0.0) else "none")
    values: dict[str, Any] = {
        "rope_type": "longrope" if "rope_factors_long" in factors else "default" if kind == "none" else kind,
        _ORIGINAL: scaling.raw["original_context_length"],
    }
    attention = scaling.positive("attn_factor", default=1.0)
    if values["rope_type"] == "longrope":
        values |= {f"{name}_factor": list(factors.get(f"rope_factors_{name}", ())) for name in ("short", "long")}
        values["attention_factor"] = attention
    else:
        factor = scaling.positive("factor", default=1.0)
        values["factor"] = None if kind == "none" else factor
        if kind == "yarn":
            values |= {f"beta_{name}": scaling.raw[f"yarn_beta_{name}"] for name in ("fast", "slow")}
            values["attention_factor"] = attention * (0.1 * math.log(max(factor, 1.0)) + 1)
        elif attention != 1:
            raise scaling.wrong("attn_factor", "1 without yarn or longrope", attention)
    rotary = read.integer("rope.dimension_count", default=head_dim, least=2, most=head_dim)
    rope = read_rope(
        Fields(values, read.source, "rope scaling: "),
        read.positive("rope.freq_base", default=10000.0),
        trained,
        head_dim,
        fraction=rotary / head_dim,
    )
    divisors = tuple(factors.get("rope_freqs", ()))
    if divisors and (len(divisors) != rotary // 2 or min(divisors) <= 0):
        raise read.wrong("rope_freqs.weight", f"{rotary // 2} numbers above zero", list(divisors))
    return replace(rope, divisors=divisors)
