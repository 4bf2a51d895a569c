"""What a decoder-only language model looks like, read from any of the formats that describe one.

`ModelConfig` is neutral: Llama, Mistral, Qwen, Gemma and the mixtures of experts differ only in its values. The decoder builds a network
from it, the roofline analyzer prices one; neither reads a Hugging Face or GGUF key itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and how its frequencies are stretched for long contexts."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    fraction: float = 1.0
    divisors: tuple[float, ...] = ()
    """What each frequency is divided by on top (how GGUF files store Llama 3's scaling)."""


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts feed-forward: how many experts there are, how many each token visits, how wide they are."""

    count: int
    active: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    renormalize: bool = True
    layers: tuple[int, ...] = ()
    """Indices of the layers that have experts; the others are dense."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks and head widths. Priced by the roofline, not run by the decoder."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a decoder-only transformer.

    Widths are numbers of elements, `context` is in tokens, `layers` counts blocks.
    """

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    norm_eps: float = 1e-5
    rope: Rope | None = field(default_factory=Rope)
    local_rope: Rope | None = None
    """Rotary embedding of the sliding-window layers where it differs (Gemma 3)."""
    activation: Activation = "silu"
    gated: bool = True
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    """Added to every norm weight (1 for Gemma, whose checkpoints store weight - 1)."""
    post_norms: bool = False
    """Norms after attention and feed-forward, before the residual is added (Gemma 2 and 3)."""
    window: int = 0
    """Sliding attention window in tokens; 0: full attention."""
    window_layers: tuple[int, ...] = ()
    """Indices of the layers that use the window."""
    attention_scale: float | None = None
    """Factor on query-key products; None: head_dim ** -0.5."""
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    learned_positions: bool = False
    parallel_blocks: bool = False
    """Attention and feed-forward read the same normed input and are added together (GPT-J)."""
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"model configuration: {name} must be at least 1, found {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model configuration: {self.heads} query heads cannot share {self.kv_heads} key-value heads evenly"
            )

    @property
    def scale(self) -> float:
        """Factor on query-key products."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window_of(self, layer: int) -> int:
        """Sliding window of one layer in tokens; 0: full attention."""
        return self.window if layer in self.window_layers else 0


class _Reader:
    """Reads keys of a foreign configuration, naming the one that is missing."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source

    def need(self, *names: str) -> Any:
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        raise ValueError(
            f"{self.source}: the configuration has no {' or '.join(repr(n) for n in names)}; is it complete?"
        )

    def get(self, *names: str, default: Any = None) -> Any:
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        return default


ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma2": {"norm_offset": 1.0, "post_norms": True, "activation": "gelu_tanh", "tied": True},
    "gemma3_text": {"norm_offset": 1.0, "post_norms": True, "qk_norm": True, "activation": "gelu_tanh", "tied": True},
    "mixtral": {},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3_moe": {"qk_norm": True},
}
"""Decoder family: `model_type` to what its configuration leaves unsaid."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu",
}  # fmt: skip


def in_family(raw: Mapping[str, Any]) -> bool:
    """Whether a Hugging Face `config.json` is for `from_hf`: of the decoder family, or of no architecture at all, which `from_hf` explains."""
    return raw.get("model_type") in (None, "gemma3", *ARCHITECTURES)


def from_hf(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Read a Hugging Face `config.json` of the decoder family.

    Raises:
        ValueError: a needed key is missing, or the architecture is not of the family.
    """
    raw = raw["text_config"] | {"model_type": "gemma3_text"} if raw.get("model_type") == "gemma3" else raw
    read = _Reader(raw, source)
    kind = str(read.need("model_type"))
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{source}: the decoder does not know model_type {kind!r}; it knows {', '.join(ARCHITECTURES)}"
        )
    said = dict(ARCHITECTURES[kind])
    hidden, heads = int(read.need("hidden_size")), int(read.need("num_attention_heads"))
    layers, context = int(read.need("num_hidden_layers")), int(read.get("max_position_embeddings", default=2048))
    window, window_layers = _windows(read, kind, layers)
    rope, local_rope = _ropes(read, context)
    activation = read.get("hidden_activation", "hidden_act")
    if activation is not None and "activation" not in said:
        if activation not in _ACTIVATIONS:
            raise ValueError(f"{source}: unknown activation {activation!r}; known: {', '.join(_ACTIVATIONS)}")
        said["activation"] = _ACTIVATIONS[activation]
    if kind in ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text") and read.get("attention_bias", default=False):
        said |= {"qkv_bias": True, "output_bias": True}
    if kind == "qwen2_moe":
        said["qkv_bias"] = bool(read.get("qkv_bias", default=True))
    eos = read.get("eos_token_id", default=())
    scalar = read.get("query_pre_attn_scalar")
    return ModelConfig(
        architecture=kind,
        vocab=int(read.need("vocab_size")),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(read.get("num_key_value_heads", default=heads)),
        head_dim=int(read.get("head_dim", default=hidden // max(heads, 1))),
        ffn=int(read.get("intermediate_size", default=0) or read.need("moe_intermediate_size")),
        context=context,
        norm_eps=float(read.get("rms_norm_eps", default=1e-6)),
        rope=rope,
        local_rope=local_rope,
        tied=bool(said.pop("tied", False) or read.get("tie_word_embeddings", default=False)),
        mlp_bias=bool(read.get("mlp_bias", default=False)),
        window=window,
        window_layers=window_layers,
        attention_scale=float(scalar) ** -0.5 if scalar else None,
        attention_softcap=float(read.get("attn_logit_softcapping", default=0.0)),
        logit_softcap=float(read.get("final_logit_softcapping", default=0.0)),
        embedding_scale=hidden**0.5 if kind.startswith("gemma") else 1.0,
        experts=_experts(read, kind, layers),
        bos=read.get("bos_token_id"),
        eos=tuple(eos) if isinstance(eos, Sequence) else (int(eos),),
        **said,
    )


def _windows(read: _Reader, kind: str, layers: int) -> tuple[int, tuple[int, ...]]:
    window = int(read.get("sliding_window", default=0))
    if kind.startswith("qwen") and not read.get("use_sliding_window", default=False):
        window = 0
    if not window:
        return 0, ()
    types = read.get("layer_types")
    if types is not None:
        return window, tuple(i for i, t in enumerate(types) if t == "sliding_attention")
    if kind == "gemma2":
        return window, tuple(range(0, layers, 2))
    if kind == "gemma3_text":
        pattern = int(read.get("sliding_window_pattern", "_sliding_window_pattern", default=6))
        return window, tuple(i for i in range(layers) if (i + 1) % pattern)
    if kind.startswith("qwen"):
        return window, tuple(range(int(read.get("max_window_layers", default=layers)), layers))
    return window, tuple(range(layers))


def _ropes(read: _Reader, context: int) -> tuple[Rope, Rope | None]:
    parameters = read.get("rope_parameters", default={})
    if "full_attention" in parameters:
        full, local = (_rope(parameters[k], {}, context) for k in ("full_attention", "sliding_attention"))
        return full, local
    flat = {"rope_theta": read.get("rope_theta", default=10000.0)}
    local_theta = read.get("rope_local_base_freq")
    rope = _rope(parameters or read.get("rope_scaling", default={}), flat, context)
    return rope, None if local_theta is None else Rope(theta=float(local_theta))


def _rope(scaling: Mapping[str, Any], flat: Mapping[str, Any], context: int) -> Rope:
    values = {**flat, **scaling}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"rotary scaling {kind!r} is not supported; known: default, linear, llama3, yarn")
    attention = values.get("attention_factor")
    return Rope(
        theta=float(values.get("rope_theta", 10000.0)),
        kind=kind,
        factor=float(values.get("factor", 1.0)),
        original_context=int(values.get("original_max_position_embeddings", context)),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        beta_fast=float(values.get("beta_fast", 32.0)),
        beta_slow=float(values.get("beta_slow", 1.0)),
        attention_factor=None if attention is None else float(attention),
    )


def _experts(read: _Reader, kind: str, layers: int) -> Experts | None:
    if kind == "mixtral":
        return Experts(
            count=int(read.need("num_local_experts")),
            active=int(read.need("num_experts_per_tok")),
            ffn=int(read.need("intermediate_size")),
            layers=tuple(range(layers)),
        )
    if kind in ("qwen2_moe", "qwen3_moe"):
        step, dense = int(read.get("decoder_sparse_step", default=1)), read.get("mlp_only_layers", default=())
        shared = int(read.get("shared_expert_intermediate_size", default=0)) if kind == "qwen2_moe" else 0
        return Experts(
            count=int(read.need("num_experts", "num_local_experts")),
            active=int(read.need("num_experts_per_tok")),
            ffn=int(read.need("moe_intermediate_size")),
            shared_ffn=shared,
            shared_gate=shared > 0,
            renormalize=bool(read.get("norm_topk_prob", default=False)),
            layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
        )
    return None


def from_gguf(meta: Mapping[str, Any], source: str = "GGUF file", divisors: Sequence[float] = ()) -> ModelConfig:
    """Read the metadata of a GGUF file (keys as the format's specification names them, values already Python objects).

    `divisors`: the file's `rope_freqs.weight`, where it has one.

    Raises:
        ValueError: a needed key is missing, or the architecture is not of the family.
    """
    kinds = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
    name = str(_Reader(meta, source).need("general.architecture"))
    if name not in kinds:
        raise ValueError(f"{source}: the decoder does not know GGUF architecture {name!r}; it knows {', '.join(kinds)}")
    kind = kinds[name]
    read = _Reader({k.removeprefix(name + "."): v for k, v in meta.items()}, source)
    said = dict(ARCHITECTURES[kind])
    hidden, heads, layers = (int(read.need(k)) for k in ("embedding_length", "attention.head_count", "block_count"))
    context = int(read.need("context_length"))
    window = int(read.get("attention.sliding_window", default=0))
    pattern = {"gemma2": 2, "gemma3_text": 6}.get(kind, 1)
    windowed = tuple(i for i in range(layers) if pattern == 1 or (i + 1) % pattern) if window else ()
    return ModelConfig(
        architecture=kind,
        vocab=int(read.get("vocab_size", default=0) or len(read.need("tokenizer.ggml.tokens"))),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(read.get("attention.head_count_kv", default=heads)),
        head_dim=int(read.get("attention.key_length", "rope.dimension_count", default=hidden // max(heads, 1))),
        ffn=int(read.need("feed_forward_length")),
        context=context,
        norm_eps=float(read.get("attention.layer_norm_rms_epsilon", default=1e-6)),
        rope=_gguf_rope(read, context, divisors),
        local_rope=Rope(theta=10000.0) if kind == "gemma3_text" else None,
        window=window,
        window_layers=windowed,
        attention_softcap=float(read.get("attn_logit_softcapping", default=0.0)),
        logit_softcap=float(read.get("final_logit_softcapping", default=0.0)),
        embedding_scale=hidden**0.5 if kind.startswith("gemma") else 1.0,
        bos=read.get("tokenizer.ggml.bos_token_id"),
        eos=tuple(int(meta[k]) for k in ("tokenizer.ggml.eos_token_id",) if k in meta),
        # llama.cpp folds Gemma's "+ 1" into the norm weights it stores.
        **(said | {"norm_offset": 0.0}),
    )


def _gguf_rope(read: _Reader, context: int, divisors: Sequence[float]) -> Rope:
    kind = str(read.get("rope.scaling.type", default="none"))
    values = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": read.get("rope.freq_base", default=10000.0),
        "factor": read.get("rope.scaling.factor", default=1.0),
        "original_max_position_embeddings": read.get("rope.scaling.original_context_length", default=context),
    }
    return replace(_rope(values, {}, context), divisors=tuple(divisors))
