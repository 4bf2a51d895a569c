"""Sampled softmax: a loss over some tokens of the draft vocabulary instead of all.

The output matrix and its softmax are most of the cost of training a small speculator (Jean et al., arXiv 1412.2007).
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int

from foretell.speculator.network.base import TokenSubset

_RANDOM_FRACTION = 4
"""One in so many candidates is drawn at random."""


def sample_candidates(
    logits: Float[torch.Tensor, "k w"], count: int, required: Int[torch.Tensor, " m"] | None = None
) -> TokenSubset | None:
    """`count` tokens of the draft vocabulary: the likeliest by the target's logits, and random others.

    The random ones come from torch's global generator and represent all tokens that are left out: their logits are
    raised by the logarithm of the number of tokens each represents, so the sum over the vocabulary is unbiased.

    `required`: draft indices of tokens that must be among the candidates; `count` is raised to twice their number where
    it is lower. Returns None where `count` is 0 or no token would be left out.
    """
    if count == 0:
        return None
    mass = logits.softmax(-1).sum(0)
    if required is not None:
        mass[required] = torch.inf
        count = max(count, 2 * len(required))
    if count >= len(mass):
        return None
    num_random = count // _RANDOM_FRACTION
    order = mass.argsort(descending=True)
    likely, rest = order[: count - num_random], order[count - num_random :]
    random = rest[torch.randperm(len(rest), device=rest.device)[:num_random]]
    raised = math.log(len(rest) / num_random) if num_random else 0.0
    column, position = torch.cat([likely, random]).sort()
    return TokenSubset(column, torch.where(position < len(likely), 0.0, raised))


class TargetDistributions:
    """The target's distributions of the tokens after `cell`, each computed once, over candidates.

    `label`: the draft indices that are to be predicted there, which are among the candidates; -1: none. `logits_of`:
    the target's logits over the draft vocabulary at cells. `count`: of the candidates; 0: the whole draft vocabulary.
    """

    @torch.no_grad()
    def __init__(
        self,
        cell: Int[torch.Tensor, "n k"],
        label: Int[torch.Tensor, "n k"],
        logits_of: Callable[[Int[torch.Tensor, " u"]], Float[torch.Tensor, "u w"]],
        count: int = 0,
    ) -> None:
        unique, self._index = torch.unique(cell, return_inverse=True)
        logits = logits_of(unique)
        self.candidates = sample_candidates(logits, count, torch.unique(label.clamp_min(0)))
        self._probabilities = torch.softmax(logits if self.candidates is None else self.candidates.select(logits), -1)

    def of(self, column: int | slice = slice(None)) -> Float[torch.Tensor, "*n c"]:
        """The distributions of a column of cells, or of several."""
        return self._probabilities[self._index[:, column]]

    def index(self, label: Int[torch.Tensor, "*n"]) -> Int[torch.Tensor, "*n"]:
        """Labels as indices among the candidates; -1 stays -1."""
        if self.candidates is None:
            return label
        return torch.where(label >= 0, torch.searchsorted(self.candidates.columns, label.clamp_min(0).contiguous()), -1)
