"""How good a masked diffusion model is: a bound of its perplexity, and how often it agrees with its autoregressive
sibling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int

from foretell.model.block.decoder import Decoder
from foretell.model.diffusion.predictor import MaskPredictor
from foretell.model.training.full_forward import full_forward

Document = tuple[Int[torch.Tensor, " n"], int]
"""Tokens, and the first token of the answer (at least 1)."""


@dataclass(frozen=True)
class DiffusionReport:
    """Quality on held-out answers, given their prompts."""

    documents: int
    tokens: int
    """Of the answers."""
    perplexity_bound: float
    """Upper bound, from the evidence lower bound (LLaDA, arXiv 2502.09992, equation 6)."""
    accuracy: float
    """Share of masked tokens that are predicted, in the same passes."""
    sibling_perplexity: float | None
    same_top: tuple[float, ...]
    """For the first, second, … mask behind a text: share of positions at which the prediction, made in one pass from
    the text before all masks, is the sibling's most probable token after the true text before it.
    """


@torch.inference_mode()
def evaluate(
    predictor: MaskPredictor,
    documents: Sequence[Document],
    sibling: Decoder | None = None,
    samples: int = 4,
    masks: int = 8,
    cuts: int = 8,
    seed: int = 0,
) -> DiffusionReport:
    """Measure a model on documents.

    `samples`: noise levels per document, for the bound. `masks` and `cuts`: masks behind a text, and texts per
    document, for the agreement with the sibling.
    """
    generator = torch.Generator().manual_seed(seed)
    bound, hits, guesses, nll, tokens = 0.0, 0, 0, 0.0, 0
    agreed = torch.zeros(masks, 2)
    for token, start in documents:
        tokens += len(token) - start
        for _ in range(samples):
            loss, right, count = _bound(predictor, token, start, generator)
            bound, hits, guesses = bound + loss / samples, hits + right, guesses + count
        if sibling is not None:
            logits = sibling.logits(sibling.final_norm(full_forward(sibling, sibling.embed(token)[None])[0]))
            nll += float(F.cross_entropy(logits[start - 1 : -1], token[start:], reduction="sum"))
            agreed += _agreement(predictor, token, start, logits.argmax(-1), masks, cuts, generator)
    return DiffusionReport(
        documents=len(documents),
        tokens=tokens,
        perplexity_bound=float(torch.tensor(bound / tokens).exp()),
        accuracy=hits / guesses,
        sibling_perplexity=None if sibling is None else float(torch.tensor(nll / tokens).exp()),
        same_top=() if sibling is None else tuple((agreed[:, 0] / agreed[:, 1].clamp(min=1)).tolist()),
    )


def _bound(
    predictor: MaskPredictor, token: Int[torch.Tensor, " n"], start: int, generator: torch.Generator
) -> tuple[float, int, int]:
    """One sample of the bound of an answer's negative log-likelihood; predicted and masked tokens."""
    length = len(token) - start
    count = int(torch.randint(1, length + 1, (1,), generator=generator))
    masked = start + torch.randperm(length, generator=generator)[:count].sort().values
    noisy = token.clone()
    noisy[masked] = predictor.mask
    logits = predictor.read(predictor.new_store(len(noisy)), noisy, 0, masked.tolist())
    loss = float(F.cross_entropy(logits, token[masked], reduction="sum"))
    return loss * length / count, int((logits.argmax(-1) == token[masked]).sum()), count


def _agreement(
    predictor: MaskPredictor,
    token: Int[torch.Tensor, " n"],
    start: int,
    best: Int[torch.Tensor, " n"],
    masks: int,
    cuts: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Per mask how often prediction and sibling agree, and how often they were compared; `best`: the sibling's choice
    after every token.
    """
    out = torch.zeros(masks, 2)
    for _ in range(cuts):
        cut = int(torch.randint(start, len(token), (1,), generator=generator))
        count = min(masks, len(token) - cut)
        noisy = torch.cat((token[:cut], torch.full((masks,), predictor.mask)))
        logits = predictor.read(predictor.new_store(len(noisy)), noisy, 0, range(cut, cut + masks))
        out[:count, 0] += (logits.argmax(-1)[:count] == best[cut - 1 : cut - 1 + count]).float()
        out[:count, 1] += 1
    return out
