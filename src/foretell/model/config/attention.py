"""How attention differs among the layers of a model, and what else layers read beside the residual stream."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of the attention heads of a layer."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class QueryScaling:
    """Factor on queries by their position: `1 + factor * log(1 + floor((position + offset) / interval))` (Llama 4 and
    Ministral 3; after Nakanishi, arXiv 2501.19399).
    """

    factor: float
    interval: int
    offset: int = 0
    unrotated_only: bool = False
    """Whether only the layers without rotary positions have it."""


@dataclass(frozen=True)
class LayerInputConfig:
    """Per-layer embeddings (Gemma 3n and 4): numbers that each layer reads of a token, and the size of their table."""

    width: int
    vocab: int
