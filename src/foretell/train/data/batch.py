"""What a step of training sees."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Batch:
    """Texts of the target, padded at the end, with the target's hidden states.

    Worked example of the indices: a state at position `t` produced token `t + 1`, so the base head scores `token[:, t +
    1]` from `features[...][:, t]`, and the first Medusa head `token[:, t + 2]`.
    """

    token: Int[torch.Tensor, "b s"]
    loss_mask: Bool[torch.Tensor, "b s"]
    """The token at this position is to be learned: it belongs to an answer (or to plain text), and is no padding."""
    real: Bool[torch.Tensor, "b s"]
    """No padding."""
    features: tuple[Float[torch.Tensor, "b s d"], ...]
    """One tensor per recorded layer of the recipe, in its order."""

    def shifted_loss_mask(self, ahead: int) -> Bool[torch.Tensor, "b t"]:
        """For positions `0 .. s-ahead-1`: whether the token `ahead` positions later is to be learned."""
        return self.loss_mask[:, ahead:]
