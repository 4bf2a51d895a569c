"""EAGLE-1's objective: guess the target's next feature, and what its head would make of it."""

import torch
import torch.nn.functional as F
from jaxtyping import Float


def feature_loss(guess: Float[torch.Tensor, "k d"], feature: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, ""]:
    """Smooth L1 (Girshick, arXiv 1504.08083) between guessed and true features, mean over numbers; 0 where there are
    none.
    """
    distance = F.smooth_l1_loss(guess.float(), feature.float(), reduction="sum")
    return distance / max(1, guess.numel())


def add_uniform_noise(features: Float[torch.Tensor, "*t d"], half_width: float) -> Float[torch.Tensor, "*t d"]:
    """Features with uniform noise of `-width .. width`, so that a drafter gets used to its own errors (EAGLE, arXiv
    2401.15077).
    """
    return features + (torch.rand_like(features) * 2 - 1) * half_width if half_width else features
