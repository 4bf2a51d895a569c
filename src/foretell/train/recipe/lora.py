"""LoRA adapters of the target (Hu et al., arXiv 2106.09685), trained together with heads and merged afterwards."""

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

_SCALE = 2
"""Scale of the low-rank product (`alpha / rank` in the paper)."""


class LoRAUpdate(nn.Module):
    """The low-rank update of a linear layer, `2 * up @ down`; `up` is initially zero."""

    def __init__(self, linear: Linear, rank: int) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    @property
    def weight_delta(self) -> Float[torch.Tensor, "o i"]:
        """The update of the weight matrix."""
        return _SCALE * self.up @ self.down

    def forward(self, x: Float[torch.Tensor, "*t i"]) -> Float[torch.Tensor, "*t o"]:
        """The update's part of the output."""
        return _SCALE * F.linear(F.linear(x, self.down), self.up)


class HeadsWithLoRA(nn.Module):
    """Heads and LoRA adapters of their target.

    The target itself is not a submodule, so that it is neither optimised nor checkpointed.
    """

    def __init__(self, network: HeadsNetwork, decoder: Decoder, rank: int) -> None:
        super().__init__()
        self.network = network
        self.adapters = nn.ModuleList(LoRAUpdate(linear, rank) for linear in _adapted_linears(decoder))
        self._decoder = [decoder]

    def forward(
        self,
        token: Int[torch.Tensor, "b s"],
        h: Float[torch.Tensor, "b s d"],
        row: Int[torch.Tensor, " n"],
        position: Int[torch.Tensor, " n"],
        subset: Int[torch.Tensor, " m"],
        train_target: bool,
        candidates: TokenSubset | None = None,
    ) -> tuple[Float[torch.Tensor, "n k w"], Float[torch.Tensor, "_ v"]]:
        """Logits of the heads at positions (over the draft vocabulary or candidates), and of the target at a `subset`.

        Without `train_target`, the heads read `h`, the states of the original target, and there are no logits of the
        target.
        """
        if not train_target:
            # Distributed training expects every parameter to take part.
            zero = sum(p.sum() for p in self.adapters.parameters()) * 0
            return self.network(h[row, position], candidates) + zero, h.new_zeros(0, self.network.target_info.vocab)
        decoder = self._decoder[0]
        with self._apply_adapters(decoder):
            x = full_forward(decoder, decoder.embed(token.reshape(-1)).view(*token.shape, -1))
        states = decoder.final_norm(x[row, position])
        return self.network(states, candidates), decoder.logits(states[subset])

    @contextmanager
    def _apply_adapters(self, decoder: Decoder) -> Iterator[None]:
        """Context in which the shared decoder computes with the adapters."""
        hooks = [
            linear.register_forward_hook(partial(_add_adapter_output, adapter))
            for linear, adapter in zip(_adapted_linears(decoder), self.adapters, strict=True)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def merge(self, decoder: Decoder) -> Decoder:
        """Add the adapters to the weights of a copy of the decoder."""
        for adapter, linear in zip(self.adapters, _adapted_linears(decoder), strict=True):
            assert isinstance(adapter, LoRAUpdate)
            linear.weight.data = (linear.weight.float() + adapter.weight_delta.to(linear.weight.device)).to(
                linear.weight.dtype
            )
        return decoder


def _add_adapter_output(
    adapter: nn.Module, linear: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor
) -> torch.Tensor:
    """Forward hook: the layer's output plus that of its adapter."""
    out: torch.Tensor = output + adapter(inputs[0])
    return out


def _adapted_linears(decoder: Decoder) -> Iterator[Linear]:
    """All linear layers of the blocks."""
    for block in decoder.blocks:
        assert isinstance(block, DecoderBlock)
        if not isinstance(block.mlp, FeedForward):
            raise ValueError("a mixture-of-experts target cannot be tuned; train its heads alone")
        if not isinstance(block.qkv, Linear):
            raise ValueError("a target with latent attention cannot be tuned; train its heads alone")
        yield from (block.qkv, block.output, block.mlp.gate_up, block.mlp.down)
