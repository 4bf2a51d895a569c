"""What a decoder knows after each of its layers, and how few of them answer as well as all."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int

from foretell.model.block.decoder import Decoder
from foretell.model.training.full_forward import full_forward

_THRESHOLDS = tuple(i / 100 for i in range(100))
_EQUAL = 1.01
"""Perplexity, as a multiple of that of all layers, that counts as equal."""
_AGREEMENT = 0.95


@dataclass(frozen=True)
class DepthQuality:
    """After each of some layers: the perplexity, and how often the most probable token is that after the last one.

    `equal_depth`: the smallest mean share of the layers that a threshold on the difference of the two largest
    probabilities runs (CALM's softmax response, tested after every layer, the keys of a full pass) at a perplexity not
    above 1.01 of that of all layers; `agreeing_depth`: the same with 95 % of the tokens those of all layers.
    """

    perplexity: tuple[float, ...]
    agreement: tuple[float, ...]
    equal_depth: float
    agreeing_depth: float


@torch.no_grad()
def depth_quality(
    decoder: Decoder, texts: Iterable[Int[torch.Tensor, " t"]], after: Sequence[int] = ()
) -> DepthQuality:
    """Measure over texts, after layers `after`, of which the last are all (empty: after each)."""
    after = after or range(1, decoder.config.layers + 1)
    parts = [_outcomes(decoder, text, after) for text in texts]
    loss, best, margin = (torch.cat([part[i] for part in parts], 1) for i in range(3))
    same, whole, layers = best == best[-1], loss[-1].mean(), torch.tensor(after, dtype=torch.float32)
    equal = agreeing = 1.0
    for threshold in _THRESHOLDS:
        leaves = margin > threshold
        leaves[-1] = True
        first = leaves.int().argmax(0)
        depth = float(layers[first].mean() / layers[-1])
        if loss.gather(0, first[None]).mean() <= whole + math.log(_EQUAL):
            equal = min(equal, depth)
        if same.gather(0, first[None]).float().mean() >= _AGREEMENT:
            agreeing = min(agreeing, depth)
    shares = tuple(same.float().mean(1).tolist())
    return DepthQuality(tuple(loss.mean(1).exp().tolist()), shares, equal, agreeing)


def _outcomes(
    decoder: Decoder, tokens: Int[torch.Tensor, " t"], after: Sequence[int]
) -> tuple[Float[torch.Tensor, "l s"], Int[torch.Tensor, "l s"], Float[torch.Tensor, "l s"]]:
    """Negative log-likelihood, most probable token, and difference of the two largest probabilities, by layer."""
    x, losses, best, margins = decoder.embed(tokens[None, :-1]), [], [], []
    for i in range(decoder.config.layers):
        x = full_forward(decoder, x, i, i + 1)
        if i + 1 in after:
            logits = decoder.logits(decoder.final_norm(x[0]))
            top = logits.softmax(-1).topk(2)
            losses.append(F.cross_entropy(logits, tokens[1:], reduction="none"))
            best.append(top.indices[:, 0])
            margins.append(top.values[:, 0] - top.values[:, 1])
    return torch.stack(losses), torch.stack(best), torch.stack(margins)
