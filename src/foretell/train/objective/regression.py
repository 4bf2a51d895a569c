"""EAGLE-1's regression onto the target's next feature (arXiv 2401.15077)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float


def feature_loss(predicted: Float[torch.Tensor, "k d"], feature: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, ""]:
    """Mean smooth L1 distance (Girshick, arXiv 1504.08083) between predicted and true features; 0 for `k = 0`."""
    distance = F.smooth_l1_loss(predicted.float(), feature.float(), reduction="sum")
    return distance / max(1, predicted.numel())


def add_uniform_noise(features: Float[torch.Tensor, "*t d"], half_width: float) -> Float[torch.Tensor, "*t d"]:
    """Features with uniform noise in `-half_width .. half_width`, which makes the drafter robust to its own errors."""
    return features + (torch.rand_like(features) * 2 - 1) * half_width if half_width else features
