"""Configuration of decoder-only language models.

`ModelConfig` does not depend on the format or the family: Llama, Mistral, Qwen, Gemma and mixtures of experts differ
only in its values. The decoder and the roofline analyzer use it; `foretell.model.config.readers` reads it from files.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from foretell.model.config.attention import AttentionSizes, LayerInputConfig, QueryScaling
from foretell.model.config.compressed import LowRank
from foretell.model.config.rope import RopeConfig as RopeConfig
from foretell.model.config.rope import read_rope
from foretell.model.config.states import StateConfig
from foretell.utils.validation import Fields

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "clamped_swiglu", "relu2"]
"""`clamped_swiglu` is that of gpt-oss (arXiv 2508.10925): (up + 1) * gate * sigmoid(1.702 gate) on clamped factors.
`relu2`, relu(up) ** 2 (arXiv 2109.08668), has no gate.
"""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Constants of `clamped_swiglu`: the factor within its sigmoid, and the bound on both factors."""
NormedHeads = Literal["head", "all", "rotated"]
"""What the norms of queries and keys are over: each head, all heads together (OLMo 2), or each head after its rotation
(Hunyuan)."""
CacheDtype = Literal["auto", "int8", "int8-halves", "fp8", "int4", "int4-kivi", "int2-kivi"]
"""Numbers of cached keys and values: as the model computes, or with one scale per token and head. `int8-halves` has
the numbers of int8, their upper and lower halves apart, so that drafts can read the upper ones alone."""


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
    dense_context: int = 0
    """Tokens up to which its layers attend to all, where they choose among more; the decoder does not. 0: any."""
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
    qk_norm_over: NormedHeads = "head"
    unit_qk_norm: bool = False
    """Queries and keys have a norm without weights in the layers with rotary positions (Llama 4)."""
    value_norm: bool = False
    """Values have a norm without weights (Gemma 4)."""
    norm_offset: float = 0.0
    """Added to every norm weight (1 for Gemma, whose checkpoints store weight - 1)."""
    pre_norms: bool = True
    """Norms of the inputs of attention and feed-forward; OLMo 2 and EXAONE 4 have none."""
    post_norms: bool = False
    """Norms of the outputs of attention and feed-forward, before they are added to the residual (Gemma 2 and 3)."""
    centered: bool = False
    """Whether norms subtract the mean (layer norms without bias, of Cohere). Since nothing but norms reads the residual
    stream, its mean is subtracted after the embedding and after every layer instead.
    """
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
    """For every layer the one whose keys and values it reads, from `layers` on one of another model; empty: its own."""
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
    sink_layers: tuple[int, ...] = ()
    """Indices of the layers in which a learned score per query head joins the softmax over its keys (gpt-oss, arXiv
    2508.10925).
    """
    experts: MoEConfig | None = None
    latent: MLAConfig | None = None
    state: StateConfig | None = None
    """Layers with a recurrent state instead of attention."""
    attention_gate: bool = False
    """The query projection also gives a gate per head, whose sigmoid multiplies the output of attention."""
    learned_positions: bool = False
    parallel_blocks: bool = False
    """Attention and feed-forward have the same normed input, and both outputs are added to the residual (GPT-J,
    Cohere)."""
    low_rank: LowRank = field(default_factory=LowRank)
    """Matrices that are stored as two factors."""
    shortcuts: bool = False
    """Whether a matrix multiplies the residual stream before the outputs of attention and of the feed-forward network
    are added (SliceGPT, arXiv 2401.15024).
    """
    cache_dtype: CacheDtype = "auto"
    """Numbers of cached keys and values."""
    page_budget: int = 0
    """Cached keys that a decoded token attends to, per layer and key-value head, in pages that it selects (Quest, arXiv
    2406.10774); 0: all.
    """
    mask_token: int | None = None
    """Token that stands for one that does not exist yet, in draft models that predict several tokens in a pass (PARD,
    arXiv 2504.18583); None: it predicts the next token only.
    """
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

    def of_layers(self, layers: Sequence[int]) -> "ModelConfig":
        """The configuration of a decoder that is made of these layers of this one, in this order.

        Raises:
            ValueError: no layers, or a layer that reads the keys and values of one that is left out.
        """
        layers = list(layers)
        if not layers:
            raise ValueError("model configuration: a cut needs at least one layer")

        def kept(marked: Collection[int]) -> tuple[int, ...]:
            return tuple(i for i, layer in enumerate(layers) if layer in marked)

        sources = [self.kv_layer_of(layer) for layer in layers]
        if missing := [source for source in sources if source not in layers]:
            raise ValueError(
                f"model configuration: layers {layers} read keys and values of layer {missing[0]}, which is not among "
                "them"
            )
        shares = any(source != layer for source, layer in zip(sources, layers, strict=True))
        state, experts = self.state, self.experts
        if state is not None:
            state = replace(state, layers=kept(state.layers)) if kept(state.layers) else None
        if experts is not None:
            experts = replace(experts, layers=kept(experts.layers)) if kept(experts.layers) else None
        return replace(
            self,
            layers=len(layers),
            window_layers=kept(self.window_layers),
            unrotated_layers=kept(self.unrotated_layers),
            attention_free_layers=kept(self.attention_free_layers),
            mlp_free_layers=kept(self.mlp_free_layers),
            sink_layers=kept(self.sink_layers),
            kv_layers=tuple(map(layers.index, sources)) if shares else (),
            state=state,
            experts=experts,
        )

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


def with_context(config: ModelConfig, context: int | None) -> ModelConfig:
    """The configuration of a model that is opened for texts of `context` tokens; None: as it is.

    Raises:
        ValueError: its positions do not reach so far.
    """
    if context is None:
        return config
    longest = config.longest_context or config.context
    if context > longest:
        _refuse_sparse(config)
    if not 1 <= context <= longest:
        raise ValueError(
            f"a context of {context} tokens was asked for, but the positions of this model are made for 1 to {longest}"
            + "; scale them for longer texts (rope_scaling; on the command line, for example, --rope-scaling "
            '\'{"rope_type": "yarn", "factor": 4.0}\')' * (context > longest)
        )
    return replace(config, context=context, longest_context=longest)


def _refuse_sparse(config: ModelConfig) -> None:
    if config.dense_context:
        raise ValueError(
            f"{config.architecture} is read for texts of up to {config.dense_context} tokens, in which its layers "
            "attend to all; that they choose tokens of longer ones is not supported"
        )


def with_rope_scaling(config: ModelConfig, parameters: Mapping[str, Any] | None) -> ModelConfig:
    """The configuration with other rotary scaling in its full-attention layers, given as `rope_parameters` of a
    Hugging Face configuration; None: as it is. The context grows by the factor.

    Raises:
        ValueError: the model has no rotary positions, or the parameters are invalid.
    """
    if parameters is None:
        return config
    _refuse_sparse(config)
    old = config.rope
    if old is None:
        raise ValueError("rope_scaling was given, but this model has no rotary positions")
    trained = (config.longest_context or config.context) if old.kind == "default" else old.original_context
    read = Fields(parameters, "rope_scaling")
    rope = read_rope(read, old.theta, trained, config.head_dim, fraction=old.fraction)
    longest = max(trained, int(rope.factor * rope.original_context))
    return replace(config, rope=rope, context=longest, longest_context=0)
