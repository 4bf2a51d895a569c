"""The input of a recipe's loss."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Batch:
    """Token sequences, padded at the end, with the target's hidden states.

    Worked example of the indices: the state at position `t` produced token `t + 1`, so the target's own head scores
    `token[:, t + 1]` from `features[...][:, t]`, and the first Medusa head scores `token[:, t + 2]`.
    """

    token: Int[torch.Tensor, "b s"]
    loss_mask: Bool[torch.Tensor, "b s"]
    """Tokens to learn: those of an answer, or of plain text, and no padding."""
    features: tuple[Float[torch.Tensor, "b s d"], ...]
    """One tensor per hidden layer of the recipe, in the recipe's order."""
