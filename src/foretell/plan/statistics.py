"""Statistics of an answer that several requests write."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foretell.engine.statistics import RequestStatistics, StepTime


@dataclass
class PlanClock:
    """Times of a run, in seconds of `now`."""

    now: Callable[[], float] = time.perf_counter
    draft: float = 0.0
    verify: float = 0.0

    def __post_init__(self) -> None:
        self._started = self._first = self.now()
        self._early_tokens = -1

    def count(self, step: StepTime | None) -> None:
        """Count the pass of a step, whose time is known only beside the engine."""
        if step is not None:
            self.draft, self.verify = self.draft + step.draft, self.verify + step.verify

    def mark_text(self, tokens: int) -> None:
        """There is text, and there are so many tokens of all requests."""
        if self._early_tokens < 0:
            self._first, self._early_tokens = self.now(), tokens

    def total(self, statistics: Sequence[RequestStatistics]) -> RequestStatistics:
        """The statistics of all requests as those of one: counts are added. Until the first text counts as prefill,
        what follows as decoding; passes that the requests share count once in the times and for each in
        `target_passes`.
        """
        out = RequestStatistics()
        for s in statistics:
            for name in _COUNTS:
                setattr(out, name, getattr(out, name) + getattr(s, name))
            longest = max(len(out.accepted_per_position), len(s.accepted_per_position))
            padded = (x + [0] * (longest - len(x)) for x in (out.accepted_per_position, s.accepted_per_position))
            out.accepted_per_position = [a + b for a, b in zip(*padded, strict=True)]
        ended = self.now()
        self.mark_text(out.new_tokens)
        return replace(
            out,
            queue_seconds=statistics[0].queue_seconds if statistics else 0.0,
            prefill_seconds=self._first - self._started,
            decode_seconds=ended - self._first,
            decode_tokens=out.new_tokens - self._early_tokens,
            draft_seconds=self.draft,
            verify_seconds=self.verify,
        )


_COUNTS = (
    "prompt_tokens", "cached_tokens", "new_tokens", "target_passes", "drafting_passes", "drafted", "preemptions",
    "experts_read", "moe_layers_read",
)  # fmt: skip
