"""EAGLE's networks: one decoder layer that goes on in the target's feature space, fed with each token as soon as it is
known.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import nn

from foretell.model.attention import Cached, PaddedLayout, Sight
from foretell.model.cache import KVCache, Layout
from foretell.model.config import ModelConfig, RopeConfig
from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.model.kernels import NativeEagle, NativeStack
from foretell.model.rope import tables
from foretell.speculator.network.base import Speculator, SpeculatorConfig, TokenSubset
from foretell.speculator.network.layer import (
    Eagle3FirstLayer,
    EagleLayer,
    EagleLayerConfig,
    TrainingTimeTestAttention,
    make_norm,
)

EXTRA_POSITIONS = 64
"""Positions past the target's context that rotary tables have, for drafts at its end."""


class EagleConfig(SpeculatorConfig):
    """Sizes of a layer that drafts in feature space: EAGLE-1's and 2's (`eagle`) or EAGLE-3's (`eagle3`)."""

    kind: Literal["eagle", "eagle3"] = "eagle3"
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    ffn: int = Field(ge=1)
    context: int = Field(ge=1)
    """Longest text, in tokens."""
    layers: int = Field(1, ge=1)
    hidden_layers: tuple[int, ...] = ()
    """EAGLE-3: the hidden states that are fused; unsaid: the inputs of blocks 2, half of all, and the last but two."""
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    fc_bias: bool | None = None
    """Unsaid: EAGLE-1 has one and EAGLE-3 has not."""
    norm_before_residual: bool = False
    """EAGLE-3: the residual stream starts from the normed feature."""
    norm_before_fc: bool = False
    """EAGLE-3: one norm over all tapped states side by side before they are fused."""
    fc_norm: bool = False
    """EAGLE-3: a norm for each tapped state before they are fused."""
    norm_output: bool = False
    """EAGLE-3: the next feature is the layer's output after the final norm, not before."""
    qk_norm: bool = False
    """Queries and keys are normed head by head, as in layers of the Qwen 3 family."""
    own_embedding: bool = False
    """It has an embedding of its own, as published checkpoints may; otherwise it uses the target's."""

    @property
    def layer_config(self) -> EagleLayerConfig:
        """Of each layer."""
        hidden = self.target.hidden
        biased, normed = self.qkv_bias, self.qk_norm
        return EagleLayerConfig(
            hidden, self.heads, self.kv_heads, self.head_dim, self.ffn, self.norm_eps, biased, normed
        )

    @property
    def decoder_config(self) -> ModelConfig:
        """The layers as those of a decoder, for the CPU kernels."""
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
        )

    @property
    def recorded_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads."""
        n = self.target.layers
        if self.kind == "eagle":
            return (n + 1,)
        return self.hidden_layers or (min(2, n), n // 2, max(n - 3, 0))


class DraftStep(NamedTuple):
    """What a step of training guessed at the `k` positions that were asked for."""

    state: Float[torch.Tensor, "k d"]
    """What the output matrix saw; for EAGLE-1 the guessed feature itself."""
    logits: Float[torch.Tensor, "k w"]


class EagleNetwork(Speculator):
    """What EAGLE-1 and EAGLE-3 have in common.

    The feature of position `j` (the target's state after it has read token `j`) goes with token `j + 1`, stands at
    rotary position `j`, and gives the scores of token `j + 2`. Where the target has not been yet, the layer's own
    output takes the feature's place.
    """

    config: EagleConfig
    layers: nn.ModuleList

    def __init__(self, config: EagleConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.config, self.context = config, config.context
        cos, sin = tables(config.rope, config.head_dim, config.context + EXTRA_POSITIONS)
        own = nn.Parameter(embedding_and_head.embedding.detach().float().clone()) if config.own_embedding else None
        self.embedding: nn.Parameter | None
        """Its own embedding; None where it uses the target's."""
        self.register_parameter("embedding", own)
        self.register_buffer("_cos", cos[:, None], persistent=False)
        self.register_buffer("_sin", sin[:, None], persistent=False)
        self.native_stack: NativeStack | None = None
        """The layers on the CPU kernels, once `packed` made it."""
        self.native: NativeEagle | None = None
        """The layers with what surrounds them, likewise, where the kernels have a place for it."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads."""
        return self.config.recorded_layers

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values: its own, or what the CPU kernels keep."""
        if self.native_stack is None:
            return self.dtype
        return torch.float32 if self.native_stack.precision == "float32" else torch.bfloat16

    def embed(self, token: Int[torch.Tensor, "*t"]) -> Float[torch.Tensor, "*t d"]:
        """Its own embedding of tokens, which is not scaled, or the target's."""
        return super().embed(token) if self.embedding is None else F.embedding(token, self.embedding).to(self.dtype)

    @abstractmethod
    def fuse(self, features: Float[torch.Tensor, "*t kd"]) -> Float[torch.Tensor, "*t d"]:
        """The layer's feature from the target's tapped states, side by side."""

    @abstractmethod
    def prepare_inputs(
        self, embedded: Float[torch.Tensor, "*t d"], g: Float[torch.Tensor, "*t d"]
    ) -> tuple[Float[torch.Tensor, "*t d"], Float[torch.Tensor, "*t i"]]:
        """The residual stream before the first layer, and what that layer's attention sees."""

    def next_feature(self, x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """The next feature, from the residual stream after the last layer."""
        return x

    @abstractmethod
    def head_input(self, out: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """What the output matrix sees of the layers' output."""

    def forward_layers(
        self,
        token: Int[torch.Tensor, "*t"],
        g: Float[torch.Tensor, "*t d"],
        position: Int[torch.Tensor, "..."],
        sight: Sight,
    ) -> Float[torch.Tensor, "*t d"]:
        """The next features: after the feature `g` of a rotary position and the token that follows it."""
        angles = self.get_buffer("_cos")[position], self.get_buffer("_sin")[position]
        x, seen = self.prepare_inputs(self.embed(token), g)
        first, *more = self.layers
        assert isinstance(first, EagleLayer)
        x = first.forward_from_input(x, seen, angles, 0, sight)
        for i, layer in enumerate(more, 1):
            x = layer(x, angles, i, sight)
        return self.next_feature(x)

    def forward_features(
        self,
        token: Int[torch.Tensor, " t"],
        features: Float[torch.Tensor, "n d"],
        parent: Int[torch.Tensor, " t"],
        layout: Layout,
        cache: KVCache,
    ) -> Float[torch.Tensor, "t d"]:
        """The same over a cache, where new keys go; on the CPU kernels once `packed` made them a stack.

        Token `i` follows feature `parent[i]`.
        """
        if self.native is not None:
            return self.native.follow(token, features, parent, layout, cache)
        device = cache.k.device
        g = features[parent.to(device)]
        if self.native_stack is None:
            plan = PaddedLayout.of(layout, device)
            return self.forward_layers(
                token.to(device), g, plan.position, Cached(cache, plan, self.config.decoder_config)
            )
        x, seen = self.prepare_inputs(self.embed(token), g)
        return self.next_feature(self.native_stack(x, layout, cache, 0, len(self.layers), seen.contiguous()))

    def forward_target_states(
        self,
        token: Int[torch.Tensor, " t"],
        states: Sequence[Float[torch.Tensor, "n d"]],
        place: Int[np.ndarray, " t"],
        layout: Layout,
        cache: KVCache,
    ) -> Float[torch.Tensor, "t d"]:
        """Follow tokens, token `i` after the target's states at `place[i]` of every recorded layer."""
        if self.native is not None:
            return self.native.read(token, [state.float() for state in states], place, layout, cache)
        index = torch.from_numpy(place).to(states[0].device)
        beside = torch.cat([state[index] for state in states], -1)
        features = self.fuse(beside.to(cache.k.device, self.dtype))
        return self.forward_features(token, features, torch.arange(len(token)), layout, cache)

    def forward(
        self,
        token: Int[torch.Tensor, "b s"],
        features: Sequence[Float[torch.Tensor, "b s d"]],
        wanted: Sequence[Bool[torch.Tensor, "b t"]],
        subset: TokenSubset | None = None,
    ) -> tuple[DraftStep, ...]:
        """Unroll as many steps as `wanted` has entries; entry `i` marks the positions `j` of `0 .. s-2` whose guess of
        token `j + 2 + i` counts.

        Each step goes on from the outputs of the one before, as drafting does; what stands before all that later steps
        are asked for, a prompt, only the first reads. `subset`: the tokens to be scored, if not all.
        """
        g = self.fuse(torch.cat(tuple(features), -1).to(self.dtype)[:, :-1])
        token, length, begin = F.pad(token, (0, len(wanted))), g.shape[1], 0
        sight, guesses = TrainingTimeTestAttention(), list[DraftStep]()
        for i, where in enumerate(wanted):
            if i == 1:
                begin = int(torch.stack([w.any(0) for w in wanted[1:]]).any(0).int().argmax())
                g = g[:, begin:]
            position = torch.arange(begin + i, length + i, device=g.device)
            g = self.forward_layers(token[:, position + 1], g, position, sight)
            state = self.head_input(g[where[:, begin:]])
            guesses.append(DraftStep(state, self.compute_logits(state, subset)))
        return tuple(guesses)


class Eagle1(EagleNetwork):
    """Token and feature are mixed into the layer's input; its output is a guess of the feature that the target's head
    scores (arXiv 2401.15077).
    """

    kind = "eagle"

    def __init__(self, config: EagleConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        d = config.target.hidden
        self.fc = nn.Linear(2 * d, d, bias=config.fc_bias is not False)
        self.layers = nn.ModuleList(EagleLayer(config.layer_config, normed=i > 0) for i in range(config.layers))

    def fuse(self, features: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """The feature as it is."""
        return features

    def prepare_inputs(
        self, embedded: Float[torch.Tensor, "*t d"], g: Float[torch.Tensor, "*t d"]
    ) -> tuple[Float[torch.Tensor, "*t d"], Float[torch.Tensor, "*t d"]]:
        """Token and feature mixed, as both."""
        x: torch.Tensor = self.fc(torch.cat((embedded, g), -1))
        return x, x

    def head_input(self, out: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """The output as it is."""
        return out


class Eagle3(EagleNetwork):
    """Several of the target's states are fused into the feature, and nothing but the guessed tokens is trained for
    (arXiv 2503.01840).
    """

    kind = "eagle3"

    def __init__(self, config: EagleConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        d, count, eps = config.target.hidden, len(config.recorded_layers), config.norm_eps
        self.input_norm = make_norm(count * d, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(make_norm(d, eps) for _ in range(count)) if config.fc_norm else None
        self.fc = nn.Linear(count * d, d, bias=config.fc_bias is True)
        first = Eagle3FirstLayer(config.layer_config, config.norm_before_residual)
        self.layers = nn.ModuleList([first, *(EagleLayer(config.layer_config) for _ in range(1, config.layers))])
        self.norm = make_norm(d, eps)

    def fuse(self, features: Float[torch.Tensor, "*t kd"]) -> Float[torch.Tensor, "*t d"]:
        """The tapped states through one matrix."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        out: torch.Tensor = self.fc(features)
        return out

    def prepare_inputs(
        self, embedded: Float[torch.Tensor, "*t d"], g: Float[torch.Tensor, "*t d"]
    ) -> tuple[Float[torch.Tensor, "*t d"], Float[torch.Tensor, "*t dd"]]:
        """The feature, and both side by side."""
        first = self.layers[0]
        assert isinstance(first, Eagle3FirstLayer)
        return first.prepare_inputs(embedded, g)

    def next_feature(self, x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """The stream, normed where the configuration says so."""
        return self.norm(x) if self.config.norm_output else x

    def head_input(self, out: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """The output after the final norm."""
        seen: torch.Tensor = out if self.config.norm_output else self.norm(out)
        return seen
