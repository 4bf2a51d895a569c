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


def compare_precision(exact: Model, other: Model, tokens: Int[Tensor, "b s"], first: int | None = None) -> Comparison:
    """Compare the next-token distributions of two copies of a model, computed by their own passes with their caches.

    `first`: the other model reads so many tokens of a sequence as a prompt and then one by one, as it would decode
    them, and the distributions from there on are compared. None: it reads chunks, and all are compared.

    Raises:
        ValueError: sequences of fewer than two tokens, or longer than a context, or not longer than `first`.
    """
    length = tokens.shape[1]
    most = min(model.config.context for model in (exact, other))
    if not 2 <= length <= most:
        raise ValueError(f"sequences to compare on need 2 to {most} tokens, the model's context; found {length}")
    if first is None:
        return compare_logits(_parts(exact, other, tokens))
    if not 1 <= first < length - 1:
        raise ValueError(f"the tokens before the comparison must be 1 to {length - 2} of {length}, found {first}")
    return compare_logits(_decoded_parts(exact, other, tokens, first))


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


def _decoded_parts(
    exact: Model, other: Model, tokens: Int[Tensor, "b s"], first: int
) -> Iterator[tuple[Float[Tensor, "t v"], Float[Tensor, "t v"], Int[Tensor, " t"]]]:
    """Logits of both after the tokens from `first` on, which the other model reads one by one."""
    runners = exact.runner(), other.runner()
    for sequence in tokens:
        for runner in runners:
            runner.truncate(0, 0)
            for at in range(0, first, _CHUNK):
                read_chunk(runner, sequence[at : min(at + _CHUNK, first)].tolist(), 1)
        for at in range(first, len(sequence) - 1, _CHUNK):
            targets = sequence[at + 1 : at + 1 + _CHUNK]
            chunk = sequence[at : at + len(targets)].tolist()
            p = read_chunk(runners[0], chunk, len(chunk))
            q = torch.cat([read_chunk(runners[1], [token], 1) for token in chunk])
            yield p.float().cpu(), q.float().cpu(), targets
