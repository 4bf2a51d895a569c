"""The built-in tasks: numbers to English words, in several styles, and words to numbers."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from foretell.lab.nat.pairs import Pair
from foretell.utils.names import unknown

TASKS = ("number_to_words", "words_to_number")
MAX_DIGITS = 12
_TEENS = (
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", *_TEENS)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES = ("", "thousand", "million", "billion")


@dataclass(frozen=True)
class Style:
    """How numbers are spelled. The styles of one number differ in words and length, as translations do."""

    joined_by_and: bool = False
    """`one hundred and five`, not `one hundred five`."""
    article: bool = False
    """`a hundred`, not `one hundred`."""
    hundreds: bool = False
    """`nineteen hundred`, not `one thousand nine hundred`, for 1,100 to 9,900 in steps of a hundred and what follows
    them.
    """


STYLES = tuple(Style(*flags) for flags in product((False, True), repeat=3))


def spell(number: int, style: Style) -> str:
    """A number of at most 12 digits in English words.

    Raises:
        ValueError: the number is negative or longer.
    """
    if not 0 <= number < 10**MAX_DIGITS:
        raise ValueError(f"numbers of 1 to {MAX_DIGITS} digits are spelled, found {number}")
    if style.hundreds and 1100 <= number < 10_000 and number // 100 % 10:
        return " ".join([*_below_hundred(number // 100), "hundred", *_rest(number % 100, style)])
    groups = [(number // 1000**i % 1000, scale) for i, scale in enumerate(_SCALES)]
    words = list[str]()
    for value, scale in reversed(groups):
        if value:
            words += [*_group(value, style, bool(words) and not scale), *([scale] if scale else [])]
    return " ".join(words or [_ONES[0]])


def _group(value: int, style: Style, follows: bool) -> list[str]:
    """The words of 1 to 999; `follows`: those of thousands and more come before them."""
    hundreds, rest = divmod(value, 100)
    if not hundreds:
        return _rest(rest, style) if follows else _below_hundred(rest)
    first = "a" if style.article and hundreds == 1 else _ONES[hundreds]
    return [first, "hundred", *_rest(rest, style)]


def _rest(value: int, style: Style) -> list[str]:
    return [*(["and"] if style.joined_by_and else []), *_below_hundred(value)] if value else []


def _below_hundred(value: int) -> list[str]:
    if value < 20:
        return [_ONES[value]] if value else []
    return [_TENS[value // 10], *([_ONES[value % 10]] if value % 10 else [])]


def generate_pairs(
    task: str,
    count: int,
    seed: int,
    digits: int = MAX_DIGITS,
    all_styles: bool = False,
    exclude: Collection[str] = (),
) -> Iterator[Pair]:
    """Random pairs of a task; the number of digits, at most `digits`, is uniform, so that short numbers are not rare.

    `all_styles`: every spelling of a number is a reference, for evaluation; else one at random, for training.
    `exclude`: sources that are not drawn; lengths of which nothing else is left are not drawn either.

    Raises:
        ValueError: an unknown task, or every source is excluded.
    """
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if _all_excluded(task, digits, exclude):
        raise ValueError(f"all numbers of at most {digits} digits are excluded; allow more digits, or exclude fewer")
    rng, drawn = np.random.default_rng(seed), 0
    while drawn < count:
        size = int(rng.integers(1, digits + 1))
        number = int(rng.integers(10 ** (size - 1) if size > 1 else 0, 10**size))
        style = STYLES[int(rng.integers(len(STYLES)))]
        source = _source(task, number, style)
        if source in exclude:
            continue
        drawn += 1
        if task == "words_to_number":
            yield Pair(source, (" ".join(str(number)),))
        else:
            yield Pair(source, tuple(dict.fromkeys(spell(number, s) for s in (STYLES if all_styles else (style,)))))


def _source(task: str, number: int, style: Style) -> str:
    return spell(number, style) if task == "words_to_number" else " ".join(str(number))


def _all_excluded(task: str, digits: int, exclude: Collection[str]) -> bool:
    """Whether nothing is left to draw; the numbers are looked at only where so few of them could all be excluded."""
    count = 10**digits
    return count <= len(exclude) and all(_source(task, n, s) in exclude for n in range(count) for s in STYLES)
