"""Differentiable forward pass of decoder blocks over whole sequences, without a cache."""

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import nn

from foretell.model.block.attention import (
    AttentionBackend,
    HeadScores,
    Keys,
    Merged,
    Queries,
    masked_attention,
    scale_queries,
)
from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock
from foretell.model.block.rope import RopeTables, rope_angles
from foretell.model.config.model import ModelConfig
from foretell.model.training.chunked_attention import KeyValue, causal_attention


def full_forward(
    decoder: Decoder,
    x: Float[torch.Tensor, "b s d"],
    first: int = 0,
    last: int | None = None,
    attention: AttentionBackend | None = None,
    inputs: Float[torch.Tensor, "b s l w"] | None = None,
) -> Float[torch.Tensor, "b s d"]:
    """Blocks `first .. last-1` (None: to the end) of a decoder over sequences from position 0, padded at the end.

    Where layers share keys and values, calls for parts of the blocks share an `attention`. Layers with inputs of their
    own need those of `inputs_of_layers`.
    """
    ropes = decoder.rope_tables, decoder.local_rope_tables
    blocks = list(decoder.blocks)[first:last]
    return forward_blocks(blocks, decoder.config, ropes, x, first, attention, inputs=inputs)


def inputs_of_layers(decoder: Decoder, token: Int[torch.Tensor, "b s"]) -> Float[torch.Tensor, "b s l w"] | None:
    """Each layer's own inputs of tokens; None: the decoder has none."""
    if decoder.layer_inputs is None:
        return None
    flat = token.flatten()
    return decoder.layer_inputs(flat, decoder.embed(flat)).unflatten(0, token.shape)


def forward_blocks(
    blocks: Iterable[nn.Module],
    config: ModelConfig,
    ropes: tuple[RopeTables, RopeTables],
    x: Float[torch.Tensor, "b s d"],
    first: int = 0,
    attention: AttentionBackend | None = None,
    position: Int[torch.Tensor, "*p"] | None = None,
    inputs: Float[torch.Tensor, "b s l w"] | None = None,
) -> Float[torch.Tensor, "b s d"]:
    """Blocks `first, first+1, …` of a configuration; `ropes`: rotary tables of full and of sliding-window layers.

    `attention` (None: causal) of inputs at the positions `position`, [s] or [b, s] (None: `0, 1, …`). `inputs`: the
    own ones of all layers.
    """
    position = torch.arange(x.shape[1], device=x.device) if position is None else position
    attention = CausalAttention(config) if attention is None else attention
    angles = [rope_angles(rope, position) for rope in ropes]
    for i, block in enumerate(blocks, first):
        assert isinstance(block, DecoderBlock)
        rotation = None if i in config.unrotated_layers else angles[config.window_of(i) > 0]
        own = None if inputs is None else inputs[:, :, i]
        x = block(x, config.sizes_of(i), rotation, i, attention, own)
    return x


class CausalAttention(AttentionBackend):
    """Causal attention over whole sequences `[b, s]`, within the sliding windows of a configuration.

    `kept`: keys and values of the last layer of each kind that has its own, which other layers read.
    """

    def __init__(self, config: ModelConfig, kept: Mapping[int, KeyValue] = {}) -> None:
        self._config, self.kept = config, dict(kept)
        self._keeps = {config.window_of(i): config.kv_layer_of(i) for i in range(config.layers)}.values()

    def attend(self, layer: int, q: Queries, k: Keys, v: Keys, extra: HeadScores = None) -> Merged:
        """Every position attends to itself and earlier ones."""
        if layer in self._keeps:
            self.kept[layer] = k, v
        return self._merged(layer, q, k, v, extra)

    def attend_shared(self, layer: int, q: Queries, extra: HeadScores = None) -> Merged:
        """As `attend`, with the keys and values that were kept of the layer which this one reads."""
        kept = self.kept.get(self._config.kv_layer_of(layer))
        return super().attend_shared(layer, q, extra) if kept is None else self._merged(layer, q, *kept, extra)

    def _merged(self, layer: int, q: Queries, k: Keys, v: Keys, extra: HeadScores) -> Merged:
        c, window, s = self._config, self._config.window_of(layer), q.shape[1]
        q = scale_queries(q, torch.arange(s, device=q.device).expand(len(q), s), c.query_scaling_of(layer))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if c.attention_softcap or 0 < window < s or extra is not None:
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
            mask = _causal_mask(s, window, c.chunked, q.device)
            extra = None if extra is None else extra[:, None].expand(-1, s)
            out = masked_attention(q, k, v, mask, c.scale, c.attention_softcap, extra)
        else:
            out = causal_attention(q, k, v, c.scale)
        merged: torch.Tensor = out.transpose(1, 2).flatten(2)
        return merged


def _causal_mask(s: int, window: int, chunked: bool, device: torch.device) -> Bool[torch.Tensor, "s s"]:
    """The causal mask of `s` positions within a sliding window (0: none); `chunked`: it begins at a multiple of its
    size.
    """
    position = torch.arange(s, device=device)[:, None]
    distance = position - torch.arange(s, device=device)
    return (distance >= 0) & (distance < (position % window + 1 if window and chunked else window or s))
