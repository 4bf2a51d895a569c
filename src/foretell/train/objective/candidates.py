"""Sampled softmax: a loss over the tokens that matter in a batch and a few of the others, instead of all that can be
drafted.

The output matrix and its softmax are most of what training a small speculator costs (Jean et al., arXiv 1412.2007).
"""

import math

import torch
from jaxtyping import Float, Int

from foretell.speculator.network.base import TokenSubset

_RANDOM = 4
"""One candidate in so many is drawn at random."""


def candidates(
    distribution: Float[torch.Tensor, "k w"], count: int, certain: Int[torch.Tensor, " m"] | None = None
) -> TokenSubset | None:
    """`count` of the drafted tokens: those with the most mass under the target's distributions `distribution`, the rest
    drawn from torch's own generator.

    `certain`: tokens, by their number among the drafted ones, that must be there; the count grows to twice as many
    where it is less. Tokens drawn stand for all that are left out: their logits are raised by the logarithm of how many
    each stands for, which keeps the sum over the vocabulary right on average. None: `count` is 0, or leaves nothing
    out.
    """
    if count == 0:
        return None
    mass = distribution.sum(0)
    if certain is not None:
        mass[certain] = torch.inf
        count = max(count, 2 * len(certain))
    if count >= len(mass):
        return None
    drawn = count // _RANDOM
    order = mass.argsort(descending=True)
    likely, rest = order[: count - drawn], order[count - drawn :]
    some = rest[torch.randperm(len(rest), device=rest.device)[:drawn]]
    raised = math.log(len(rest) / drawn) if drawn else 0.0
    column, place = torch.cat([likely, some]).sort()
    return TokenSubset(column, torch.where(place < len(likely), 0.0, raised))
