"""Fertilities of source tokens: how many target tokens each of them has."""

from collections.abc import Sequence

import torch

from foretell.lab.nat.network import NatModel, causal_mask
from foretell.lab.nat.objective import autoregressive_inputs
from foretell.lab.nat.pairs import pad

_BATCH = 256


def fertilities(
    source: Sequence[Sequence[int]], target: Sequence[Sequence[int]], most: int, aligner: NatModel | None
) -> list[list[int]]:
    """Fertilities of every pair, each at most `most` and, of a pair, as many in sum as its target has tokens.

    `aligner`: an autoregressive model; a target token belongs to the source token that it attends to most. None: the
    target is shared evenly.

    Raises:
        ValueError: a target has more than `most` tokens per source token.
    """
    for s, t in zip(source, target, strict=True):
        if len(t) > most * len(s):
            raise ValueError(
                f"a target of {len(t)} tokens for a source of {len(s)}: fertilities reach to {most}; train another kind"
            )
    if aligner is None:
        return [_even(len(s), len(t)) for s, t in zip(source, target, strict=True)]
    out = list[list[int]]()
    for begin in range(0, len(source), _BATCH):
        out += _aligned(source[begin : begin + _BATCH], target[begin : begin + _BATCH], most, aligner)
    return out


def _even(source: int, target: int) -> list[int]:
    return [(i + 1) * target // source - i * target // source for i in range(source)]


@torch.inference_mode()
def _aligned(
    source: Sequence[Sequence[int]], target: Sequence[Sequence[int]], most: int, aligner: NatModel
) -> list[list[int]]:
    inputs = autoregressive_inputs(pad(target))
    weights = aligner.alignment(aligner.embed(inputs), aligner.encode(pad(source)), causal_mask(inputs.shape[1]))
    owner = weights.argmax(-1).tolist()
    # Position `j` of the inputs predicts token `j` of the target.
    return [_counts(row[: len(t)], len(s), most) for row, s, t in zip(owner, source, target, strict=True)]


def _counts(owner: Sequence[int], source: int, most: int) -> list[int]:
    """How often every source token owns a target token; what exceeds `most` goes to the next token that has room."""
    counts = [0] * source
    for token in owner:
        near = sorted(range(source), key=lambda i: (abs(i - token), i))
        counts[next(i for i in near if counts[i] < most)] += 1
    return counts
