"""What a decoder knows after each of its layers, and how few of them answer as well as all."""

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
    """On a text, after each layer: the perplexity, and how often the most probable token is that after the last one.

    `equal_depth`: the smallest mean share of the layers that a threshold on the difference of the two largest
    probabilities runs (CALM's softmax response, tested after every layer, the keys of a full pass) at a perplexity not
    above 1.01 of that of all layers; `agreeing_depth`: the same with 95 % of the tokens those of all layers.
    """

    perplexity: tuple[float, ...]
    agreement: tuple[float, ...]
    equal_depth: float
    agreeing_depth: float


@torch.no_grad()
def depth_quality(decoder: Decoder, text: Int[torch.Tensor, "n t"]) -> DepthQuality:
    """Measure over pieces of a text."""
    parts = [_outcomes(decoder, piece[None]) for piece in text]
    loss, best, margin = (torch.cat([part[i] for part in parts], 1) for i in range(3))
    layers, same, whole = len(loss), best == best[-1], loss[-1].mean()
    equal = agreeing = 1.0
    for threshold in _THRESHOLDS:
        leaves = margin > threshold
        leaves[-1] = True
        first = leaves.int().argmax(0)
        depth = float((first + 1).float().mean()) / layers
        if loss.gather(0, first[None]).mean() <= whole + torch.tensor(_EQUAL).log():
            equal = min(equal, depth)
        if same.gather(0, first[None]).float().mean() >= _AGREEMENT:
            agreeing = min(agreeing, depth)
    shares = tuple(same.float().mean(1).tolist())
    return DepthQuality(tuple(loss.mean(1).exp().tolist()), shares, equal, agreeing)


def _outcomes(
    decoder: Decoder, tokens: Int[torch.Tensor, "1 t"]
) -> tuple[Float[torch.Tensor, "l t"], Int[torch.Tensor, "l t"], Float[torch.Tensor, "l t"]]:
    """Negative log-likelihood, most probable token, and difference of the two largest probabilities, by layer."""
    x, losses, best, margins = decoder.embed(tokens[:, :-1]), [], [], []
    for i in range(decoder.config.layers):
        x = full_forward(decoder, x, i, i + 1)
        logits = decoder.logits(decoder.final_norm(x[0]))
        top = logits.softmax(-1).topk(2)
        losses.append(F.cross_entropy(logits, tokens[0, 1:], reduction="none"))
        best.append(top.indices[:, 0])
        margins.append(top.values[:, 0] - top.values[:, 1])
    return torch.stack(losses), torch.stack(best), torch.stack(margins)
