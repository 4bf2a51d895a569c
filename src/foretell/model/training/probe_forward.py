"""Differentiable forward pass of probe embeddings at several cuts of a sequence: the training of probes that the target
reads beside its own tokens.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Bool, Float, Int

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
from foretell.model.block.rope import rope_angles
from foretell.model.config.model import ModelConfig


def probe_forward(
    decoder: Decoder,
    token: Int[torch.Tensor, "b s"],
    cut: Int[torch.Tensor, "b g"],
    inputs: Float[torch.Tensor, "*g l d"],
    context: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> Float[torch.Tensor, "b g l d"]:
    """Hidden states after the final norm of the probes `inputs`, read after each of `g` cuts of a sequence; probe `i`
    (from 0) has position `cut + 1 + i`. The probes of all cuts are the same, `[l d]`, or each cut has its own, `[b g l
    d]`. A block reads them in the context of its number, which the sequence is read without.

    The probes of a cut attend to the sequence up to and with position `cut`, and to earlier probes of the same cut; the
    sequence and other cuts do not see them, as probes of a token tree. Padding is at the end. The sequence is read
    without a gradient, because it does not depend on the probes.
    """
    b, s = token.shape
    c, g, count = decoder.config, cut.shape[1], inputs.shape[-2]
    offset = torch.arange(1, count + 1, device=token.device)
    position = torch.arange(s, device=token.device).expand(b, s)
    probe_position = (cut[:, :, None] + offset).clamp(max=c.context - 1).flatten(1)
    sequence = _SequenceAttention(c, position, _causal_mask(s, token.device).expand(b, s, s))
    probes = _SequenceAttention(c, probe_position, _probe_mask(cut, count, s), sequence)
    ropes = decoder.rope_tables, decoder.local_rope_tables
    angles, probe_angles = ([rope_angles(rope, p) for rope in ropes] for p in (position, probe_position))
    x = decoder.embed(token.flatten()).view(b, s, -1)
    y = inputs.to(x.dtype).expand(b, g, count, -1).flatten(1, 2)
    for i, block in enumerate(decoder.blocks):
        assert isinstance(block, DecoderBlock)
        rotation, probe_rotation = (
            None if i in c.unrotated_layers else each[c.window_of(i) > 0] for each in (angles, probe_angles)
        )
        with torch.no_grad():
            if i + 1 < len(decoder.blocks):
                x = block(x, c.sizes_of(i), rotation, i, sequence)
            else:
                sequence.store(*block.project(block.attention_norm(x), c.sizes_of(i), rotation)[1:])
        with context(i):
            y = block(y, c.sizes_of(i), probe_rotation, i, probes)
    return decoder.final_norm(y).to(decoder.embedding.dtype).view(b, g, count, -1)


class _SequenceAttention(AttentionBackend):
    """Attention within `[b, n]` positions and to an earlier sequence, whose keys of the current layer are stored."""

    def __init__(
        self,
        config: ModelConfig,
        position: Int[torch.Tensor, "b n"],
        mask: Bool[torch.Tensor, "b n s"],
        earlier: "_SequenceAttention | None" = None,
    ) -> None:
        self._config, self._position, self._earlier = config, position, earlier
        key_position = position if earlier is None else torch.cat((earlier._position, position), 1)
        distance = position[:, :, None] - key_position[:, None]
        seen = position[:, :, None] % config.window + 1 if config.chunked and config.window else config.window
        self._mask, self._window_mask = mask, mask & (distance < seen) if config.window else mask
        self._k, self._v = torch.empty(0), torch.empty(0)

    def store(self, k: Float[torch.Tensor, "b n g e"], v: Float[torch.Tensor, "b n g e"]) -> None:
        """Store the keys and values of the current layer."""
        self._k, self._v = k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, layer: int, q: Queries, k: Keys, v: Keys, extra: HeadScores = None) -> Merged:
        """Attention over the keys that the mask of each position allows."""
        c, earlier = self._config, self._earlier
        self.store(k, v)
        q = scale_queries(q, self._position, c.query_scaling_of(layer))
        keys, values = self._k, self._v
        if earlier is not None:
            keys, values = torch.cat((earlier._k, keys), 2), torch.cat((earlier._v, values), 2)
        keys, values = (part.repeat_interleave(q.shape[2] // part.shape[1], 1) for part in (keys, values))
        mask = self._window_mask if c.window_of(layer) else self._mask
        extra = None if extra is None else extra[:, None].expand(-1, q.shape[1])
        out = masked_attention(q.transpose(1, 2), keys, values, mask[:, None], c.scale, c.attention_softcap, extra)
        merged: torch.Tensor = out.transpose(1, 2).flatten(2)
        return merged


def _causal_mask(s: int, device: torch.device) -> Bool[torch.Tensor, "s s"]:
    return torch.ones(s, s, dtype=torch.bool, device=device).tril()


def _probe_mask(cut: Int[torch.Tensor, "b g"], probes: int, s: int) -> Bool[torch.Tensor, "b n t"]:
    """Keys that every probe of every cut attends to: first the `s` positions of the sequence, then the `n` probes."""
    b, g = cut.shape
    sequence = torch.arange(s, device=cut.device) <= cut[:, :, None]
    own = torch.kron(torch.eye(g, device=cut.device), _causal_mask(probes, cut.device).float()).bool()
    return torch.cat((sequence.repeat_interleave(probes, 1), own.expand(b, g * probes, g * probes)), 2)
