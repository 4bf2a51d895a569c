"""Cheaper copies of a network to draft with: quantised or pruned weights.

What they draft is verified, so any loss is allowed.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import nn

from foretell.model.decoder import Decoder, DecoderBlock
from foretell.model.linear import Linear

Change = Callable[[Decoder], Decoder]
"""What makes a cheaper copy of a decoder; the original stays as it is."""


def unchanged(decoder: Decoder) -> Decoder:
    """The decoder itself."""
    return decoder


def quantized(decoder: Decoder, bits: int, group: int = 0) -> Decoder:
    """A copy whose matrices hold `2**bits - 1` levels, symmetric, one scale per output and `group` inputs (0: all
    inputs).

    Simulated: the levels are stored in the decoder's own type, so this shows what acceptance a width costs, not its
    speed (Yan et al. in QSpec's manner, arXiv 2410.11305). Embeddings, norms and routers are shared with the original.

    Raises:
        ValueError: fewer than 2 or more than 16 bits.
    """
    if not 2 <= bits <= 16 or group < 0:
        raise ValueError(f"quantisation needs 2 to 16 bits and groups of 0 or more inputs, found {bits} and {group}")
    return _changed(decoder, lambda weight: rounded(weight, bits, group))


def rounded(weight: Float[torch.Tensor, "*e o i"], bits: int, group: int = 0) -> Float[torch.Tensor, "*e o i"]:
    """The nearest of `2**bits - 1` equidistant levels around 0 for every weight."""
    inputs, most = weight.shape[-1], 2 ** (bits - 1) - 1
    width = group or inputs
    padded = F.pad(weight.double(), (0, -inputs % width))
    parts = padded.view(*padded.shape[:-1], -1, width)
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-30) / most
    levels = (parts / scale).round().clamp(-most, most) * scale
    out: torch.Tensor = levels.flatten(-2)[..., :inputs].to(weight.dtype)
    return out


def sparse(decoder: Decoder, share: float) -> Decoder:
    """A copy without the `share` of smallest weights of every output (magnitude pruning, Han et al., arXiv 1506.02626).

    Dense storage: it shows what acceptance sparsity costs; a gain in time needs sparse kernels.

    Raises:
        ValueError: a share outside 0..1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"the share of weights to prune lies in 0..1, found {share}")
    return _changed(decoder, lambda weight: pruned(weight, share))


def pruned(weight: Float[torch.Tensor, "*e o i"], share: float) -> Float[torch.Tensor, "*e o i"]:
    """Zeros in place of the smallest weights of every output."""
    count = round(share * weight.shape[-1])
    smallest = weight.abs().topk(count, -1, largest=False).indices
    out: torch.Tensor = weight.scatter(-1, smallest, 0)
    return out


def _changed(decoder: Decoder, change: Callable[[torch.Tensor], torch.Tensor]) -> Decoder:
    """A copy with changed matrices; what is not a matrix of a block or the head is shared."""
    blocks = []
    for block in decoder.blocks:
        assert isinstance(block, DecoderBlock)
        fresh = copy.deepcopy(block)
        _change_all(fresh, change)
        blocks.append(fresh)
    head = decoder.head
    return Decoder(
        decoder.config, decoder.embedding, blocks, decoder.norm, Linear(change(head.weight), head.bias), decoder.skip
    )


def _change_all(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name, child in module.named_children():
        if not isinstance(child, Linear):
            _change_all(child, change)
        elif name != "router":
            setattr(module, name, Linear(change(child.weight), child.bias))
