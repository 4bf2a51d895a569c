"""Which cases of the suite `make test` runs: of a test with several parametrised settings the cases that cover the
combinations of them, of a share of the exhaustive tests those whose name's hash falls into it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from zlib import crc32

import pytest


@dataclass(frozen=True)
class Share:
    """The part `number` of `parts` of the exhaustive tests; 0 of 1: none of them, 1 of 1: all."""

    number: int
    parts: int

    def __contains__(self, name: str) -> bool:
        return self.number > 0 and crc32(name.encode()) % self.parts == self.number - 1


def read_share(text: str) -> Share:
    """`none`, `all`, or `2/3` for the second third.

    Raises:
        ValueError: it is something else.
    """
    number, parts = map(int, {"none": "0/1", "all": "1/1"}.get(text, text).split("/"))
    if not 0 <= number <= parts or parts < 1:
        raise ValueError(text)
    return Share(number, parts)


def covering_cases(cases: Sequence[Sequence[str]], strength: int) -> list[int]:
    """Numbers of cases that together hold every combination of `strength` settings' values that some case holds.

    A case is the values of its settings, in the same order in all cases. The choice is greedy: the next case is one
    that adds the most combinations, of these the one whose values were chosen the least, of these the first.
    """
    new = [set(combinations(enumerate(case), min(strength, len(case)))) for case in cases]
    chosen, uses = list[int](), Counter[tuple[int, str]]()

    def worth(number: int) -> tuple[int, int]:
        return len(new[number]), -sum(uses[value] for value in enumerate(cases[number]))

    while any(new):
        best = max(range(len(cases)), key=worth)
        chosen.append(best)
        uses.update(enumerate(cases[best]))
        held = set(new[best])
        for combination in new:
            combination -= held
    return sorted(chosen)


def covering_parameters(cases: Sequence[Sequence[str]], strength: int) -> dict[int, Sequence[pytest.MarkDecorator]]:
    """Numbers of cases that hold every combination of `strength` settings' values, with their marks: `make test` runs
    those that hold every value, the others are exhaustive.
    """
    quick, whole = (set(covering_cases(cases, n)) for n in (1, strength))
    return {i: () if i in quick else (pytest.mark.exhaustive,) for i in sorted(quick | whole)}
