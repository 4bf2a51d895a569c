"""What the engine's requests get, on its way to the event loop: gathered, so that the loop wakes up less often."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretell.engine.request import Update


@dataclass(frozen=True)
class Event:
    """What a request got in one step. `at`: seconds of the monotonic clock."""

    ticket: int
    at: float
    update: Update | None = None
    error: Exception | None = None
    """The engine refused the request."""

    @property
    def ends(self) -> bool:
        """Whether it is the last one of its request."""
        return self.update is None or self.update.finish_reason is not None


class EventBuffer:
    """Delivers events at once if a request begins or ends with them, and otherwise at most once in `interval` seconds.

    Every delivery wakes the event loop and the clients, which take time from the threads of the next pass.
    """

    def __init__(self, deliver: Callable[[Sequence[Event]], None], interval: float) -> None:
        self._deliver, self._interval = deliver, interval
        self._held = list[Event]()
        self._begun = set[int]()
        """Tickets of the requests that have got something and are not over."""
        self._delivered = 0.0

    def put(self, events: Sequence[Event]) -> None:
        """Take the events of a step."""
        self._held += events
        urgent = False
        for event in events:
            urgent |= event.ends or event.ticket not in self._begun
            if event.ends:
                self._begun.discard(event.ticket)
            else:
                self._begun.add(event.ticket)
        if urgent or time.monotonic() - self._delivered >= self._interval:
            self.flush()

    def flush(self) -> None:
        """Deliver what is held."""
        if self._held:
            held, self._held = self._held, []
            self._delivered = time.monotonic()
            self._deliver(held)
