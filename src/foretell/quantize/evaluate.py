"""How far a quantised model is from its source: on text held back, in float32, one block at a time."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.distributions.divergence import forward_kl, total_variation
from foretell.model.config import ModelConfig
from foretell.model.load.build import build_block, build_without_blocks
from foretell.model.load.weights import Weights
from foretell.quantize.calibration import model_rope_tables, run_block

Tensor = torch.Tensor
_CHUNK = 256
"""Positions whose distributions are compared at once."""
_MAX_EXPONENT = 700.0
"""Above it, the exponential is beyond float64."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Comparison:
    """A quantised model beside its source, over all positions of a text."""

    tokens: int
    kl: float
    """Mean KL(source || quantised) of the next token, in nats."""
    kl_99: float
    """99th percentile of the KL divergence."""
    total_variation: float
    """Mean total variation distance of the two distributions, 0..1."""
    same_top: float
    """Share of positions where both find the same token most probable."""
    perplexity: float
    """Of the source."""
    quantized_perplexity: float


def compare(
    source: tuple[ModelConfig, Weights], quantized: tuple[ModelConfig, Weights], tokens: Int[Tensor, "b s"]
) -> Comparison:
    """Compare the next-token distributions of two models."""
    (p_states, p_head, p_cap), (q_states, q_head, q_cap) = (_final_states(c, w, tokens) for c, w in (source, quantized))
    targets = tokens[:, 1:].flatten()
    parts = [slice(at, at + _CHUNK) for at in range(0, len(targets), _CHUNK)]
    return compare_logits(
        (_logits(p_states[part], p_head, p_cap), _logits(q_states[part], q_head, q_cap), targets[part])
        for part in parts
    )


def compare_logits(
    parts: Iterable[tuple[Float[Tensor, "t v"], Float[Tensor, "t v"], Int[Tensor, " t"]]],
) -> Comparison:
    """Compare logits of the source and of the quantised model, given with the tokens that follow in the text."""
    kl, variation, same = list[Tensor](), 0.0, 0
    losses = [0.0, 0.0]
    for p, q, targets in parts:
        kl.append(forward_kl(p, q).clamp(min=0))
        variation += float(total_variation(p, q).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        for i, logits in enumerate((p, q)):
            losses[i] += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    every = torch.cat(kl).double()
    count = len(every)
    return Comparison(
        count,
        float(every.mean()),
        float(np.quantile(every.numpy(), 0.99)),
        variation / count,
        same / count,
        *(perplexity(loss / count) for loss in losses),
    )


def perplexity(loss: float) -> float:
    """The perplexity of a mean cross-entropy in nats, kept finite."""
    return math.exp(min(loss, _MAX_EXPONENT))


@torch.inference_mode()
def _final_states(
    config: ModelConfig, weights: Weights, tokens: Int[Tensor, "b s"]
) -> tuple[Float[Tensor, "t d"], Float[Tensor, "v d"], float]:
    """Input of the head at all positions but the last of a sequence, the head, and the soft cap of its logits."""
    shell, ropes = build_without_blocks(config, weights, torch.float32, _CPU), model_rope_tables(config)
    x = shell.embed(tokens.flatten()).view(*tokens.shape, -1)
    for i in range(config.layers):
        x = run_block(config, ropes, i, build_block(config, i, weights, torch.float32, _CPU), x)
    head = shell.head.weight
    assert isinstance(head, Tensor)
    return shell.final_norm(x)[:, :-1].flatten(0, 1), head.data, config.logit_softcap


def _logits(states: Float[Tensor, "t d"], head: Float[Tensor, "v d"], cap: float) -> Float[Tensor, "t v"]:
    out = states @ head.T
    return torch.tanh(out / cap) * cap if cap else out
