"""A target that learns together with its heads: low-rank changes to its matrices, which can be added to them
afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn

from foretell.model.decoder import Decoder, DecoderBlock, FeedForward
from foretell.model.linear import Linear
from foretell.model.training.full_forward import full_forward
from foretell.speculator.network.base import TokenSubset
from foretell.speculator.network.heads import HeadsNetwork


class LowRank(nn.Module):
    """`weight x + 2 up down x` (LoRA, Hu et al., arXiv 2106.09685); `up` starts at zero, so nothing changes at
    first.
    """

    def __init__(self, linear: Linear, rank: int) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    @property
    def change(self) -> Float[torch.Tensor, "o i"]:
        """What is to be added to the weight."""
        return 2 * self.up @ self.down

    def forward(self, x: Float[torch.Tensor, "*t i"]) -> Float[torch.Tensor, "*t o"]:
        """The change's part of the output."""
        return 2 * F.linear(F.linear(x, self.down), self.up)


class Tuned(nn.Module):
    """Heads and the changes to their target, which is itself no part of the module: what is trained, averaged and
    checkpointed stays small.
    """

    def __init__(self, network: HeadsNetwork, decoder: Decoder, rank: int) -> None:
        super().__init__()
        self.network = network
        self.changes = nn.ModuleList(LowRank(linear, rank) for linear in _linears(decoder))
        self._decoder = [decoder]

    def forward(
        self,
        token: Int[torch.Tensor, "b s"],
        h: Float[torch.Tensor, "b s d"],
        row: Int[torch.Tensor, " n"],
        place: Int[torch.Tensor, " n"],
        few: Int[torch.Tensor, " m"],
        joint: bool,
        among: TokenSubset | None = None,
    ) -> tuple[Float[torch.Tensor, "n k w"], Float[torch.Tensor, "_ v"]]:
        """Logits of the heads at some positions (over candidates, if these are given), and the tuned target's own at a
        `few` of these.

        Not `joint`: from `h`, the states of the target as it was, and none of its own.
        """
        if not joint:
            # Processes that train together expect every parameter to take part.
            idle = sum(p.sum() for p in self.changes.parameters()) * 0
            return self.network(h[row, place], among) + idle, h.new_zeros(0, self.network.target_info.vocab)
        decoder = self._decoder[0]
        with self._applied(decoder):
            x = full_forward(decoder, decoder.embed(token.reshape(-1)).view(*token.shape, -1))
        states = decoder.final(x[row, place])
        return self.network(states, among), decoder.logits(states[few])

    @contextmanager
    def _applied(self, decoder: Decoder) -> Iterator[None]:
        """The decoder computes with the changes for the length of a block; others share it."""
        hooks = [
            linear.register_forward_hook(partial(_add, change))
            for linear, change in zip(_linears(decoder), self.changes, strict=True)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def added(self, decoder: Decoder) -> Decoder:
        """Another decoder of the same weights, changed for good."""
        for change, linear in zip(self.changes, _linears(decoder), strict=True):
            assert isinstance(change, LowRank)
            linear.weight.data = (linear.weight.float() + change.change.to(linear.weight.device)).to(
                linear.weight.dtype
            )
        return decoder


def _add(change: nn.Module, linear: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """A forward hook: the layer's output and its change's part."""
    out: torch.Tensor = output + change(inputs[0])
    return out


def _linears(decoder: Decoder) -> Iterator[Linear]:
    """Every matrix of the blocks."""
    for block in decoder.blocks:
        assert isinstance(block, DecoderBlock)
        if not isinstance(block.mlp, FeedForward):
            raise ValueError("a target with experts cannot be tuned here; train its heads alone")
        yield from (block.qkv, block.output, block.mlp.gate_up, block.mlp.down)
