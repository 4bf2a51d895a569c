"""Ctrl-C while text is being written."""

import signal
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType

from foretell.engine.engine import Engine, Update


class Interrupt:
    """Lets the step at hand end before Ctrl-C takes effect, so that nothing generated is lost; pressed again, it stops
    at once.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def run_until_interrupt(engine: Engine, numbers: Iterable[int], interrupt: Interrupt) -> Iterator[Update]:
    """All updates of an engine; after Ctrl-C the last ones of what is running. Requests may be submitted meanwhile."""
    while engine.busy and not interrupt.requested:
        yield from engine.step()
    for number in list(numbers):
        last = engine.cancel(number)
        if last is not None:
            yield last
