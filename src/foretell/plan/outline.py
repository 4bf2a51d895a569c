"""Skeletons: reads the numbered points of a list."""

import re
from dataclasses import dataclass

MAX_POINT_WORDS = 15
"""A longer point is a sentence, not a point of a skeleton."""
_POINT = re.compile(r"^\s*(\d{1,3})[.)]\s+(.*?)\s*$", re.MULTILINE)
_MARKUP = re.compile(r"\*\*|__")
_END = " .:;,-–—*"


@dataclass(frozen=True)
class Skeleton:
    """The points of a skeleton.

    `is_complete`: what follows cannot add a point, as the last line repeats one or there are as many as are allowed.
    """

    points: tuple[str, ...]
    is_complete: bool


def read_skeleton(text: str, most: int, finished: bool) -> Skeleton:
    """The points of a text, at most `most`; unless it is `finished`, its last line may still grow and is not read.

    A point is a line `<number>. <words>`. Of points with the same number, and of points with the same words, the first
    counts; a repeated point ends the skeleton, as models that repeat one go on repeating.
    """
    points = dict[str, str]()
    numbers = set[int]()
    whole = text if finished else text[: text.rfind("\n") + 1]
    for match in _POINT.finditer(whole):
        point = _MARKUP.sub("", match[2]).strip(_END)
        key = " ".join(point.lower().split())
        if key and key in points:
            return Skeleton(tuple(points.values()), True)
        if not key or int(match[1]) in numbers or len(key.split()) > MAX_POINT_WORDS:
            continue
        numbers.add(int(match[1]))
        points[key] = point
        if len(points) == most:
            return Skeleton(tuple(points.values()), True)
    return Skeleton(tuple(points.values()), finished)
