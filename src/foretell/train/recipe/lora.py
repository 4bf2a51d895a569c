"""LoRA adapters of the target (Hu et al., arXiv 2106.09685), trained together with heads and merged afterwards."""

import torch
from jaxtyping import Float, Int
from torch import nn

from foretell.model.block.decoder import Decoder
from foretell.model.training.full_forward import full_forward
from foretell.speculator.network.base import TokenSubset
from foretell.speculator.network.heads import HeadsNetwork
from foretell.speculator.network.low_rank import LoRAAdapters, adapted_shapes


class HeadsWithLoRA(nn.Module):
    """Heads and LoRA adapters of their target.

    The target itself is not a submodule, so that it is neither optimised nor checkpointed.
    """

    def __init__(self, network: HeadsNetwork, decoder: Decoder, rank: int) -> None:
        super().__init__()
        self.network = network
        self.adapters = LoRAAdapters(adapted_shapes(decoder), rank)
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
        with self.adapters.applied_to(decoder):
            x = full_forward(decoder, decoder.embed(token.reshape(-1)).view(*token.shape, -1))
        states = decoder.final_norm(x[row, position])
        return self.network(states, candidates), decoder.logits(states[subset])

    def merge(self, decoder: Decoder) -> Decoder:
        """Add the adapters to the weights of a copy of the decoder."""
        return self.adapters.merge(decoder)
