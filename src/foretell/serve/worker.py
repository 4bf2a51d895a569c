"""The engine in a thread of its own: commands go in by a queue, events come out once per step."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from foretell.engine.engine import Engine
from foretell.engine.request import Request, Update
from foretell.serve.event_buffer import Event, EventBuffer

log = logging.getLogger(__name__)
IDLE_SECONDS = 1.0
"""An idle worker wakes this often, so that its heartbeat goes on."""


class EngineWorker:
    """Runs an engine in a thread.

    Requests are named by tickets of the caller's choice. `on_events` is called after a step with all events since the
    last call, at most once in `stream_interval` seconds unless a request begins or ends; `on_failure` with the
    exception of a step that ended the engine; `on_step` with the engine after a step and the step's seconds in all. All
    are called in the worker's thread. After a failure the engine is built again by `make_engine`; its requests are
    lost.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        on_events: Callable[[Sequence[Event]], None],
        on_failure: Callable[[Exception], None],
        restart_seconds: float = 1.0,
        on_step: Callable[[Engine, float], None] | None = None,
        stream_interval: float = 0.0,
    ) -> None:
        self._make_engine, self._on_failure = make_engine, on_failure
        self._events = EventBuffer(on_events, stream_interval)
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

    def prompt_progress(self, ticket: int) -> tuple[int, int]:
        """`Engine.request_progress` of the request of this ticket; any thread may ask."""
        engine, number = self.engine, self._numbers.get(ticket)
        return (0, 0) if engine is None or number is None else engine.request_progress(number)

    def _with_number(self, ticket: int, function: Callable[[int], None]) -> None:
        number = self._numbers.get(ticket)
        if number is not None:
            function(number)

    def _submit(self, engine: Engine, ticket: int, request: Request) -> None:
        try:
            number = engine.submit(request)
        except ValueError as error:
            self._events.put([Event(ticket, time.monotonic(), error=error)])
            return
        self._numbers[ticket], self._tickets[number] = number, ticket

    def _cancel(self, engine: Engine, ticket: int) -> None:
        number = self._numbers.get(ticket)
        update = None if number is None else engine.cancel(number)
        if update is not None:
            self._put([update])

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
                if engine.load[1] or engine.last_step.counts.reads_prompt:
                    self._events.flush()  # A pass over a prompt takes long.
                started = time.monotonic()
                self._put(engine.step())
                if self._on_step is not None:
                    self._on_step(engine, time.monotonic() - started)

    def _execute_commands(self, engine: Engine) -> None:
        """Execute what is queued; an idle engine waits for the next command."""
        if not engine.busy:
            self._events.flush()
        try:
            command = self._commands.get(block=not engine.busy, timeout=IDLE_SECONDS)
            while True:
                command(engine)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _put(self, updates: Sequence[Update]) -> None:
        now, events = time.monotonic(), list[Event]()
        for update in updates:
            ticket = self._tickets[update.request]
            events.append(Event(ticket, now, update))
            if update.finish_reason is not None:
                del self._tickets[update.request], self._numbers[ticket]
        self._events.put(events)

    def _fail(self, error: Exception) -> None:
        """Forget all requests, also the queued ones."""
        self._events.flush()
        self.engine, self.ready, self.restarts = None, False, self.restarts + 1
        self._numbers.clear()
        self._tickets.clear()
        while not self._commands.empty():
            self._commands.get_nowait()
        self._on_failure(error)
