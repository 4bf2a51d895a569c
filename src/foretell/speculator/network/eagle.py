"""The networks of EAGLE-1 and EAGLE-3: a decoder layer that predicts the target's next features from features and
tokens.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import model_validator
from torch import nn

from foretell.model.block.attention import AttentionBackend
from foretell.model.block.attention_kinds import cached_attention
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.block.layer import Stream
from foretell.model.block.rope import RopeAngles
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.kernels import NativeEagle
from foretell.speculator.network.base import Speculator, TokenSubset
from foretell.speculator.network.cached_layers import CachedLayersConfig, CachedLayersNetwork
from foretell.speculator.network.layer import (
    Eagle3FirstLayer,
    EagleLayer,
    TrainingTimeTestAttention,
    make_norm,
)


class EagleConfig(CachedLayersConfig):
    """Configuration of the layers of EAGLE-1 and EAGLE-2 (`eagle`) or EAGLE-3 (`eagle3`, `p_eagle`)."""

    kind: Literal["eagle", "eagle3", "p_eagle"] = "eagle3"
    hidden_layers: tuple[int, ...] = ()
    """EAGLE-3: the layers whose hidden states are fused; empty: blocks 2, `n / 2` and `n - 3` of `n`, their inputs."""
    fc_bias: bool | None = None
    """None: EAGLE-1 has a bias, EAGLE-3 has none."""
    norm_before_residual: bool = False
    """EAGLE-3: the residual stream starts from the normalised feature."""
    norm_before_fc: bool = False
    """EAGLE-3: one norm over the concatenated hidden states before they are fused."""
    fc_norm: bool = False
    """EAGLE-3: a norm per hidden state before they are fused."""
    norm_output: bool = False
    """EAGLE-3: the next feature is the layer's output after the final norm, not before."""

    @model_validator(mode="before")
    @classmethod
    def _without_head_rank(cls, values: Any) -> Any:
        """Read configurations of earlier versions, which named the rank of a head in two stages."""
        if not isinstance(values, dict):
            return values
        if rank := values.get("head_rank", 0):
            raise ValueError(
                f"its head has two stages (head_rank {rank}), which are not drafted with any more; use the speculator "
                "that `foretell calibrate head` was given"
            )
        return {key: value for key, value in values.items() if key not in ("head_rank", "head_candidates")}

    @property
    def recorded_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it reads."""
        n = self.target.layers
        if self.kind == "eagle":
            return (n + 1,)
        return self.hidden_layers or (min(2, n), n // 2, max(n - 3, 0))


class DraftStep(NamedTuple):
    """Predictions of one draft step during training, at `k` positions."""

    state: Float[torch.Tensor, "k d"]
    """Inputs of the output head; for EAGLE-1 the predicted features."""
    logits: Float[torch.Tensor, "k w"]


class EagleNetwork(CachedLayersNetwork):
    """The base class of EAGLE-1 and EAGLE-3.

    The feature of position `j` (the target's hidden state at token `j`) is combined with token `j + 1` at rotary
    position `j`, and predicts token `j + 2`. Positions that the target has not read use the layer's own output as
    feature.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.config = config
        self.native: NativeEagle | None = None
        """The whole network on the CPU kernels, set by `pack_network` where they support it."""

    def adapt_state_dict(self, smaller: Speculator) -> dict[str, torch.Tensor]:
        """Layers that the smaller network lacks get output matrices of zero, so that they add nothing to the residual
        stream.
        """
        assert isinstance(smaller, EagleNetwork)
        out = smaller.state_dict()
        further = tuple(f"layers.{i}." for i in range(len(smaller.layers), len(self.layers)))
        for name, tensor in self.state_dict().items():
            if name.startswith(further):
                out[name] = torch.zeros_like(tensor) if "o_proj" in name or "down_proj" in name else tensor
        return out

    @abstractmethod
    def fuse(self, features: Float[torch.Tensor, "*t kd"]) -> Stream:
        """The feature, from the target's concatenated hidden states."""

    @abstractmethod
    def prepare_inputs(self, embedded: Stream, feature: Stream) -> tuple[Stream, Float[torch.Tensor, "*t i"]]:
        """The residual stream before the first layer, and the input of that layer's attention."""

    def next_feature(self, x: Stream) -> Stream:
        """The next feature, from the residual stream after the last layer."""
        return x

    @abstractmethod
    def head_input(self, out: Stream) -> Stream:
        """The input of the output head, from the layers' output."""

    def forward_layers(
        self,
        token: Int[torch.Tensor, "*t"],
        feature: Stream,
        position: Int[torch.Tensor, "..."],
        attention: AttentionBackend,
    ) -> Stream:
        """The next features, from the features of rotary positions and the tokens that follow them."""
        return self.layers_over(self.embed(token), feature, self.rope_angles(position), attention)

    def layers_over(self, embedded: Stream, feature: Stream, angles: RopeAngles, attention: AttentionBackend) -> Stream:
        """The next features, from features and the embeddings of the tokens that follow them."""
        x, attention_input = self.prepare_inputs(embedded, feature)
        first, *more = self.layers
        assert isinstance(first, EagleLayer)
        x = first.forward_from_input(x, attention_input, angles, 0, attention)
        for i, layer in enumerate(more, 1):
            x = layer(x, angles, i, attention)
        return self.next_feature(x)

    def forward_features(
        self,
        token: Int[torch.Tensor, " t"],
        features: Float[torch.Tensor, "n d"],
        parent: Int[torch.Tensor, " t"],
        layout: Layout,
        cache: KVCache,
    ) -> Float[torch.Tensor, "t d"]:
        """The next features of tokens over a cache, which takes the new keys and values; token `i` follows feature
        `parent[i]`. Runs on the CPU kernels after `pack_network`.
        """
        if self.native is not None:
            return self.native.forward(token, features, parent, layout, cache)
        device = cache.k.device
        return self.run_layers(self.embed(token.to(device)), features[parent.to(device)], layout, cache)

    def run_layers(
        self,
        embedded: Float[torch.Tensor, "t d"],
        feature: Float[torch.Tensor, "t d"],
        layout: Layout,
        cache: KVCache,
    ) -> Float[torch.Tensor, "t d"]:
        """The next features of embedded tokens that follow features, over a cache."""
        if self.native_stack is None:
            attention = cached_attention(cache, layout, self.config.decoder_config, cache.k.device)
            return self.layers_over(embedded, feature, self.rope_angles(attention.position), attention)
        x, attention_input = self.prepare_inputs(embedded, feature)
        return self.next_feature(
            self.native_stack(x.contiguous(), layout, cache, 0, len(self.layers), attention_input.contiguous())
        )

    def forward_target_states(
        self,
        token: Int[torch.Tensor, " t"],
        states: Sequence[Float[torch.Tensor, "n d"]],
        place: Int[np.ndarray, " t"],
        layout: Layout,
        cache: KVCache,
    ) -> Float[torch.Tensor, "t d"]:
        """The same from the target's hidden states: token `i` follows row `place[i]` of every layer's `states`."""
        if self.native is not None:
            return self.native.forward_from_target(token, [state.float() for state in states], place, layout, cache)
        index = torch.from_numpy(place).to(states[0].device)
        concatenated = torch.cat([state[index] for state in states], -1)
        features = self.fuse(concatenated.to(cache.k.device, self.dtype))
        return self.forward_features(token, features, torch.arange(len(token)), layout, cache)

    def forward(
        self,
        token: Int[torch.Tensor, "b s"],
        features: Sequence[Float[torch.Tensor, "b s d"]],
        wanted: Sequence[Bool[torch.Tensor, "b t"]],
        subset: TokenSubset | None = None,
    ) -> tuple[DraftStep, ...]:
        """Unroll one draft step per entry of `wanted`; entry `i` marks the positions `j` of `0 .. s-2` whose prediction
        of token `j + 2 + i` is needed.

        Every step starts from the outputs of the one before, as in drafting. Positions before all those that later
        steps need (the prompt) are computed in the first step only. `subset`: score these tokens only.
        """
        feature = self.fuse(torch.cat(tuple(features), -1).to(self.dtype)[:, :-1])
        token, length, begin = F.pad(token, (0, len(wanted))), feature.shape[1], 0
        attention, steps = TrainingTimeTestAttention(self.config.window_of), list[DraftStep]()
        for i, mask in enumerate(wanted):
            if i == 1:
                begin = int(torch.stack([w.any(0) for w in wanted[1:]]).any(0).int().argmax())
                feature = feature[:, begin:]
            position = torch.arange(begin + i, length + i, device=feature.device)
            feature = self.forward_layers(token[:, position + 1], feature, position, attention)
            state = self.head_input(feature[mask[:, begin:]])
            steps.append(DraftStep(state, self.compute_logits(state, subset)))
        return tuple(steps)


class Eagle1(EagleNetwork):
    """EAGLE-1 and EAGLE-2: a linear layer combines token embedding and feature; the output predicts the feature that is
    the input of the target's head (arXiv 2401.15077, 2406.16858).
    """

    kind = "eagle"

    def __init__(self, config: EagleConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        d = config.target.hidden
        self.fc = nn.Linear(2 * d, d, bias=config.fc_bias is not False)
        self.layers = nn.ModuleList(
            EagleLayer(config.layer_config_of(i), input_norm=i > 0) for i in range(config.layers)
        )

    def fuse(self, features: Stream) -> Stream:
        """The hidden state itself."""
        return features

    def prepare_inputs(self, embedded: Stream, feature: Stream) -> tuple[Stream, Stream]:
        """The combination of embedding and feature, for both."""
        x: torch.Tensor = self.fc(torch.cat((embedded, feature), -1))
        return x, x

    def head_input(self, out: Stream) -> Stream:
        """The output itself."""
        return out


class Eagle3(EagleNetwork):
    """EAGLE-3: the feature is fused from several of the target's hidden states, and the loss is on tokens only (arXiv
    2503.01840).
    """

    kind = "eagle3"

    def __init__(self, config: EagleConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        d, count, eps = config.target.hidden, len(config.recorded_layers), config.norm_eps
        self.input_norm = make_norm(count * d, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(make_norm(d, eps) for _ in range(count)) if config.fc_norm else None
        self.fc = nn.Linear(count * d, d, bias=config.fc_bias is True)
        first = Eagle3FirstLayer(config.layer_config_of(0), config.norm_before_residual)
        self.layers = nn.ModuleList([first, *(EagleLayer(config.layer_config_of(i)) for i in range(1, config.layers))])
        self.norm = make_norm(d, eps)

    def fuse(self, features: Float[torch.Tensor, "*t kd"]) -> Stream:
        """The hidden states, normalised if configured, through one matrix."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            states = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(state) for norm, state in zip(self.fc_norm, states, strict=True)], -1)
        out: torch.Tensor = self.fc(features)
        return out

    def prepare_inputs(self, embedded: Stream, feature: Stream) -> tuple[Stream, Float[torch.Tensor, "*t dd"]]:
        """The feature, and the concatenation of embedding and feature."""
        first = self.layers[0]
        assert isinstance(first, Eagle3FirstLayer)
        return first.prepare_inputs(embedded, feature)

    def next_feature(self, x: Stream) -> Stream:
        """The residual stream, after the final norm if configured (`norm_output`)."""
        return self.norm(x) if self.config.norm_output else x

    def head_input(self, out: Stream) -> Stream:
        """The output after the final norm."""
        normed: torch.Tensor = out if self.config.norm_output else self.norm(out)
        return normed
