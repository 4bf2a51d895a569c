"""Speculators made of decoder layers with a key-value cache of their own: their configuration and what they share."""

from abc import abstractmethod
from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import nn

from foretell.model.block.attention_kinds import new_store
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.block.rope import RopeAngles, rope_tables
from foretell.model.cache.kv_cache import KVCache
from foretell.model.config.model import ModelConfig, RopeConfig
from foretell.model.kernels import NativeStack
from foretell.model.kernels.kv_cache import NativeKVCache
from foretell.speculator.network.base import Speculator, SpeculatorConfig

EXTRA_POSITIONS = 64
"""Positions of the rotary tables beyond the target's context, for drafts at its end."""


class CachedLayersConfig(SpeculatorConfig):
    """Sizes of decoder layers of the Llama family."""

    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    ffn: int = Field(ge=1)
    context: int = Field(ge=1)
    """Longest sequence, in tokens."""
    layers: int = Field(1, ge=1)
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    qk_norm: bool = False
    """Normalise queries and keys per head, as Qwen 3 does."""
    own_embedding: bool = False
    """Whether it has its own embedding, as published checkpoints may; otherwise it uses the target's."""
    window: int = Field(0, ge=0)
    """Sliding attention window of `window_layers` in tokens, the own one included."""
    window_layers: tuple[int, ...] = ()
    sink_layers: tuple[int, ...] = ()
    """Layers in which a learned score per query head joins the softmax over its keys (gpt-oss, arXiv 2508.10925)."""

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        if bool(self.window) != bool(self.window_layers):
            raise ValueError("a window needs layers that have it, and these a window; give both, or neither")
        for name in ("window_layers", "sink_layers"):
            if not set(getattr(self, name)) <= set(range(self.layers)):
                raise ValueError(f"{name} names layers beyond the {self.layers} that there are")
        return self

    @property
    @abstractmethod
    def recorded_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it reads."""

    def window_of(self, layer: int) -> int:
        """Sliding window of one layer in tokens; 0: it has none."""
        return self.window if layer in self.window_layers else 0

    def layer_config_of(self, layer: int) -> ModelConfig:
        """One layer as a decoder's configuration."""
        return self.decoder_config.of_layers([layer])

    @property
    def decoder_config(self) -> ModelConfig:
        """The layers as a decoder's configuration."""
        return ModelConfig(
            architecture="llama",
            vocab=self.target.vocab,
            hidden=self.target.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn=self.ffn,
            context=self.context + EXTRA_POSITIONS,
            norm_eps=self.norm_eps,
            rope=self.rope,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            window=self.window,
            window_layers=self.window_layers,
            sink_layers=self.sink_layers,
        )


class CachedLayersNetwork(Speculator):
    """The base class of networks of decoder layers that keep keys and values of the positions that the target has
    read.
    """

    config: CachedLayersConfig
    layers: nn.ModuleList

    def __init__(self, config: CachedLayersConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.context = config.context
        cos, sin = rope_tables(config.rope, config.head_dim, config.context, EXTRA_POSITIONS)
        own = nn.Parameter(embedding_and_head.embedding.detach().float().clone()) if config.own_embedding else None
        self.embedding: nn.Parameter | None
        """Its own embedding; None: it uses the target's."""
        self.register_parameter("embedding", own)
        self.register_buffer("_cos", cos[:, None], persistent=False)
        self.register_buffer("_sin", sin[:, None], persistent=False)
        self.native_stack: NativeStack | None = None
        """The layers on the CPU kernels, set by `pack_network`."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it reads."""
        return self.config.recorded_layers

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.get_buffer("_cos").device

    @property
    def hidden(self) -> int:
        """Width of a hidden state."""
        return self.target_info.hidden

    @property
    def outputs(self) -> int:
        """Tokens of the draft vocabulary."""
        return len(self.lm_head)

    def new_cache(self, device: torch.device) -> KVCache:
        """An empty cache, in the network's own dtype or in that of the CPU kernels."""
        c = self.config
        if self.native_stack is None:
            config = c.decoder_config
            return new_store(config, c.layers, config.cache_sizes_of(0), self.dtype, device)
        return NativeKVCache(c.layers, c.kv_heads, c.head_dim, self.native_stack.precision)

    def embed(self, token: Int[torch.Tensor, "*t"]) -> Float[torch.Tensor, "*t d"]:
        """Its own embedding of tokens, without a scale, or the target's."""
        return super().embed(token) if self.embedding is None else F.embedding(token, self.embedding).to(self.dtype)

    def rope_angles(self, position: Int[torch.Tensor, "*t"]) -> RopeAngles:
        """Cosine and sine of the rotary angles at these positions."""
        return self.get_buffer("_cos")[position], self.get_buffer("_sin")[position]
