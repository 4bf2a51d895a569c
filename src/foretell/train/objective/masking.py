"""Corruption and attention of masked diffusion training."""

import torch
from jaxtyping import Bool, Float, Int


def lowest(score: Float[torch.Tensor, "b t"], count: Int[torch.Tensor, " b"]) -> Bool[torch.Tensor, "b t"]:
    """The `count` positions of every row with the lowest scores, the earlier one of equal ones."""
    is_lowest: torch.Tensor = score.argsort(dim=1, stable=True).argsort(dim=1) < count[:, None]
    return is_lowest


def draw_masks(learned: Bool[torch.Tensor, "b s"]) -> Bool[torch.Tensor, "b s"]:
    """For every row a uniform number (1 to all) of random learned tokens; none in a row that learns nothing."""
    available = learned.sum(1)
    count = (torch.rand(len(learned), device=learned.device) * available).long() + 1
    score = torch.rand(learned.shape, device=learned.device).masked_fill(~learned, 2.0)
    return lowest(score, count) & learned


def bound_weights(learned: Bool[torch.Tensor, "b s"], masked: Bool[torch.Tensor, "b s"]) -> Float[torch.Tensor, "b s"]:
    """Weight of each masked token, by which the sum of cross-entropies estimates an upper bound of the negative
    log-likelihood of the learned tokens: of a row with `L` of them and `n` masks, `L / n` (LLaDA, arXiv 2502.09992,
    equation 6).
    """
    ratio = learned.sum(1) / masked.sum(1).clamp(min=1)
    return masked * ratio[:, None]


def annealed_attention(visible: Bool[torch.Tensor, "b s"], future: float) -> Bool[torch.Tensor, "b 1 s s"]:
    """Which positions attend to which: all earlier ones, and every later one with probability `future` (attention mask
    annealing of DiffuLLaMA, arXiv 2410.17891); `visible` is False at padding.
    """
    b, s = visible.shape
    causal = torch.ones(s, s, dtype=torch.bool, device=visible.device).tril()
    later = torch.rand(b, s, s, device=visible.device) < future
    allowed = (causal | later) & visible[:, None]
    # A row without any key would give no number; padding attends to itself.
    return (allowed | torch.eye(s, dtype=torch.bool, device=visible.device))[:, None]
