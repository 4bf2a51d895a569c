"""DFlash: a few decoder layers that draft a whole block of tokens in one pass over the target's hidden states."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import nn

from foretell.model.block.attention_kinds import cached_attention
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.kernels import NativeBlockDrafts
from foretell.speculator.network.base import TokenSubset, check_mask_token
from foretell.speculator.network.block_attention import BlockAttention
from foretell.speculator.network.block_layer import BlockLayer
from foretell.speculator.network.cached_layers import EXTRA_POSITIONS, CachedLayersConfig, CachedLayersNetwork
from foretell.speculator.network.correction_base import Blocks, Candidates, Nodes
from foretell.speculator.network.corrections import AnyCorrection, make_correction
from foretell.speculator.network.layer import EagleLayer, make_norm

_MOST_READ_LAYERS = 5
"""Layers of the target that are read by default."""


class DFlashConfig(CachedLayersConfig):
    """Configuration of a DFlash speculator."""

    kind: Literal["dflash"] = "dflash"
    layers: int = Field(2, ge=1)
    block_size: int = Field(8, ge=2, le=EXTRA_POSITIONS)
    """Slots of a block: the last decided token, then masks."""
    predicts_from_anchor: bool = False
    """The slot of the last decided token predicts a token too, as in DSpark: every slot then predicts the next one."""
    hidden_layers: tuple[int, ...] = ()
    """Layers of the target that are read; empty: five from the second to the last but two, evenly."""
    fc_norm: bool = False
    """A norm per hidden state before they are fused."""
    mask_token: int | None = None
    """Token whose embedding fills the slots after the first; None: a learned vector."""
    markov_rank: int = Field(0, ge=0)
    """Rank of the bias that a draft token gives to its successor (DSpark, arXiv 2607.05147); 0: none."""
    confidence: bool = False
    """Whether it predicts the share of its distribution that the target has too."""
    convolution: bool = False
    """Whether every layer mixes neighbouring slots before and after its attention and its feed-forward network (two
    taps, DFlash-2).
    """
    convolution_group: int = Field(16, ge=1)
    """Channels that share the part of a tap that depends on the input."""
    correction: AnyCorrection | None = Field(None, discriminator="kind")
    """A head that corrects a slot's predictions by the tokens that are drafted before it."""
    window_causal: bool = False
    """In layers with a window a slot attends to no later slots of its block; see `causal`."""
    window_from_anchor: bool = False
    """The window of all slots holds the last positions before the anchor, in addition to the block, as the library
    `speculators` trains it; else the window of a slot counts itself and what is before it, as in SpecForge and vLLM.
    """

    @model_validator(mode="after")
    def _check_mask_token(self) -> Self:
        if self.mask_token is not None:
            check_mask_token(self.mask_token, self.target.vocab)
        return self

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        kind = "" if self.correction is None else self.correction.kind
        if kind and (self.markov_rank or self.confidence):
            raise ValueError(f"a {kind} takes the place of DSpark's heads; give markov_rank=0 and confidence=false")
        if kind not in ("", "refiner") and self.draft_vocab is not None:
            raise ValueError(f"a {kind} chooses among all tokens; leave the vocabulary whole (--draft-vocab 0)")
        if kind == "lattice" and self.predicts_from_anchor:
            raise ValueError("the slots of a lattice are those after the anchor's; give predicts_from_anchor=false")
        return self

    @property
    def causal(self) -> bool:
        """Whether slots see all that is before them and nothing later, by windows that hold all (arXiv 2606.18394)."""
        whole = self.window >= self.decoder_config.context and len(self.window_layers) == self.layers
        return self.window_causal and whole

    @property
    def depth(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - (not self.predicts_from_anchor)

    @property
    def recorded_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it reads."""
        return self.hidden_layers or even_layers(self.target.layers)


def even_layers(layers: int) -> tuple[int, ...]:
    """The published choice: outputs of five blocks, evenly from block 1 to the last but two; of small models fewer."""
    count = min(_MOST_READ_LAYERS, max(layers - 3, 1))
    if count == 1:
        return (min(layers // 2 + 1, layers),)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) + 1 for i in range(count))


class BlockPredictions(NamedTuple):
    """Predictions of training at `k` slots."""

    logits: Float[torch.Tensor, "k w"]
    confidence: Float[torch.Tensor, " k"] | None
    """Logits of the confidence head; None: there is none."""
    uncorrected: Float[torch.Tensor, "k w"] | None = None
    """The logits before the correction; None: there is none."""
    candidates: Candidates | None = None
    """What a selector or a lattice chooses among; None: there is none."""


class DFlash(CachedLayersNetwork):
    """DFlash (arXiv 2602.06036), optionally with DSpark's Markov and confidence heads (arXiv 2607.05147) and
    DFlash-2's convolution of two taps.

    The target's hidden states at the positions before the anchor (the last decided token) are fused to one feature per
    position. Every layer makes keys and values of the features with its own matrices. A block is the anchor and masks,
    at consecutive positions; its slots attend to all features before the anchor and to each other, without a causal
    mask. So one pass predicts all tokens of the block.
    """

    kind = "dflash"
    config: DFlashConfig

    def __init__(self, config: DFlashConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.config = config
        d, eps, count, rank = config.target.hidden, config.norm_eps, len(config.recorded_layers), config.markov_rank
        self.fc_norm = nn.ModuleList(make_norm(d, eps) for _ in range(count)) if config.fc_norm else None
        self.fc = nn.Linear(count * d, d, bias=False)
        self.hidden_norm = make_norm(d, eps)
        self.layers = nn.ModuleList(
            BlockLayer(config.layer_config_of(i), config.block_size, config.convolution_group)
            if config.convolution
            else EagleLayer(config.layer_config_of(i))
            for i in range(config.layers)
        )
        self.norm = make_norm(d, eps)
        self.mask: nn.Parameter | None
        """What fills the slots after the first, [d]; None: the embedding of the mask token."""
        self.register_parameter("mask", nn.Parameter(torch.zeros(d)) if config.mask_token is None else None)
        self.markov_in = nn.Embedding(config.target.vocab, rank) if rank else None
        self.markov_out = nn.Linear(rank, self.outputs, bias=False) if rank else None
        self.confidence = nn.Linear(d + rank, 1) if config.confidence else None
        sizes = config.target.vocab, self.outputs, config.block_size, eps
        given = config.correction
        self.correction = None if given is None else make_correction(given, d, *sizes)
        self.native: NativeBlockDrafts | None = None
        """The whole network on the CPU kernels, set by `pack_network`."""

    @property
    def slots(self) -> int:
        """Slots of a block."""
        return self.config.block_size

    @property
    def depth(self) -> int:
        """Tokens that a block predicts."""
        return self.config.depth

    @property
    def mask_embedding(self) -> Float[torch.Tensor, " d"]:
        """What fills the slots after the first."""
        if self.mask is not None:
            return self.mask
        assert self.config.mask_token is not None
        return self.embed(torch.tensor(self.config.mask_token, device=self.device))

    def fuse(self, states: Float[torch.Tensor, "*t kd"]) -> Float[torch.Tensor, "*t d"]:
        """The feature, from the target's concatenated hidden states."""
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        out: torch.Tensor = self.hidden_norm(self.fc(states))
        return out

    def block_inputs(self, anchor: Int[torch.Tensor, "*n"]) -> Float[torch.Tensor, "*n k d"]:
        """The slots of blocks from their anchors: the embedding of the anchor, then masks."""
        masks = self.mask_embedding.to(self.dtype).expand(*anchor.shape, self.config.block_size - 1, -1)
        return torch.cat((self.embed(anchor)[..., None, :], masks), -2)

    def predicting_slots(self, x: Float[torch.Tensor, "*n k d"]) -> Float[torch.Tensor, "*n p d"]:
        """The slots that predict tokens."""
        return x[..., self.config.block_size - self.depth :, :]

    def read_target_states(
        self,
        states: Sequence[Float[torch.Tensor, "n d"]],
        place: Int[np.ndarray, " t"],
        layout: Layout,
        cache: KVCache,
    ) -> Float[torch.Tensor, "t d"]:
        """Store the keys and values of positions in the cache, from rows `place` of the target's states; returns the
        features of the positions.
        """
        index = torch.from_numpy(place).to(states[0].device)
        feature = self.fuse(torch.cat([state[index] for state in states], -1).to(cache.k.device, self.dtype))
        if self.native_stack is not None:
            self.native_stack.injecting(feature.contiguous(), layout, cache, 0, len(self.layers))
            return feature
        attention = cached_attention(cache, layout, self.config.decoder_config, cache.k.device)
        angles = self.rope_angles(attention.position)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, EagleLayer)
            attention.write(i, *layer.project(feature, self.config.decoder_config, angles)[1:])
        return feature

    def draft_block(self, anchor: Int[torch.Tensor, " b"], layout: Layout, cache: KVCache) -> torch.Tensor:
        """Inputs of the output head at all slots of a block per anchor, [b s d], whose layout this is."""
        x = self.block_inputs(anchor.to(self.device)).flatten(0, 1)
        for windowed, run in groupby(range(len(self.layers)), lambda i: self.config.window_of(i) > 0):
            x = self._run_layers(x, tuple(run), self._windowed(layout) if windowed else layout, cache)
        out: torch.Tensor = self.norm(x.unflatten(0, (len(anchor), -1)))
        return out

    def predict(
        self,
        states: Float[torch.Tensor, "n s d"],
        feature: Float[torch.Tensor, "n d"],
        subset: TokenSubset | None = None,
    ) -> Blocks:
        """The logits of blocks from inputs of the output head at their slots and the feature before their anchors."""
        blocks = Blocks(states, self.compute_logits(self.predicting_slots(states), subset), feature)
        return blocks if self.correction is None else self.correction.prepare(blocks, self.embed, subset)

    def logits_after(
        self, blocks: Blocks, nodes: Nodes, subset: TokenSubset | None = None
    ) -> Float[torch.Tensor, "k w"]:
        """The logits after nodes of these blocks, with what their tokens change."""
        if self.correction is None:
            return self.add_markov_bias(blocks.logits_at(nodes), nodes.token, subset)
        out: torch.Tensor = self.correction(blocks, nodes, self.embed, None if subset is None else subset.columns)
        return out

    def _run_layers(
        self, x: Float[torch.Tensor, "t d"], which: Sequence[int], layout: Layout, cache: KVCache
    ) -> Float[torch.Tensor, "t d"]:
        """The slots after consecutive layers."""
        if self.native_stack is not None:
            return self.native_stack(x.contiguous(), layout, cache, which[0], which[-1] + 1)
        attention = cached_attention(cache, layout, self.config.decoder_config, cache.k.device)
        angles = self.rope_angles(attention.position)
        for i in which:
            x = self.layers[i](x, angles, i, attention)
        return x

    def _windowed(self, layout: Layout) -> Layout:
        """The layout of all slots in layers with a window."""
        c, after = self.config, layout.position + 1
        return replace(
            layout,
            visible_prefix=after if c.window_causal else layout.visible_prefix,
            window_end=layout.visible_prefix - c.block_size if c.window_from_anchor else after,
        )

    def add_markov_bias(
        self, logits: Float[torch.Tensor, "k w"], before: Int[torch.Tensor, " k"], subset: TokenSubset | None = None
    ) -> Float[torch.Tensor, "k w"]:
        """The logits after the tokens `before`: with the bias of the Markov head, if there is one."""
        if self.markov_in is None or self.markov_out is None:
            return logits
        row = self.markov_in(before)
        if subset is None:
            return logits + self.markov_out(row).float()
        return logits + F.linear(row, self.markov_out.weight[subset.columns].to(row.dtype)).float()

    def confidence_logits(
        self, state: Float[torch.Tensor, "k d"], before: Int[torch.Tensor, " k"]
    ) -> Float[torch.Tensor, " k"] | None:
        """Logits of the share of the distribution after the tokens `before` that the target has too."""
        if self.confidence is None:
            return None
        inputs = state if self.markov_in is None else torch.cat((state, self.markov_in(before).to(state.dtype)), -1)
        return self.confidence(inputs).float()[:, 0]

    def forward(
        self,
        token: Int[torch.Tensor, "b s"],
        features: Sequence[Float[torch.Tensor, "b s d"]],
        anchor: Int[torch.Tensor, "b a"],
        wanted: Bool[torch.Tensor, "b a p"],
        subset: TokenSubset | None = None,
        right: Int[torch.Tensor, " k"] | None = None,
    ) -> BlockPredictions:
        """Predictions of the `wanted` slots of blocks whose anchors are at the positions `anchor`; `subset`: of these
        tokens only. What corrects a slot reads the true tokens before it. `right`: which of the tokens each wanted slot
        should predict, for a selector or a lattice.
        """
        b, a = anchor.shape
        angles = self.rope_angles(torch.arange(token.shape[1], device=token.device))
        c, feature = self.config, self.fuse(torch.cat(tuple(features), -1).to(self.dtype))
        attention = BlockAttention(anchor, c.window_of, c.window_causal, c.window_from_anchor)
        position = anchor[..., None] + torch.arange(self.config.block_size, device=anchor.device)
        block_angles = self.rope_angles(position.flatten(1))
        x = self.block_inputs(token.gather(1, anchor)).flatten(1, 2)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, EagleLayer)
            attention.set_context(*layer.project(feature, self.config.decoder_config, angles)[1:])
            x = layer(x, block_angles, i, attention)
        x, steps = x.view(b, a, self.config.block_size, -1), torch.arange(self.depth + 1, device=token.device)
        # The token before the anchor, the anchor, and those that the slots but the last predict.
        path = F.pad(token, (1, self.depth)).gather(1, (anchor[..., None] + steps).flatten(1)).view(b, a, -1)
        if self.correction is None:
            state, before = self.norm(self.predicting_slots(x)[wanted]), path[..., 1:][wanted]
            logits = self.add_markov_bias(self.compute_logits(state, subset), before, subset)
            return BlockPredictions(logits, self.confidence_logits(state, before))
        row, block, slot = wanted.nonzero().unbind(-1)
        last = feature.gather(1, (anchor - 1).clamp_min(0)[..., None].expand(-1, -1, feature.shape[-1]))
        blocks = self.predict(self.norm(x).flatten(0, 1), last.flatten(0, 1), subset)
        nodes = Nodes(row * a + block, slot, path[row, block])
        columns = None if subset is None else subset.columns
        candidates = None if right is None else self.correction.score_with(right, blocks, nodes, columns)
        return BlockPredictions(self.logits_after(blocks, nodes, subset), None, blocks.logits_at(nodes), candidates)
