"""Ends an answer whose last tokens repeat themselves (vLLM's `repetition_detection`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretell.core.parameters import is_integer

REPETITION = "repetition"
"""The `finish_reason` of such an answer."""
REPETITION_DETECTED = "repetition_detected"
"""Its `stop_reason`."""


@dataclass(frozen=True)
class RepetitionDetection:
    """An answer ends once its last tokens are `min_count` times the same pattern of `min_pattern_size` (at least 1) to
    `max_pattern_size` tokens. A `max_pattern_size` of 0 looks for nothing.

    Raises:
        ValueError: a size is negative or no whole number, the sizes exclude each other, or the count is below 2.
    """

    max_pattern_size: int
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            if not is_integer(value := getattr(self, name)) or value < 0:
                raise ValueError(f"repetition_detection.{name} must be a whole number from 0 on, found {value!r}")
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"repetition_detection.min_pattern_size must be at most max_pattern_size ({self.max_pattern_size}), "
                f"found {self.min_pattern_size}"
            )
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise ValueError(f"repetition_detection.min_count must be at least 2, found {self.min_count}")


class RepetitionWatch:
    """Follows one answer token by token, in time that grows with `max_pattern_size` only.

    For each size of a pattern it counts the newest tokens that equal the token so many places before. `min_tokens`:
    shorter answers go on. `max_tokens`: the longest answer, which bounds the patterns.
    """

    def __init__(self, detection: RepetitionDetection, min_tokens: int, max_tokens: int) -> None:
        smallest = max(detection.min_pattern_size, 1)
        largest = min(detection.max_pattern_size, max_tokens // max(detection.min_count, 1))
        self._sizes = np.arange(smallest, max(largest, smallest - 1) + 1)
        self._wanted = self._sizes * (detection.min_count - 1)
        self._equal = np.zeros_like(self._sizes)
        self._newest_first = np.full(max(largest, 1), -1, np.int64)
        self._min_tokens, self._count = min_tokens, 0
        self.has_repeated = False
        """Whether the answer has ended by a repetition."""

    def until_repetition(self, tokens: Sequence[int]) -> int:
        """Follow new tokens; how many of them there are up to the end of the answer."""
        for count, token in enumerate(tokens, 1):
            if self._push(token):
                return count
        return len(tokens)

    def _push(self, token: int) -> bool:
        if len(self._sizes) == 0:
            return False
        same = self._newest_first[self._sizes - 1] == token
        self._equal = (self._equal + 1) * same
        self._newest_first[1:] = self._newest_first[:-1].copy()
        self._newest_first[0] = token
        self._count += 1
        self.has_repeated = self._count >= self._min_tokens and bool((self._equal >= self._wanted).any())
        return self.has_repeated
