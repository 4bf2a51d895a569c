"""How far a model's numbers are from those of its exact passes, on a text: KL divergence and perplexity."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int

from foretell.api import Model
from foretell.quantize.evaluate import Comparison, compare_logits
from foretell.verify.logits import read_chunk

Tensor = torch.Tensor
_CHUNK = 128
"""Tokens of a pass."""


def compare_precision(exact: Model, other: Model, tokens: Int[Tensor, "b s"]) -> Comparison:
    """Compare the next-token distributions of two copies of a model, computed by their own passes with their caches.

    Raises:
        ValueError: sequences of fewer than two tokens, or longer than a context.
    """
    length = tokens.shape[1]
    most = min(model.config.context for model in (exact, other))
    if not 2 <= length <= most:
        raise ValueError(f"sequences to compare on need 2 to {most} tokens, the model's context; found {length}")
    return compare_logits(_parts(exact, other, tokens))


def _parts(
    exact: Model, other: Model, tokens: Int[Tensor, "b s"]
) -> Iterator[tuple[Float[Tensor, "t v"], Float[Tensor, "t v"], Int[Tensor, " t"]]]:
    """Logits of both, and the tokens that follow."""
    runners = exact.runner(), other.runner()
    for sequence in tokens:
        for runner in runners:
            runner.truncate(0, 0)
        for at in range(0, len(sequence) - 1, _CHUNK):
            targets = sequence[at + 1 : at + 1 + _CHUNK]
            chunk = sequence[at : at + len(targets)].tolist()
            p, q = (read_chunk(runner, chunk, len(chunk)).float().cpu() for runner in runners)
            yield p, q, targets
