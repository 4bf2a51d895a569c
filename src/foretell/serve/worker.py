"""The engine in a thread of its own: commands go in by a queue, events come out once per step."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretell.engine.engine import Engine
from foretell.engine.request import Request, Update

log = logging.getLogger(__name__)
IDLE_SECONDS = 1.0
"""An idle worker wakes this often, so that its heartbeat goes on."""


@dataclass(frozen=True)
class Event:
    """What a request got in one step. `at`: seconds of the monotonic clock."""

    ticket: int
    at: float
    update: Update | None = None
    error: Exception | None = None
    """The engine refused the request."""


class EngineWorker:
    """Runs an engine in a thread.

    Requests are named by tickets of the caller's choice. `on_events` is called once per step with all events, and
    `on_failure` with the exception of a step that ended the engine; `on_step` with the engine after a step and the
    step's seconds in all. All are called in the worker's thread. After a failure the engine is built again by
    `make_engine`; its requests are lost.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        on_events: Callable[[Sequence[Event]], None],
        on_failure: Callable[[Exception], None],
        restart_seconds: float = 1.0,
        on_step: Callable[[Engine, float], None] | None = None,
    ) -> None:
        self._make_engine, self._on_events, self._on_failure = make_engine, on_events, on_failure
        self._on_step = on_step
        self._restart_seconds = restart_seconds
        self._commands: queue.SimpleQueue[Callable[[Engine], None]] = queue.SimpleQueue()
        self._numbers, self._tickets = dict[int, int](), dict[int, int]()
        """Number in the engine by ticket, and ticket by number."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="foretell-engine", daemon=True)
        self.engine: Engine | None = None
        """The present engine; other threads may only read its state."""
        self.ready = False
        """Whether the engine takes requests."""
        self.heartbeat = time.monotonic()
        """When the thread last began a turn."""
        self.restarts = 0

    def start(self) -> None:
        """Start the thread; it builds the engine first."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step."""
        self._stopping.set()
        self._commands.put(lambda engine: None)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, ticket: int, request: Request) -> None:
        """Queue a request under this ticket."""
        self._commands.put(lambda engine: self._submit(engine, ticket, request))

    def cancel(self, ticket: int) -> None:
        """End the request of this ticket, if it is not over; its last event follows."""
        self._commands.put(lambda engine: self._cancel(engine, ticket))

    def pause(self, ticket: int) -> None:
        """Set the request of this ticket aside, if it is not over."""
        self._commands.put(lambda engine: self._with_number(ticket, engine.pause))

    def resume(self, ticket: int) -> None:
        """Let the request of this ticket go on, if it is paused."""
        self._commands.put(lambda engine: self._with_number(ticket, engine.resume))

    def _with_number(self, ticket: int, function: Callable[[int], None]) -> None:
        number = self._numbers.get(ticket)
        if number is not None:
            function(number)

    def _submit(self, engine: Engine, ticket: int, request: Request) -> None:
        try:
            number = engine.submit(request)
        except ValueError as error:
            self._on_events([Event(ticket, time.monotonic(), error=error)])
            return
        self._numbers[ticket], self._tickets[number] = number, ticket

    def _cancel(self, engine: Engine, ticket: int) -> None:
        number = self._numbers.get(ticket)
        update = None if number is None else engine.cancel(number)
        if update is not None:
            self._on_events(self._events([update]))

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                # No variable here holds the engine: after a crash its memory is free before the next one is built.
                self.engine = self._make_engine()
                self.ready = True
                self._serve(self.engine)
            except Exception as error:
                log.exception("the engine has crashed; it is built again in %.1f s", self._restart_seconds)
                self._fail(error)
                self._stopping.wait(self._restart_seconds)

    def _serve(self, engine: Engine) -> None:
        while not self._stopping.is_set():
            self.heartbeat = time.monotonic()
            self._execute_commands(engine)
            if engine.busy:
                started = time.monotonic()
                events = self._events(engine.step())
                if events:
                    self._on_events(events)
                if self._on_step is not None:
                    self._on_step(engine, time.monotonic() - started)

    def _execute_commands(self, engine: Engine) -> None:
        """Execute what is queued; an idle engine waits for the next command."""
        try:
            command = self._commands.get(block=not engine.busy, timeout=IDLE_SECONDS)
            while True:
                command(engine)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _events(self, updates: Sequence[Update]) -> list[Event]:
        now, events = time.monotonic(), list[Event]()
        for update in updates:
            ticket = self._tickets[update.request]
            events.append(Event(ticket, now, update))
            if update.finish_reason is not None:
                del self._tickets[update.request], self._numbers[ticket]
        return events

    def _fail(self, error: Exception) -> None:
        """Forget all requests, also the queued ones."""
        self.engine, self.ready, self.restarts = None, False, self.restarts + 1
        self._numbers.clear()
        self._tickets.clear()
        while not self._commands.empty():
            self._commands.get_nowait()
        self._on_failure(error)
