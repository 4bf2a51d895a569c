"""Configuration of decoder-only language models, read from Hugging Face `config.json` files and GGUF metadata.

`ModelConfig` does not depend on the format or the family: Llama, Mistral, Qwen, Gemma and mixtures of experts differ
only in its values. The decoder and the roofline analyzer use it and read no Hugging Face or GGUF key themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from typing import Any, Literal

from foretell.model.attention_config import AttentionSizes, LayerInputConfig, QueryScaling
from foretell.model.families import FAMILIES
from foretell.model.rope_config import RopeConfig as RopeConfig
from foretell.model.rope_config import read_gguf_rope, read_rope
from foretell.model.state_config import StateConfig, read_state, with_layer_types
from foretell.utils.validation import Fields

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "clamped_swiglu", "relu2"]
"""`clamped_swiglu` is that of gpt-oss (arXiv 2508.10925): (up + 1) * gate * sigmoid(1.702 gate) on clamped factors.
`relu2`, relu(up) ** 2 (arXiv 2109.08668), has no gate.
"""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Constants of `clamped_swiglu`: the factor within its sigmoid, and the bound on both factors."""
CacheDtype = Literal["auto", "int8"]


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts layers: number of experts, experts per token (`active`), and intermediate sizes (`ffn`)."""

    count: int
    active: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    renormalize: bool = True
    layers: tuple[int, ...] = ()
    """Indices of the layers with experts; the others are dense."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits."""
    router_bias: bool = False
    selection_bias: bool = False
    """Whether a bias is added to the scores where experts are chosen, but not to their weights (DeepSeek-V3)."""
    groups: int = 1
    active_groups: int = 1
    """Experts are chosen from the best `active_groups` of `groups` groups (DeepSeek-V2, arXiv 2405.04434)."""
    ranked_by: int = 1
    """A group's rank is the sum of its `ranked_by` best scores."""
    scale: float = 1.0
    """Factor on the weights of the experts."""
    bias: bool = False
    """Whether the matrices of the experts have biases."""
    weighs_inputs: bool = False
    """Whether an expert's weight multiplies its inputs instead of its outputs (Llama 4)."""
    beside_dense: bool = False
    """Whether a dense network runs beside the experts, each with norms of its own (Gemma 4)."""

    def __post_init__(self) -> None:
        if self.count % self.groups or not 1 <= self.active_groups <= self.groups:
            raise ValueError(
                f"model configuration: {self.count} experts cannot be chosen from {self.active_groups} of "
                f"{self.groups} groups of equal size"
            )
        size = self.count // self.groups
        if self.active > size * self.active_groups or (self.active_groups < self.groups and self.ranked_by > size):
            raise ValueError(
                f"model configuration: {self.active} experts per token do not fit {self.active_groups} groups of {size}"
            )


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks and head widths; `q_rank` 0: queries have no
    latent vector.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved_rope: bool = True
    """Whether the checkpoint stores the two halves of a rotary pair side by side."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and arithmetic of a decoder-only transformer; `context` is in tokens."""

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    """Tokens that the model is opened for; see `with_context`."""
    longest_context: int = 0
    """Tokens that its positions are made for; 0: `context`."""
    norm_eps: float = 1e-5
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    """Rotary embedding of the sliding-window layers; None: as in the other layers. Gemma 3 has one."""
    activation: Activation = "silu"
    gated: bool = True
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    unit_qk_norm: bool = False
    """Queries and keys have a norm without weights in the layers with rotary positions (Llama 4)."""
    value_norm: bool = False
    """Values have a norm without weights (Gemma 4)."""
    norm_offset: float = 0.0
    """Added to every norm weight (1 for Gemma, whose checkpoints store weight - 1)."""
    post_norms: bool = False
    """Norms of the outputs of attention and feed-forward, before they are added to the residual (Gemma 2 and 3)."""
    window: int = 0
    """Sliding attention window in tokens; 0: full attention."""
    window_layers: tuple[int, ...] = ()
    """Indices of the sliding-window layers."""
    chunked: bool = False
    """The window of a token begins at a multiple of `window` (Llama 4)."""
    local_head_dim: int = 0
    """`head_dim` of the sliding-window layers; 0: as in the other layers. Gemma 4 has another one."""
    local_kv_heads: int = 0
    kv_layers: tuple[int, ...] = ()
    """For every layer the one whose keys and values it reads; empty: its own."""
    reader_ffn: int = 0
    """`ffn` of the layers that read the keys and values of another one; 0: as in the other layers."""
    values_are_keys: bool = False
    """The key projection also gives the values, before norm and rotation, in layers with full attention (Gemma 4)."""
    query_scaling: QueryScaling | None = None
    layer_inputs: LayerInputConfig | None = None
    layer_scales: bool = False
    """Whether a number multiplies the residual stream after each layer (Gemma 4)."""
    attention_scale: float | None = None
    """Factor on query-key products; None: head_dim ** -0.5."""
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor on the outputs of attention and feed-forward before they are added to the residual (Granite)."""
    logit_scale: float = 1.0
    """Factor on the logits (Granite)."""
    unrotated_layers: tuple[int, ...] = ()
    """Indices of the attention layers without rotary positions (NoPE, arXiv 2305.19466)."""
    attention_free_layers: tuple[int, ...] = ()
    """Indices of the layers that are a feed-forward network alone (Nemotron-H, arXiv 2504.03624)."""
    mlp_free_layers: tuple[int, ...] = ()
    """Indices of the layers without a feed-forward network."""
    sinks: bool = False
    """Whether a learned score per query head joins the softmax over its keys (gpt-oss, arXiv 2508.10925)."""
    experts: MoEConfig | None = None
    latent: MLAConfig | None = None
    state: StateConfig | None = None
    """Layers with a recurrent state instead of attention."""
    attention_gate: bool = False
    """The query projection also gives a gate per head, whose sigmoid multiplies the output of attention."""
    learned_positions: bool = False
    parallel_blocks: bool = False
    """Attention and feed-forward have the same normed input, and both outputs are added to the residual (GPT-J)."""
    cache_dtype: CacheDtype = "auto"
    """Numbers of cached keys and values: int8 with one scale per token and head, or as the model computes."""
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"model configuration: {name} must be at least 1, found {getattr(self, name)}")
        for kv_heads in (self.kv_heads, self.local_kv_heads or self.kv_heads):
            if self.heads % kv_heads:
                raise ValueError(
                    f"model configuration: {self.heads} query heads cannot share {kv_heads} key-value heads evenly"
                )

    @property
    def scale(self) -> float:
        """Factor on query-key products."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a recurrent state."""
        return () if self.state is None else tuple(i for i in self.state.layers if i < self.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with keys and values."""
        others = {*self.state_layers, *self.attention_free_layers}
        return tuple(i for i in range(self.layers) if i not in others)

    def window_of(self, layer: int) -> int:
        """Sliding window of one layer in tokens; 0: full attention."""
        return self.window if layer in self.window_layers else 0

    def sizes_of(self, layer: int) -> AttentionSizes:
        """Sizes of the attention heads of one layer."""
        local = layer in self.window_layers
        kv_heads, head_dim = local * self.local_kv_heads or self.kv_heads, local * self.local_head_dim or self.head_dim
        return AttentionSizes(self.heads, kv_heads, head_dim)

    def cache_sizes_of(self, layer: int) -> AttentionSizes:
        """Sizes of the attention heads of one layer over its cache: latent attention has one key-value head there."""
        if self.latent is None:
            return self.sizes_of(layer)
        return AttentionSizes(self.heads, 1, self.latent.kv_rank + self.latent.rope_dim)

    def kv_layer_of(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        return self.kv_layers[layer] if self.kv_layers else layer

    def ffn_of(self, layer: int) -> int:
        """Width of the dense feed-forward network of one layer."""
        return self.reader_ffn if self.reader_ffn and self.kv_layer_of(layer) != layer else self.ffn

    def query_scaling_of(self, layer: int) -> QueryScaling | None:
        """The scaling of one layer's queries."""
        scaling = self.query_scaling
        return None if scaling is None or (scaling.unrotated_only and layer not in self.unrotated_layers) else scaling


_GEMMA4: Mapping[str, Any] = {
    "post_norms": True, "qk_norm": True, "value_norm": True, "activation": "gelu_tanh", "layer_scales": True,
    "tied": True,
}  # fmt: skip
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
    "qwen3_next": {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True},
    "qwen3_5_text": {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True},
    "qwen3_5_moe_text": {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True},
    "lfm2": {"qk_norm": True, "tied": True},
    "granite": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "granitemoehybrid": {},
    "nemotron_h": {"gated": False},
    "smollm3": {"tied": True},
    "gpt_oss": {"sinks": True},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "llama4_text": {},
    "ministral3": {},
}
"""Supported values of `model_type`, and the settings that their `config.json` does not contain."""

_QWEN: Mapping[str, Any] = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA: Mapping[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
_LATENT_HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_QWEN_HYBRID: Mapping[str, Any] = {
    "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25, "hidden_act": "silu",
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**_QWEN, "num_key_value_heads": 32},
    "qwen3": {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "gemma2": {
        **_GEMMA, "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6},
    "mixtral": {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "num_experts": 8,
    },
    "qwen2_moe": {
        **_QWEN, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        **_QWEN, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "qwen3_next": {
        **_QWEN_HYBRID, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
    },
    "qwen3_5_text": {**_QWEN_HYBRID, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {
        **_QWEN_HYBRID, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
    },
    "granite": {"max_position_embeddings": 2048},
    "granitemoe": {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoeshared": {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoehybrid": {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    "nemotron_h": {
        "max_position_embeddings": 4096, "num_key_value_heads": 8, "layer_norm_epsilon": 1e-5,
        "num_experts_per_tok": 2, "n_routed_experts": 8, "moe_intermediate_size": 7688,
    },
    "smollm3": {"max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6},
    "lfm2": {"max_position_embeddings": 128000, "num_key_value_heads": 8, "rope_theta": 1e6, "eos_token_id": 2},
    "gpt_oss": {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0, "num_experts_per_tok": 4, "num_local_experts": 128, "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096,
        },
        "attention_bias": True, "swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT,
    },
    "deepseek_v2": {"max_position_embeddings": 2048, "n_shared_experts": 2, "q_lora_rank": 1536, **_LATENT_HEADS},
    "deepseek_v3": {
        "max_position_embeddings": 4096, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8,
        "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "q_lora_rank": 1536, **_LATENT_HEADS,
    },
    "glm4_moe": {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": {
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "n_shared_experts": 1, "routed_scaling_factor": 1.8,
        "num_experts_per_tok": 4, "norm_topk_prob": True, "q_lora_rank": 768,
        **_LATENT_HEADS, "qk_nope_head_dim": 192, "v_head_dim": 256,
    },
    "gemma4_text": {"max_position_embeddings": 131072, "bos_token_id": 2, "eos_token_id": 1},
    "gemma4_unified_text": {
        "max_position_embeddings": 262144, "bos_token_id": 2, "eos_token_id": 1, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    "llama4_text": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
    "ministral3": {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip
"""The defaults of transformers for keys missing in `config.json`, by `model_type`, where they differ from ours.

Published Gemma files omit even sizes. For other types sizes are required, so that a damaged file is recognised.
"""

_LATENT_KINDS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Architectures with latent attention."""
_GLM_FLAGS = {"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"}
_TEXT_MODELS = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text", "llama4": "llama4_text",
    "mistral3": "mistral", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
"""The language models of multimodal values of `model_type`; vision parts are not read."""
_GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Values of `model_type` with gated attention beside gated DeltaNet layers."""
_GRANITE = ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid")
_GRANITE_EXPERTS = _GRANITE[1:]
"""Values of `model_type` with multipliers."""
_OPTIONAL_BIAS = ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "smollm3", *_GATED, *_GRANITE)
"""Values of `model_type` whose attention has biases on request."""
_UNWINDOWED = ("llama", "lfm2", "nemotron_h", *_GATED, *_GRANITE)
_SHARED_EXPERT = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu",
    "relu": "relu",
}  # fmt: skip
_NORM_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
_MAX_LAYERS = 10_000
_MAX_CONTEXT = 2**24
"""Tokens; the longest context of a published model is 10 million."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
"""Number of layers of Gemma's 27B models, by which llama.cpp recognises them; only their attention scale is
(hidden / heads) ** -0.5.
"""
_GGUF_KINDS = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss",
}  # fmt: skip
"""`model_type` of every supported architecture of GGUF files; `llama` with experts is Mixtral."""
_GGUF_FIXED: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {"qkv_bias": True, "output_bias": True, "activation": "clamped_swiglu"},
}
"""Settings that GGUF files do not contain and `config.json` does."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
_END_OF_TURN_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end a chat turn; llama.cpp uses these names where a file has no `eot_token_id`."""
_HARMONY_ENDS = ("<|return|>", "<|call|>")
"""Tokens that end an answer of gpt-oss; `<|end|>` ends only one of its messages."""
_CONTROL_TOKEN = 3
"""The token type of control tokens in GGUF."""


def is_decoder_family(raw: Mapping[str, Any]) -> bool:
    """Whether `from_hf` handles a `config.json`: its `model_type` is supported, or missing (then `from_hf` raises)."""
    kind, text = raw.get("model_type"), raw.get("text_config")
    if kind == "mistral3" and isinstance(text, Mapping):
        kind = text.get("model_type") or kind
    return not isinstance(kind, str) or kind in _TEXT_MODELS or kind in ARCHITECTURES


def from_hf(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Read a Hugging Face `config.json`; missing keys have the defaults of transformers.

    Raises:
        ValueError: a required key is missing, a value has the wrong type or is out of range, or the architecture is not
            supported.
    """
    raw = with_layer_types(_text_config(raw, source), source)
    kind = Fields(raw, source).text("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{source}: the decoder does not know model_type {kind!r}; it knows {', '.join(ARCHITECTURES)}"
        )
    read, gemma = Fields({**DEFAULTS[kind], **raw}, source), kind.startswith("gemma")
    if kind in FAMILIES:
        return _from_family(read, kind)
    fixed = dict(ARCHITECTURES[kind])
    hidden, heads = (read.integer(k, least=1) for k in ("hidden_size", "num_attention_heads"))
    layers = read.integer("num_hidden_layers", least=1, most=_MAX_LAYERS)
    context = read.integer("max_position_embeddings", least=1, most=_MAX_CONTEXT)
    window, window_layers = _windows(read, kind, layers)
    latent = _latent(read, kind)
    head_dim = latent.nope_dim + latent.rope_dim if latent else _hf_head_dim(read, kind, hidden // heads)
    rope, local_rope = _ropes(read, kind, context, head_dim)
    if latent is not None:
        rope = _latent_rope(read, rope, latent)
    fixed |= _activation(read, *(["hidden_activation"] if gemma else ["hidden_act", "hidden_activation"]))
    if kind in _OPTIONAL_BIAS and read.flag("attention_bias", default=False):
        fixed |= {"qkv_bias": True, "output_bias": True}
    if kind == "glm4_moe":
        fixed |= {name: read.flag(key, default=False) for name, key in _GLM_FLAGS.items()}
    if kind == "qwen2_moe":
        fixed["qkv_bias"] = read.flag("qkv_bias", default=True)
    if kind == "gpt_oss":
        fixed["activation"] = _clamped_swiglu(read)
    if kind == "nemotron_h":
        fixed |= _single_mixers(read)
    if gemma and read.flag("use_bidirectional_attention", default=False):
        raise ValueError(f"{source}: use_bidirectional_attention is not supported: the decoder is causal")
    tied = read.flag(
        *(["tie_embedding"] if kind == "lfm2" else []), "tie_word_embeddings", default=bool(fixed.pop("tied", False))
    )

    def multiplier(name: str) -> float:
        return read.positive(name, default=1.0) if kind in _GRANITE else 1.0

    return _checked(
        source,
        architecture=kind,
        vocab=read.integer("vocab_size", least=1),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if latent else read.integer("num_key_value_heads", default=heads, least=1),
        head_dim=head_dim,
        latent=latent,
        ffn=_ffn(read, kind),
        **_contexts(rope, context),
        norm_eps=read.number(*_NORM_EPS, default=1e-5 if kind == "lfm2" else 1e-6, least=0),
        rope=rope,
        local_rope=local_rope,
        tied=tied,
        mlp_bias=kind in ("llama", "granite", "smollm3", "nemotron_h") and read.flag("mlp_bias", default=False),
        window=window,
        window_layers=window_layers,
        attention_scale=_latent_scale(read, rope, head_dim) if latent else _attention_scale(read, kind),
        attention_softcap=read.number("attn_logit_softcapping", default=0.0, least=0) if gemma else 0.0,
        logit_softcap=read.number("final_logit_softcapping", default=0.0, least=0) if gemma else 0.0,
        embedding_scale=hidden**0.5 if gemma else multiplier("embedding_multiplier"),
        residual_scale=multiplier("residual_multiplier"),
        logit_scale=1 / multiplier("logits_scaling"),
        unrotated_layers=_unrotated(read, kind, layers),
        experts=_experts(read, kind, layers),
        state=read_state(read, kind, layers),
        bos=next(iter(read.integers("bos_token_id")), None),
        eos=eos_token_ids(read),
        **fixed,
    )


def _from_family(read: Fields, kind: str) -> ModelConfig:
    """A configuration whose family has a reader of its own."""
    layers = read.integer("num_hidden_layers", least=1, most=_MAX_LAYERS)
    values = {**ARCHITECTURES[kind], **FAMILIES[kind](read, layers)}
    values |= _activation(read, "hidden_activation", "hidden_act")
    experts = values.pop("experts", None)
    return _checked(
        read.source,
        architecture=kind,
        vocab=read.integer("vocab_size", least=1),
        hidden=read.integer("hidden_size", least=1),
        layers=layers,
        heads=read.integer("num_attention_heads", least=1),
        **_contexts(values["rope"], read.integer("max_position_embeddings", least=1, most=_MAX_CONTEXT)),
        norm_eps=read.number("rms_norm_eps", default=1e-6, least=0),
        tied=read.flag("tie_word_embeddings", default=values.pop("tied", False)),
        experts=None if experts is None else MoEConfig(**experts),
        bos=next(iter(read.integers("bos_token_id")), None),
        eos=eos_token_ids(read),
        **values,
    )


def _activation(read: Fields, *names: str) -> dict[str, Activation]:
    """The activation under one of these keys; none where they are missing."""
    name = read.text(*names, default="")
    if name and name not in _ACTIVATIONS:
        raise ValueError(f"{read.source}: unknown activation {name!r}; known: {', '.join(_ACTIVATIONS)}")
    return {"activation": _ACTIVATIONS[name]} if name else {}


def _attention_scale(read: Fields, kind: str) -> float | None:
    """Factor on query-key products; None: by the width of a head."""
    if kind in _GRANITE:
        return read.positive("attention_multiplier", default=1.0)
    if kind.startswith("gemma") and read.has("query_pre_attn_scalar"):
        return float(read.positive("query_pre_attn_scalar") ** -0.5)
    return None


def _unrotated(read: Fields, kind: str, layers: int) -> tuple[int, ...]:
    """Layers without rotary positions."""
    nope = kind == "granitemoehybrid" and read.text("position_embedding_type", default="nope") != "rope"
    if nope or kind == "nemotron_h":
        return tuple(range(layers))
    if kind != "smollm3":
        return ()
    interval = read.integer("no_rope_layer_interval", default=4, least=1)
    rotated = read.integers("no_rope_layers") or tuple(int((i + 1) % interval != 0) for i in range(layers))
    if len(rotated) != layers:
        raise read.wrong("no_rope_layers", f"{layers} of 0 (not rotated) or 1", list(rotated))
    return tuple(i for i, rotates in enumerate(rotated) if not rotates)


def _ffn(read: Fields, kind: str) -> int:
    """Width of the dense feed-forward networks, or of the experts where all are experts."""
    if kind == "granitemoehybrid":
        return read.integer("shared_intermediate_size", default=1024, least=1)
    if kind != "lfm2":
        return read.integer("intermediate_size", default=0) or read.integer("moe_intermediate_size", least=1)
    width = read.integer("block_ff_dim", "intermediate_size", least=1)
    if not read.flag("block_auto_adjust_ff_dim", default=True):
        return width
    multiple = read.integer("block_multiple_of", default=256, least=1)
    scaled = int(read.positive("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
    return -(-scaled // multiple) * multiple


def _single_mixers(read: Fields) -> dict[str, Any]:
    """Settings of Nemotron-H, whose layers are Mamba-2, attention, a feed-forward network or a mixture of experts."""
    activation = read.text("mlp_hidden_act", default="relu2")
    if activation != "relu2":
        raise read.wrong("mlp_hidden_act", "relu2: no other activation is supported for nemotron_h", activation)
    types = read.texts("layer_types")
    networks = tuple(i for i, kind in enumerate(types) if kind in ("mlp", "moe"))
    return {
        "activation": "relu2",
        "attention_free_layers": networks,
        "mlp_free_layers": tuple(i for i in range(len(types)) if i not in networks),
    }


def _clamped_swiglu(read: Fields) -> Activation:
    """The activation of gpt-oss, whose constants are fixed here."""
    for name, known in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if read.number(name) != known:
            raise read.wrong(name, f"{known}: no other value is supported", read.raw[name])
    return "clamped_swiglu"


def _contexts(rope: RopeConfig, trained: int) -> dict[str, int]:
    """The context and the longest context of a model that was trained for so many positions."""
    context, longest = rope.default_context(trained), rope.longest_context(trained)
    return {"context": context, "longest_context": longest if longest != context else 0}


def with_context(config: ModelConfig, context: int | None) -> ModelConfig:
    """The configuration of a model that is opened for texts of `context` tokens; None: as it is.

    Raises:
        ValueError: its positions do not reach so far.
    """
    if context is None:
        return config
    longest = config.longest_context or config.context
    if not 1 <= context <= longest:
        raise ValueError(
            f"a context of {context} tokens was asked for, but the positions of this model are made for 1 to {longest}"
            + "; scale them for longer texts (rope_scaling; on the command line, for example, --rope-scaling "
            '\'{"rope_type": "yarn", "factor": 4.0}\')' * (context > longest)
        )
    return replace(config, context=context, longest_context=longest)


def with_rope_scaling(config: ModelConfig, parameters: Mapping[str, Any] | None) -> ModelConfig:
    """The configuration with other rotary scaling in its full-attention layers, given as `rope_parameters` of a
    Hugging Face configuration; None: as it is. The context grows by the factor.

    Raises:
        ValueError: the model has no rotary positions, or the parameters are invalid.
    """
    if parameters is None:
        return config
    old = config.rope
    if old is None:
        raise ValueError("rope_scaling was given, but this model has no rotary positions")
    trained = (config.longest_context or config.context) if old.kind == "default" else old.original_context
    read = Fields(parameters, "rope_scaling")
    rope = read_rope(read, old.theta, trained, config.head_dim, fraction=old.fraction)
    longest = max(trained, int(rope.factor * rope.original_context))
    return replace(config, rope=rope, context=longest, longest_context=0)


def eos_token_ids(read: Fields, *names: str) -> tuple[int, ...]:
    """End-of-sequence tokens under these keys (default: `eos_token_id`); each holds a token or a list of tokens."""
    return tuple(dict.fromkeys(token for name in names or ("eos_token_id",) for token in read.integers(name)))


def _text_config(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The language model of a multimodal configuration; other configurations unchanged."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in _TEXT_MODELS:
        return raw
    whole = Fields(raw, source)
    text = dict(whole.fields("text_config").raw)
    eos = eos_token_ids(whole) + eos_token_ids(Fields(text, source))
    own = text.get("model_type") if kind == "mistral3" else None
    text |= {"model_type": own or _TEXT_MODELS[kind]} | ({"eos_token_id": list(eos)} if eos else {})
    return text | ({"tie_word_embeddings": raw["tie_word_embeddings"]} if whole.has("tie_word_embeddings") else {})


def _checked(source: str, **values: Any) -> ModelConfig:
    try:
        return ModelConfig(**values)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _head_dim(read: Fields, names: tuple[str, ...], default: int) -> int:
    found = read.integer(*names, default=default, least=1)
    if found % 2:
        raise read.wrong(names[0], "even, for rotary positions", found)
    return found


def _hf_head_dim(read: Fields, kind: str, default: int) -> int:
    if kind == "nemotron_h":
        return _head_dim(read, ("head_dim", "attention_head_dim"), 128)
    return _head_dim(read, ("head_dim",), default)


def _windows(read: Fields, kind: str, layers: int) -> tuple[int, tuple[int, ...]]:
    """Sliding window and its layers, by the rules of the classes of transformers."""
    optional = kind.startswith("qwen") or kind == "smollm3"
    if kind in _UNWINDOWED or (optional and not read.flag("use_sliding_window", default=False)):
        return 0, ()
    window = read.integer("sliding_window", default=0)
    if not window:
        return 0, ()
    types = () if kind in ("mistral", "mixtral", "qwen3_moe") else read.texts("layer_types")
    if types:
        if len(types) != layers or not set(types) <= set(_LAYER_TYPES):
            raise read.wrong("layer_types", f"{layers} of sliding_attention or full_attention", list(types))
        return window, tuple(i for i, t in enumerate(types) if t == "sliding_attention")
    if kind == "smollm3":
        return window, _unrotated(read, kind, layers)
    if kind in ("gemma2", "gpt_oss"):
        return window, tuple(range(0, layers, 2))
    if kind == "gemma3_text":
        pattern = read.integer("sliding_window_pattern", "_sliding_window_pattern", default=6, least=1)
        return window, tuple(i for i in range(layers) if (i + 1) % pattern)
    full = read.integer("max_window_layers", default=layers)
    if kind == "qwen2_moe":
        return window, tuple(range(0, min(full, layers), 2))
    return window, tuple(range(full if kind in ("qwen2", "qwen3") else 0, layers))


def _latent(read: Fields, kind: str) -> MLAConfig | None:
    if kind not in _LATENT_KINDS:
        return None
    if read.flag("attention_bias", default=False):
        raise read.wrong("attention_bias", "false: latent attention with biases is not supported", True)
    rope_dim = read.integer("qk_rope_head_dim", least=2)
    if rope_dim % 2:
        raise read.wrong("qk_rope_head_dim", "even, for rotary positions", rope_dim)
    return MLAConfig(
        q_rank=read.integer("q_lora_rank", default=0),
        kv_rank=read.integer("kv_lora_rank", least=1),
        nope_dim=read.integer("qk_nope_head_dim", least=1),
        rope_dim=rope_dim,
        value_dim=read.integer("v_head_dim", least=1),
        interleaved_rope=read.flag("rope_interleave", default=True),
    )


def _latent_rope(read: Fields, rope: RopeConfig, latent: MLAConfig) -> RopeConfig:
    """The rotary embedding of the rotary part of a head, all of which is rotated."""
    if rope.fraction != 1:
        raise read.wrong("partial_rotary_factor", "1 for latent attention", rope.fraction)
    return replace(rope, fraction=latent.rope_dim / (latent.nope_dim + latent.rope_dim))


def _latent_scale(read: Fields, rope: RopeConfig, head_dim: int) -> float:
    """Factor on query-key products of latent attention, which YaRN's `mscale_all_dim` changes."""
    scaling = read.fields("rope_scaling")
    holder = scaling if scaling.raw else read.fields("rope_parameters")
    mscale = holder.number("mscale_all_dim", default=0.0, least=0)
    scale: float = head_dim**-0.5
    return scale if rope.kind == "default" else scale * (0.1 * mscale * log(max(rope.factor, 1.0)) + 1) ** 2


def _ropes(read: Fields, kind: str, context: int, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embedding of all layers, and of the sliding-window layers where it differs."""
    scaling, parameters = read.fields("rope_scaling"), read.fields("rope_parameters")
    theta = read.positive("rope_theta", default=10000.0)
    fraction = read.positive("partial_rotary_factor", default=1.0)
    nested = [name for name, value in parameters.raw.items() if isinstance(value, Mapping)]
    if nested and kind != "gemma3_text" and not read.has("layer_types"):
        raise parameters.wrong(
            nested[0], "a number or a name where no layer_types are given", parameters.raw[nested[0]]
        )
    if not nested and kind != "gemma3_text":
        chosen = scaling if scaling.raw else parameters
        return read_rope(chosen, theta, context, head_dim, read, fraction), None
    if parameters.raw and not nested:
        raise read.wrong("rope_parameters", "one object per type of layer", dict(parameters.raw))
    if not set(nested) <= set(_LAYER_TYPES):
        raise read.wrong("rope_parameters", f"objects of {' and '.join(_LAYER_TYPES)}", dict(parameters.raw))
    full, sliding = (parameters.fields(name) for name in _LAYER_TYPES)
    full = Fields({**full.raw, **scaling.raw}, read.source, "rope_parameters.full_attention.")
    local_theta = read.positive("rope_local_base_freq", default=10000.0 if kind == "gemma3_text" else theta)
    return (
        read_rope(full, theta, context, head_dim, fraction=fraction),
        read_rope(sliding, local_theta, context, head_dim, fraction=fraction),
    )


def _deepseek_experts(read: Fields, kind: str, layers: int) -> MoEConfig:
    """The mixture of experts of DeepSeek-V2 (softmax), and of DeepSeek-V3 and GLM (sigmoid, a bias that selects)."""
    softmax = kind == "deepseek_v2"
    method = read.text("topk_method", default="greedy" if softmax else "noaux_tc")
    known = ("greedy", "group_limited_greedy") if softmax else ("noaux_tc",)
    for name, found, allowed in (
        ("topk_method", method, known),
        ("scoring_func", read.text("scoring_func", default=""), ("", "softmax" if softmax else "sigmoid")),
        ("moe_layer_freq", read.integer("moe_layer_freq", default=1), (1,)),
        ("norm_topk_prob", softmax and read.flag("norm_topk_prob", default=False), (False,)),
    ):
        if found not in allowed:
            raise read.wrong(name, f"{' or '.join(str(a) for a in allowed if a != '')} for {kind}", found)
    count, ffn = read.integer("n_routed_experts", least=1), read.integer("moe_intermediate_size", least=1)
    grouped = method != "greedy"
    return MoEConfig(
        count=count,
        active=read.integer("num_experts_per_tok", least=1, most=count),
        ffn=ffn,
        shared_ffn=read.integer("n_shared_experts", default=0) * ffn,
        renormalize=not softmax and read.flag("norm_topk_prob", default=True),
        layers=_sparse_layers(read, kind, layers),
        scoring="softmax" if softmax else "sigmoid",
        selection_bias=not softmax,
        groups=read.integer("n_group", default=1, least=1) if grouped else 1,
        active_groups=read.integer("topk_group", default=1, least=1) if grouped else 1,
        ranked_by=1 if softmax else 2,
        scale=read.number("routed_scaling_factor", default=1.0),
    )


def _sparse_layers(read: Fields, kind: str, layers: int) -> tuple[int, ...]:
    types = read.texts("mlp_layer_types") if kind == "glm4_moe_lite" else ()
    if types:
        if len(types) != layers or not set(types) <= {"dense", "sparse"}:
            raise read.wrong("mlp_layer_types", f"{layers} of dense or sparse", list(types))
        return tuple(i for i, each in enumerate(types) if each == "sparse")
    dense = 1 if kind == "glm4_moe_lite" else read.integer("first_k_dense_replace", default=0)
    return tuple(range(dense, layers))


def _experts(read: Fields, kind: str, layers: int) -> MoEConfig | None:
    if kind in _LATENT_KINDS or kind == "glm4_moe":
        return _deepseek_experts(read, kind, layers)
    if kind == "nemotron_h":
        return _nemotron_experts(read)
    if kind in _GRANITE_EXPERTS:
        return _granite_experts(read, kind, layers)
    if kind not in ("mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
        return None
    count = read.integer("num_local_experts", "num_experts", least=1)
    active = read.integer("num_experts_per_tok", least=1, most=count)
    if kind in ("mixtral", "gpt_oss"):
        biased, ffn = kind == "gpt_oss", read.integer("intermediate_size", least=1)
        return MoEConfig(count, active, ffn, layers=tuple(range(layers)), router_bias=biased, bias=biased)
    step, dense = read.integer("decoder_sparse_step", default=1, least=1), read.integers("mlp_only_layers")
    shared = read.integer("shared_expert_intermediate_size", default=0) if kind in _SHARED_EXPERT else 0
    return MoEConfig(
        count=count,
        active=active,
        ffn=read.integer("moe_intermediate_size", least=1),
        shared_ffn=shared,
        shared_gate=shared > 0,
        renormalize=read.flag("norm_topk_prob", default=kind == "qwen3_5_moe_text"),
        layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )


def _granite_experts(read: Fields, kind: str, layers: int) -> MoEConfig | None:
    """The mixture of experts of Granite, beside which the shared expert is the dense network of other models."""
    count = read.integer("num_local_experts")
    if not count:
        return None
    return MoEConfig(
        count=count,
        active=read.integer("num_experts_per_tok", least=1, most=count),
        ffn=read.integer("intermediate_size", least=1),
        shared_ffn=read.integer("shared_intermediate_size", default=1024 if kind == "granitemoehybrid" else 0)
        if kind != "granitemoe"
        else 0,
        layers=tuple(range(layers)),
    )


def _nemotron_experts(read: Fields) -> MoEConfig | None:
    """The mixture of experts of Nemotron 3: DeepSeek-V3's with networks that are not gated."""
    layers = tuple(i for i, kind in enumerate(read.texts("layer_types")) if kind == "moe")
    if not layers:
        return None
    if read.has("moe_latent_size"):
        raise read.wrong("moe_latent_size", "null: experts of latent vectors are not supported", "a size")
    if read.flag("mlp_bias", default=False):
        raise read.wrong("mlp_bias", "false for a model with experts", True)
    if read.integer("n_shared_experts", default=1) != 1:
        raise read.wrong("n_shared_experts", "1 for nemotron_h", read.raw["n_shared_experts"])
    count = read.integer("n_routed_experts", least=1)
    return MoEConfig(
        count=count,
        active=read.integer("num_experts_per_tok", least=1, most=count),
        ffn=read.integer("moe_intermediate_size", least=1),
        shared_ffn=read.integer("moe_shared_expert_intermediate_size", default=7688, least=1),
        renormalize=read.flag("norm_topk_prob", default=True),
        layers=layers,
        scoring="sigmoid",
        selection_bias=True,
        groups=read.integer("n_group", default=1, least=1),
        active_groups=read.integer("topk_group", default=1, least=1),
        ranked_by=2,
        scale=read.number("routed_scaling_factor", default=1.0),
    )


def from_gguf(
    meta: Mapping[str, Any],
    source: str = "GGUF file",
    rope_factors: Mapping[str, Sequence[float]] | None = None,
    tied: bool = False,
) -> ModelConfig:
    """Read the metadata of a GGUF file (keys of the format's specification, values as Python objects).

    `rope_factors`: the file's tensors `rope_freqs`, `rope_factors_short` and `rope_factors_long`, those that it has.
    `tied`: the file has no `output.weight`.

    Raises:
        ValueError: a required key is missing, a value has the wrong type or is out of range, or the architecture is not
            supported.
    """
    whole = Fields(meta, source)
    name = whole.text("general.architecture")
    if name not in _GGUF_KINDS:
        raise ValueError(
            f"{source}: the decoder does not know GGUF architecture {name!r}; it knows {', '.join(_GGUF_KINDS)}"
        )
    kind = _GGUF_KINDS[name]
    read = Fields({k.removeprefix(name + "."): v for k, v in meta.items()}, source, f"{name}.")
    if kind == "llama" and read.integer("expert_count", default=0):
        kind = "mixtral"
    gemma = kind.startswith("gemma")
    hidden, heads = (read.integer(k, least=1) for k in ("embedding_length", "attention.head_count"))
    layers = read.integer("block_count", least=1, most=_MAX_LAYERS)
    context = read.integer("context_length", least=1, most=_MAX_CONTEXT)
    head_dim = _head_dim(read, ("attention.key_length",), hidden // heads)
    if kind == "llama" and read.integer("rope.dimension_count", default=head_dim) != head_dim:
        raise read.wrong("rope.dimension_count", f"{head_dim}, all of a head", read.raw["rope.dimension_count"])
    rope = read_gguf_rope(read, context, head_dim, rope_factors or {})
    window = read.integer("attention.sliding_window", default=4096 if kind == "gemma2" else 0)
    pattern = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}.get(kind, 1)
    patterned = gemma or kind == "gpt_oss"
    if patterned:
        pattern = read.integer("attention.sliding_window_pattern", default=pattern, least=1)
    windowed = tuple(i for i in range(layers) if not patterned or (i + 1) % pattern) if window else ()
    caps = (50.0, 30.0) if kind == "gemma2" else (0.0, 0.0)
    return _checked(
        source,
        architecture=kind,
        vocab=read.integer("vocab_size", default=0) or len(_require_list(whole, "tokenizer.ggml.tokens")),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=read.integer("attention.head_count_kv", default=heads, least=1),
        head_dim=head_dim,
        ffn=read.integer("feed_forward_length", least=1),
        **_contexts(rope, context),
        norm_eps=read.number("attention.layer_norm_rms_epsilon", default=1e-6, least=0),
        rope=replace(rope, truncate=False) if kind == "gpt_oss" else rope,
        local_rope=RopeConfig(theta=read.positive("rope.freq_base_swa", default=10000.0))
        if kind == "gemma3_text"
        else None,
        window=window,
        window_layers=windowed,
        attention_scale=(hidden // heads) ** -0.5 if layers == _GEMMA_27B_LAYERS.get(kind) else None,
        attention_softcap=read.number("attn_logit_softcapping", default=caps[0], least=0),
        logit_softcap=read.number("final_logit_softcapping", default=caps[1], least=0),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        experts=_gguf_experts(read, kind, layers),
        bos=next(iter(whole.integers("tokenizer.ggml.bos_token_id")), None),
        eos=_gguf_eos(whole),
        # GGUF files hold Gemma's norm weights with the offset of 1 added.
        **{**ARCHITECTURES[kind], "norm_offset": 0.0, "tied": tied or gemma, **_GGUF_FIXED.get(kind, {})},
    )


def _gguf_experts(read: Fields, kind: str, layers: int) -> MoEConfig | None:
    """The mixture of experts of a GGUF file: in all layers of the architectures that have one."""
    if kind not in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"):
        return None
    count, dense = read.integer("expert_count", least=1), read.integer("feed_forward_length", least=1)
    active = read.integer("expert_used_count", least=1, most=count)
    narrow = dense // active if kind == "qwen2_moe" else dense
    shared = read.integer("expert_shared_feed_forward_length", default=dense) if kind == "qwen2_moe" else 0
    return MoEConfig(
        count=count,
        active=active,
        ffn=read.integer("expert_feed_forward_length", default=narrow, least=1),
        shared_ffn=shared,
        shared_gate=shared > 0,
        renormalize=kind != "qwen2_moe",
        layers=tuple(range(layers)),
        router_bias=kind == "gpt_oss",
        bias=kind == "gpt_oss",
    )


def _require_list(read: Fields, name: str) -> list[Any]:
    value = read.raw.get(name)
    if not isinstance(value, list):
        raise read.wrong(name, "a list", value)
    return value


def _gguf_eos(read: Fields) -> tuple[int, ...]:
    """End-of-sequence tokens, by the rules of llama.cpp."""
    eos = eos_token_ids(read, *(f"tokenizer.ggml.{key}" for key in _GGUF_EOS_KEYS))
    if read.raw.get("general.architecture") == "gpt-oss":
        names = read.raw.get("tokenizer.ggml.tokens") or ()
        return tuple(dict.fromkeys((*eos, *(i for i, token in enumerate(names) if token in _HARMONY_ENDS))))
    tokens, types = (read.raw.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if read.has("tokenizer.ggml.eot_token_id") or not isinstance(tokens, list) or not isinstance(types, list):
        return eos
    pairs = enumerate(zip(tokens, types, strict=False))
    end_of_turn = (i for i, (t, kind) in pairs if kind == _CONTROL_TOKEN and t in _END_OF_TURN_TOKENS)
    return tuple(dict.fromkeys((*eos, *end_of_turn)))
