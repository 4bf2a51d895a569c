"""How many tokens of prompts a step reads, so that running answers keep their time between tokens."""

from collections import deque
from collections.abc import Sequence
from statistics import median

_STEPS = 7
"""Last steps whose times are known; the median of their costs does not follow single steps that were held up."""
_FIRST_CHUNK = {True: 16, False: 64}
"""Chunk while no time is known, beside answers that are being written and alone; later ones at most double."""
_LEAST_CHUNK = 2
"""One token would not be told from a step that decodes, so that a wrong estimate stayed."""
_LEAST_SHARE = 0.25
"""Of the target, for prompts beside answers that take most of it themselves: prompts must go on."""
_ALONE = 4.0
"""Times the target that a chunk may take where no answer is being written: a request that arrives waits for it."""
_LEAST_COST = 0.05
"""Of a step that reads prompts, for these, where it took no longer than one that reads none."""


class PromptChunks:
    """Sizes chunks of prompts by a target for the time between two tokens of an answer.

    A step takes the time of its pass over the answers, and a time per prompt token. A chunk gets what the target
    leaves, as in Sarathi-Serve (arXiv 2403.02310). Both times are medians over the last steps, so that they follow the
    load and the length of the prompts. A chunk is at most twice the largest of these steps: a wrong estimate costs one
    step.
    `most`: largest chunk. `target`: in seconds; None: chunks are always `most`.

    Raises:
        ValueError: a target that is not positive.
    """

    def __init__(self, most: int, target: float | None = None) -> None:
        if target is not None and not target > 0:
            raise ValueError(f"the target for the time between tokens must be above 0 seconds, found {target}")
        self._most, self._target = most, target
        self._plain = deque[float](maxlen=_STEPS)
        """Seconds of steps that read no prompt."""
        self._read = {decoding: deque[tuple[int, float]](maxlen=_STEPS) for decoding in (True, False)}
        """Prompt tokens and seconds of steps that read some, beside answers and alone."""

    @property
    def step_seconds(self) -> float:
        """Estimated seconds of a step that reads no prompt; 0: nothing is known."""
        return median(self._plain) if self._plain else 0.0

    def token_seconds(self, decoding: bool) -> float:
        """Estimated seconds per prompt token, beside answers or alone; 0: nothing is known."""
        if self._read[decoding]:
            fixed = self.step_seconds if decoding else 0.0
            return _weighted_median([(max(s - fixed, _LEAST_COST * s) / n, n) for n, s in self._read[decoding]])
        return self.token_seconds(not decoding) if self._read[not decoding] else 0.0

    def size(self, decoding: bool) -> int:
        """Most prompt tokens of the next step; `decoding`: whether answers are being written."""
        if self._target is None:
            return self._most
        limit = 2 * max((n for n, _ in self._read[decoding]), default=0)
        rate = self.token_seconds(decoding)
        left = max(self._target - self.step_seconds, _LEAST_SHARE * self._target) if decoding else _ALONE * self._target
        wanted = max(int(left / rate), _LEAST_CHUNK) if rate else self._most
        return min(self._most, wanted, max(limit, _FIRST_CHUNK[decoding]))

    def update(self, tokens: int, decoding: bool, seconds: float) -> None:
        """Count a step that read so many tokens of prompts, beside answers that are being written or alone."""
        if tokens:
            self._read[decoding].append((tokens, seconds))
        else:
            self._plain.append(seconds)


def _weighted_median(values: Sequence[tuple[float, int]]) -> float:
    """The median of values with weights."""
    half, total = sum(weight for _, weight in values) / 2, 0
    for value, weight in sorted(values):
        total += weight
        if total >= half:
            return value
    raise AssertionError("no value")
