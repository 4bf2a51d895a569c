"""Sampled softmax: a loss over some tokens of the draft vocabulary instead of all.

The output matrix and its softmax are most of the cost of training a small speculator (Jean et al., arXiv 1412.2007).
"""

import math

import torch
from jaxtyping import Float, Int

from foretell.speculator.network.base import TokenSubset

_RANDOM_FRACTION = 4
"""One in so many candidates is drawn at random."""


def sample_candidates(
    distribution: Float[torch.Tensor, "k w"], count: int, required: Int[torch.Tensor, " m"] | None = None
) -> TokenSubset | None:
    """`count` tokens of the draft vocabulary: the likeliest under the target's distributions, and random others.

    The random ones come from torch's global generator and represent all tokens that are left out: their logits are
    raised by the logarithm of the number of tokens each represents, so the sum over the vocabulary is unbiased.

    `required`: draft indices of tokens that must be among the candidates; `count` is raised to twice their number where
    it is lower. Returns None where `count` is 0 or no token would be left out.
    """
    if count == 0:
        return None
    mass = distribution.sum(0)
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
