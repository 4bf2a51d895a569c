"""Which tokens a pass of a masked diffusion model predicts, and which of them stay."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Revealed:
    """Predictions at masked positions."""

    token: Int[torch.Tensor, " k"]
    confidence: Float[torch.Tensor, " k"]
    """What decides which of them stay: their probabilities at temperature 1, or random numbers."""


def split_evenly(total: int, parts: int) -> list[int]:
    """`total` in `parts` numbers that differ by at most one, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def choose_tokens(
    logits: Float[torch.Tensor, "k v"], temperature: float, remasking: str, generator: torch.Generator
) -> Revealed:
    """The most probable tokens, or draws by Gumbel-max in float64 (in lower precision the noise is cut off, which
    lowers the temperature: arXiv 2409.02908).
    """
    scores = logits.double().cpu()
    token = scores.argmax(-1)
    if temperature:
        uniform = torch.rand(scores.shape, generator=generator, dtype=torch.float64).clamp_min(1e-300)
        token = (scores / temperature - torch.log(-torch.log(uniform))).argmax(-1)
    if remasking == "random":
        return Revealed(token, torch.rand(len(token), generator=generator, dtype=torch.float64))
    probability = scores.softmax(-1)
    return Revealed(token, probability.gather(-1, token[:, None])[:, 0])


def choose_to_reveal(predictions: Revealed, count: int, threshold: float | None) -> Bool[torch.Tensor, " k"]:
    """The `count` most confident predictions; with a threshold, all that reach it, at least the most confident one."""
    shown = torch.zeros(len(predictions.token), dtype=torch.bool)
    if threshold is None:
        shown[predictions.confidence.topk(min(count, len(shown))).indices] = True
    else:
        shown |= predictions.confidence >= threshold
        shown[predictions.confidence.argmax()] = True
    return shown
