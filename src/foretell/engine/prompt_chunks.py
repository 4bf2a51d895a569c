"""How many tokens of prompts a step reads, so that running answers keep their time between tokens."""

import numpy as np

_DECAY = 0.97
"""Share of the weight of earlier steps that is kept per step."""
_MIN_CHUNK = 16
"""Least chunk beside answers that are being written: prompts must go on."""


class PromptChunks:
    """Sizes chunks of prompts by a target for the time between two tokens of an answer.

    A step takes a fixed time, mostly that of the pass over the answers, and a time per prompt token; both are fitted to
    the steps of the run by least squares, older ones counting less. A chunk gets what the target leaves, as in
    Sarathi-Serve (arXiv 2403.02310). `most`: largest chunk, and the one where no answer is being written. `target`: in
    seconds; None: chunks are always `most`.

    Raises:
        ValueError: a target that is not positive.
    """

    def __init__(self, most: int, target: float | None = None) -> None:
        if target is not None and not target > 0:
            raise ValueError(f"the target for the time between tokens must be above 0 seconds, found {target}")
        self._most, self._target = most, target
        self._sums = np.zeros(5)
        """Decaying sums of 1, tokens, squared tokens, seconds, and tokens times seconds."""
        self._token_seconds = 0.0
        """Seconds per token of the last steps that read prompts alone; 0: there was none."""

    @property
    def token_seconds(self) -> float:
        """Estimated seconds per prompt token; 0: nothing is known."""
        weight, tokens, squares, seconds, products = self._sums.tolist()
        variance = weight * squares - tokens * tokens
        slope = (weight * products - tokens * seconds) / variance if variance > 1e-6 * weight * squares else 0.0
        return slope if slope > 0 else self._token_seconds

    @property
    def step_seconds(self) -> float:
        """Estimated seconds of a step that reads no prompt; 0: nothing is known."""
        weight, tokens, _, seconds, _ = self._sums.tolist()
        return max(0.0, (seconds - self.token_seconds * tokens) / weight) if weight else 0.0

    def size(self, decoding: bool) -> int:
        """Most prompt tokens of the next step; `decoding`: whether answers are being written."""
        rate = self.token_seconds
        if self._target is None or not decoding:
            return self._most
        left = int((self._target - self.step_seconds) / rate) if rate else 0
        return min(self._most, max(_MIN_CHUNK, left))

    def update(self, tokens: int, decoding: bool, seconds: float) -> None:
        """Count a step that read so many tokens of prompts, beside answers that are being written or alone."""
        if self._target is None:
            return
        if decoding:
            self._sums = _DECAY * self._sums + [1, tokens, tokens * tokens, seconds, tokens * seconds]
        elif tokens:
            self._token_seconds = seconds / tokens
