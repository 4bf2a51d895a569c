"""How far a model's numbers are from those of its exact passes, on a text: KL divergence and perplexity."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int

from foretell.api import Model
from foretell.model.run.runner import Runner
from foretell.verify.comparison import Comparison, compare_logits
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
    check_length(length, (exact, other))
    if first is not None and not 1 <= first < length - 1:
        raise ValueError(f"the tokens before the comparison must be 1 to {length - 2} of {length}, found {first}")
    return compare_logits(logit_parts(exact, other, tokens, first))


def check_length(length: int, models: Sequence[Model]) -> None:
    """Refuse sequences that have no second token, or that a model cannot read.

    Raises:
        ValueError: the sequences are such.
    """
    most = min(model.config.context for model in models)
    if not 2 <= length <= most:
        raise ValueError(f"sequences to compare on need 2 to {most} tokens, the model's context; found {length}")


def logit_parts(
    exact: Model, other: Model, tokens: Int[Tensor, "b s"], first: int | None = None
) -> Iterator[tuple[Float[Tensor, "t v"], Float[Tensor, "t v"], Int[Tensor, " t"]]]:
    """Logits of both models and the tokens that follow, a chunk at a time; for `first` see `compare_precision`."""
    runners = exact.runner(), other.runner()
    for sequence in tokens:
        read = zip(
            read_sequence(runners[0], sequence, first or 0),
            read_sequence(runners[1], sequence, first or 0, one_by_one=first is not None),
            strict=True,
        )
        for (p, targets), (q, _) in read:
            yield p, q, targets


def read_sequence(
    runner: Runner, sequence: Int[Tensor, " s"], first: int = 0, one_by_one: bool = False
) -> Iterator[tuple[Float[Tensor, "t v"], Int[Tensor, " t"]]]:
    """Logits of one model after the tokens from `first` on, in float32, and the tokens that follow them.

    `one_by_one`: it reads those tokens as it would decode them, not in chunks.
    """
    runner.truncate(0, 0)
    for at in range(0, first, _CHUNK):
        read_chunk(runner, sequence[at : min(at + _CHUNK, first)].tolist(), 1)
    for at in range(first, len(sequence) - 1, _CHUNK):
        targets = sequence[at + 1 : at + 1 + _CHUNK]
        chunk = sequence[at : at + len(targets)].tolist()
        pieces = [[token] for token in chunk] if one_by_one else [chunk]
        logits = torch.cat([read_chunk(runner, piece, len(piece)) for piece in pieces])
        yield logits.float().cpu(), targets
