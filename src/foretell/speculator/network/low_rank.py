"""Low-rank updates of the target's matrices (LoRA, Hu et al., arXiv 2106.09685)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import nn

from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock, FeedForward
from foretell.model.block.linear import FactoredLinear, Linear

SCALE = 2
"""Scale of the low-rank product (`alpha / rank` in the paper)."""
ADAPTED = ("qkv", "output", "mlp.gate_up", "mlp.down")
"""Linear layers of a block that are adapted, by the paths of their fields, in this order."""


class LoRAUpdate(nn.Module):
    """The low-rank update of a linear layer, `2 * up @ down`; `up` is initially zero."""

    def __init__(self, outputs: int, inputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    @property
    def weight_delta(self) -> Float[torch.Tensor, "o i"]:
        """The update of the weight matrix."""
        return SCALE * self.up @ self.down

    def forward(self, x: Float[torch.Tensor, "*t i"]) -> Float[torch.Tensor, "*t o"]:
        """The update's part of the output."""
        return SCALE * F.linear(F.linear(x, self.down), self.up)


class LoRAAdapters(nn.ModuleList):
    """Updates of all linear layers of a decoder's blocks; `shapes`: see `adapted_shapes`."""

    def __init__(self, shapes: Sequence[tuple[int, int]], rank: int) -> None:
        super().__init__(LoRAUpdate(outputs, inputs, rank) for outputs, inputs in shapes)

    @contextmanager
    def applied_to(self, decoder: Decoder, block: int | None = None) -> Iterator[None]:
        """Context in which the decoder, or one of its blocks alone, computes with the updates."""
        pairs = list(zip(adapted_linears(decoder), self, strict=True))
        if block is not None:
            pairs = pairs[len(ADAPTED) * block :][: len(ADAPTED)]
        hooks = [linear.register_forward_hook(partial(_add_update, update)) for linear, update in pairs]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def merge(self, decoder: Decoder) -> Decoder:
        """Add the updates to the weights of a decoder."""
        for update, linear in zip(self, adapted_linears(decoder), strict=True):
            assert isinstance(update, LoRAUpdate)
            linear.weight.data = (linear.weight.float() + update.weight_delta.to(linear.weight.device)).to(
                linear.weight.dtype
            )
        return decoder


def adapted_shapes(decoder: Decoder) -> tuple[tuple[int, int], ...]:
    """Outputs and inputs of the layers that are adapted."""
    return tuple((linear.weight.shape[0], linear.weight.shape[1]) for linear in adapted_linears(decoder))


def adapted_linears(decoder: Decoder) -> Iterator[Linear]:
    """All linear layers of the blocks.

    Raises:
        ValueError: the decoder has blocks that cannot be adapted.
    """
    for block in decoder.blocks:
        assert isinstance(block, DecoderBlock)
        if not isinstance(block.mlp, FeedForward):
            raise ValueError("a mixture-of-experts target cannot be tuned")
        if not isinstance(block.qkv, Linear | FactoredLinear):
            raise ValueError("a target with latent attention cannot be tuned")
        for linear in (block.qkv, block.output, block.mlp.gate_up, block.mlp.down):
            if not isinstance(linear, Linear):
                raise ValueError("a target of low rank cannot be tuned; tune the model that it was made of")
            yield linear


def _add_update(
    update: nn.Module, linear: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor
) -> torch.Tensor:
    """Forward hook: the layer's output plus that of its update."""
    out: torch.Tensor = output + update(inputs[0])
    return out
