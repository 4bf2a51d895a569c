"""The scale of a new network's logits."""

from collections.abc import Callable

import torch
from torch import nn

_MOST_HALVINGS = 12
_WORTHWHILE = 0.95
"""Largest loss relative to the one before for which a norm is halved once more."""


@torch.no_grad()
def output_scale(norm: nn.Parameter, loss: Callable[[], float], seed: int) -> float:
    """The power of two by which to scale the output norm of a new network: it is halved as long as that lowers a loss
    by a twentieth. The norm itself stays as it is.

    New networks take the target's final norm, whose weights are near 2 in some models and above 100 in others, and a
    network that has learned nothing should not be certain of a token. `seed`: of the loss's random numbers.
    """
    given, scale = norm.clone(), 1.0

    def scaled_loss(factor: float) -> float:
        norm.copy_(given * factor)
        torch.manual_seed(seed)
        return loss()

    before = scaled_loss(scale)
    while scale > 0.5**_MOST_HALVINGS and (now := scaled_loss(scale / 2)) < _WORTHWHILE * before:
        before, scale = now, scale / 2
    norm.copy_(given)
    return scale
