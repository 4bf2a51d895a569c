"""Attention that is not causal: over whole sequences under a mask, and over a window of a sequence."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float

from foretell.model.block.attention import AttentionBackend, HeadScores, Keys, Merged, Queries
from foretell.model.config.model import ModelConfig


def unsupported_part(config: ModelConfig) -> str | None:
    """A part of an architecture that these passes do not run, in words; None: there is none."""
    parts = {
        "sliding windows": config.window > 0,
        "recurrent states": config.state is not None,
        "latent attention": config.latent is not None,
        "soft caps of attention": config.attention_softcap > 0,
        "attention sinks": bool(config.sink_layers),
        "layers without attention": bool(config.attention_free_layers),
        "scaled queries": config.query_scaling is not None,
        "inputs per layer": config.layer_inputs is not None,
        "layers that share keys": bool(config.kv_layers),
    }
    return next((name for name, present in parts.items() if present), None)


def masked_scores(
    q: Float[torch.Tensor, "b n h e"],
    k: Float[torch.Tensor, "b s g e"],
    v: Float[torch.Tensor, "b s g e"],
    mask: Bool[torch.Tensor, "#b 1 n s"] | None,
    scale: float,
) -> Float[torch.Tensor, "b n he"]:
    """Grouped-query attention of every query over the keys that the mask allows; None: over all."""
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    k, v = (part.repeat_interleave(repeats, 1) for part in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    merged: torch.Tensor = out.transpose(1, 2).flatten(2)
    return merged


class MaskedAttention(AttentionBackend):
    """Attention over whole sequences, to the positions that a mask allows."""

    def __init__(self, config: ModelConfig, mask: Bool[torch.Tensor, "#b 1 s s"] | None) -> None:
        self._scale, self._mask = config.scale, mask

    def attend(self, layer: int, q: Queries, k: Keys, v: Keys, extra: HeadScores = None) -> Merged:
        """Every position attends to those that the mask allows."""
        return masked_scores(q, k, v, self._mask, self._scale)


class SequenceStore:
    """Keys and values of all positions of one sequence, each as the last pass that read the position left them."""

    def __init__(self, config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = 2, config.layers, 1, length, config.kv_heads, config.head_dim
        self._kept = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def length(self) -> int:
        """Positions that it has room for."""
        return self._kept.shape[3]

    def grow(self, length: int) -> None:
        """Make room for at least `length` positions."""
        if length > self.length:
            room = max(length, 2 * self.length) - self.length
            self._kept = F.pad(self._kept, (0, 0, 0, 0, 0, room))

    def copy(self) -> "SequenceStore":
        """An independent copy."""
        other = object.__new__(SequenceStore)
        other._kept = self._kept.clone()
        return other

    def write(self, layer: int, begin: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Replace keys and values from position `begin` on."""
        self._kept[0, layer, :, begin : begin + k.shape[1]] = k
        self._kept[1, layer, :, begin : begin + v.shape[1]] = v

    def read(self, layer: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the positions before `end`, `[1, end, g, e]` each."""
        return self._kept[0, layer, :, :end], self._kept[1, layer, :, :end]


class WindowAttention(AttentionBackend):
    """Attention of a window of a sequence to the window itself and to what a store keeps of all other positions
    before `end`; the store takes the window's keys and values.
    """

    def __init__(
        self,
        config: ModelConfig,
        store: SequenceStore,
        begin: int,
        end: int,
        mask: Bool[torch.Tensor, "1 1 n s"] | None = None,
    ) -> None:
        self._scale, self._store, self._begin, self._end, self._mask = config.scale, store, begin, end, mask

    def attend(self, layer: int, q: Queries, k: Keys, v: Keys, extra: HeadScores = None) -> Merged:
        """Write the window, then attend to all positions before the end."""
        self._store.write(layer, self._begin, k, v)
        keys, values = self._store.read(layer, self._end)
        return masked_scores(q, keys.to(q.dtype), values.to(q.dtype), self._mask, self._scale)
