"""What a stream sends while there is no new text: comments that keep it open, and the progress of its prompt."""

import time
from dataclasses import dataclass

from foretell.serve.formats.base import AnswerFormat
from foretell.serve.jobs import Job

PROGRESS_SECONDS = 0.1
"""Between two looks at the progress of a prompt."""


@dataclass
class Silence:
    """Of one stream. `ping_interval`: seconds between comments, None for none; `progress`: the job whose prompt is
    reported until the first token, None for none.
    """

    format: AnswerFormat
    ping_interval: float | None
    progress: Job | None
    _read: int = -1

    def __post_init__(self) -> None:
        self._started = self._sent = time.monotonic()

    @property
    def interval(self) -> float | None:
        """Seconds without text after which `data` is asked."""
        if self.progress is None:
            return self.ping_interval
        return min(PROGRESS_SECONDS, self.ping_interval or PROGRESS_SECONDS)

    def data(self, begun: bool) -> bytes:
        """What to send now, maybe nothing; `begun`: there was a first token."""
        now = time.monotonic()
        to_send = b"" if begun or self.progress is None else self._progress(self.progress, now)
        due = self.progress is None or (self.ping_interval is not None and now - self._sent >= self.ping_interval)
        if not to_send and due:
            to_send = b"".join(self.format.ping()) if begun else self.format.filler
        if to_send:
            self._sent = now
        return to_send

    def _progress(self, job: Job, now: float) -> bytes:
        total, read, cached = job.prompt_progress
        if read <= self._read:
            return b""
        self._read = read
        counts = {"total": total, "cache": cached, "processed": read, "time_ms": 1000 * (now - self._started)}
        return self.format.progress(counts)
