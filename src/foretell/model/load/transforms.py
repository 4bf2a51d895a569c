"""Quantised copies of a target that serve as its draft model.

The target verifies their drafts, so any loss of quality is allowed.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import nn

from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock
from foretell.model.block.linear import Linear

DecoderTransform = Callable[[Decoder], Decoder]
"""Returns a changed copy of a decoder; the original stays as it is."""


def identity(decoder: Decoder) -> Decoder:
    """The decoder itself, unchanged."""
    return decoder


def fake_quantize(decoder: Decoder, bits: int, group: int = 0) -> Decoder:
    """A copy whose matrices are rounded symmetrically to `2**bits - 1` levels, with one scale per output and `group`
    inputs (0: all inputs).

    Simulated (fake quantisation): weights keep the decoder's dtype, so this shows the acceptance that a bit width
    costs, not its speed (compare QSpec, arXiv 2410.11305). Embeddings, norms and routers are shared with the original.

    Raises:
        ValueError: fewer than 2 or more than 16 bits.
    """
    if not 2 <= bits <= 16 or group < 0:
        raise ValueError(f"quantisation needs 2 to 16 bits and groups of 0 or more inputs, found {bits} and {group}")
    return _map_matrices(decoder, lambda weight: fake_quantize_weight(weight, bits, group))


def fake_quantize_weight(
    weight: Float[torch.Tensor, "*e o i"], bits: int, group: int = 0
) -> Float[torch.Tensor, "*e o i"]:
    """Every weight rounded to the nearest of `2**bits - 1` equidistant levels around 0."""
    inputs, max_level = weight.shape[-1], 2 ** (bits - 1) - 1
    width = group or inputs
    padded = F.pad(weight.double(), (0, -inputs % width))
    groups = padded.view(*padded.shape[:-1], -1, width)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / max_level
    levels = (groups / scale).round().clamp(-max_level, max_level) * scale
    out: torch.Tensor = levels.flatten(-2)[..., :inputs].to(weight.dtype)
    return out


def _map_matrices(decoder: Decoder, change: Callable[[torch.Tensor], torch.Tensor]) -> Decoder:
    """A copy with changed matrices of the blocks and the head; all other tensors are shared."""
    blocks = []
    for block in decoder.blocks:
        assert isinstance(block, DecoderBlock)
        copied = copy.deepcopy(block)
        _map_linears(copied, change)
        blocks.append(copied)
    head = decoder.head
    return Decoder(
        decoder.config, decoder.embedding, blocks, decoder.norm, Linear(change(head.weight), head.bias), decoder.skip
    )


def _map_linears(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name, child in module.named_children():
        if not isinstance(child, Linear):
            _map_linears(child, change)
        elif name != "router":
            setattr(module, name, Linear(change(child.weight), child.bias))
