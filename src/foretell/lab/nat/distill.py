"""Sequence-level distillation (Kim & Rush, arXiv 1606.07947): the targets of pairs replaced by a teacher's."""

from collections.abc import Iterator, Sequence

from foretell.lab.nat.decode import DecodeOptions, translate
from foretell.lab.nat.network import NatModel
from foretell.lab.nat.pairs import Pair

_BATCH = 256


def distilled(pairs: Sequence[Pair], teacher: NatModel) -> Iterator[Pair]:
    """The pairs with the teacher's greedy outputs as their only references; pairs whose output is empty are left out.

    Raises:
        ValueError: a source is longer than the teacher reads.
    """
    c = teacher.config
    for begin in range(0, len(pairs), _BATCH):
        part = pairs[begin : begin + _BATCH]
        translated = translate(teacher, [c.source.encode(p.source) for p in part], DecodeOptions())
        for pair, tokens in zip(part, translated.tokens, strict=True):
            if tokens:
                yield Pair(pair.source, (c.target.decode(tokens),))
