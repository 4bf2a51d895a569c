"""Ctrl-C while an engine generates."""

import signal
from collections.abc import Collection, Iterator
from types import FrameType

from foretell.cli.prompt_progress import PromptProgress
from foretell.engine.engine import Engine
from foretell.engine.request import Update
from foretell.plan import PlanEngine


class Interrupt:
    """Lets the current step end before Ctrl-C takes effect, so that no generated token is lost. A second Ctrl-C raises
    `KeyboardInterrupt` at once.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interrupt":
        self._previous_handler = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def run_until_interrupt(
    engine: Engine | PlanEngine, numbers: Collection[int], interrupt: Interrupt
) -> Iterator[Update]:
    """All updates of an engine. After Ctrl-C, cancel the requests `numbers` and yield their last updates.

    Requests may be submitted meanwhile; `numbers` is read after the last step. While a single prompt is read, a bar
    shows the progress.
    """
    with PromptProgress(engine, len(numbers) == 1) as progress:
        while engine.busy and not interrupt.requested:
            updates = engine.step()
            progress.update()
            yield from updates
    for number in list(numbers):
        last = engine.cancel(number)
        if last is not None:
            yield last
