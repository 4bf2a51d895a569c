"""The engine's requests on the side of the event loop: a job per HTTP request, with a bounded buffer."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from foretell.engine.request import Request, Update
from foretell.serve.errors import ApiError, server_error, unavailable
from foretell.serve.event_buffer import Event
from foretell.serve.worker import EngineWorker

Batch = list[tuple[int, float, Update]]
"""Updates with the index of their request in the job and their time."""
MAX_PENDING = 64
"""Updates of a job that its reader has not fetched; with more, its requests pause until it has."""


class Job:
    """The engine requests of one HTTP request: `batches` of updates until all are over.

    A job that is closed earlier is cancelled in the engine at once. One whose reader is slow is paused there.
    """

    def __init__(self, jobs: "Jobs", per_prompt: int = 1) -> None:
        self._jobs, self.per_prompt = jobs, per_prompt
        self.sizes = list[int]()
        """New tokens of each request so far."""
        self.started = time.monotonic()
        self._pending: Batch = []
        self._open = 0
        self._error: ApiError | None = None
        self._wake: asyncio.Future[None] | None = None
        """Done once there is something to deliver; None: nobody waits."""
        self._waits_since = 0.0
        """Time of the loop."""
        self._timer: asyncio.TimerHandle | None = None
        self.paused = False
        """Whether its requests get nothing until the reader has fetched what is there."""
        self.tickets = list[int]()

    def add(self, ticket: int) -> int:
        """Take another request into the job; its index."""
        self.tickets.append(ticket)
        self.sizes.append(0)
        self._open += 1
        return len(self.tickets) - 1

    def put(self, index: int, at: float, update: Update) -> None:
        """Add an update; updates that the reader has not fetched yet are delivered together."""
        self._pending.append((index, at, update))
        self.sizes[index] += len(update.tokens)
        self._open -= update.finish_reason is not None
        self._notify()
        if len(self._pending) > MAX_PENDING and not self.paused:
            self.paused = True
            self._jobs.pause(self)

    def fail(self, error: ApiError) -> None:
        """End the job with an error."""
        self._error = self._error or error
        self._notify()

    @property
    def prompt_progress(self) -> tuple[int, int, int]:
        """Tokens of the first request's prompt: all, those read so far, and those of them that were cached."""
        return self._jobs.prompt_progress(self.tickets[0])

    async def batches(self, interval: float | None = None) -> AsyncIterator[Batch]:
        """All updates since the last batch, until the requests are over; an empty batch after `interval` seconds
        without any.

        Raises:
            ApiError: the job has failed.
        """
        while self._open or self._pending:
            if not self._pending:
                await self._wait(interval)
            if self._error is not None and not self._pending:
                raise self._error
            batch, self._pending = self._pending, []
            if self.paused:
                self.paused = False
                self._jobs.resume(self)
            yield batch

    async def _wait(self, interval: float | None) -> None:
        """Return once there is something to deliver, or after `interval` seconds.

        A timer for every wait would cost more than the wait: one runs on, and looks when it ends how long the present
        wait has lasted.
        """
        if self._error is not None:
            return
        loop = asyncio.get_running_loop()
        self._wake, self._waits_since = loop.create_future(), loop.time()
        if interval is not None and self._timer is None:
            self._timer = loop.call_later(interval, self._look_at_time, loop, interval)
        try:
            await self._wake
        finally:
            self._wake = None

    def _look_at_time(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self._timer = None
        left = self._waits_since + interval - loop.time()
        if left <= 0:
            self._notify()
        elif self._wake is not None:
            self._timer = loop.call_later(left, self._look_at_time, loop, interval)

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def close(self) -> None:
        """Cancel what is not over."""
        if self._timer is not None:
            self._timer.cancel()
        self._jobs.close(self)


class RequestObserver(Protocol):
    """Is told what happens to every request; for metrics, logs and checks."""

    def opened(self, ticket: int, request: Request) -> None:
        """A request was given to the engine."""

    def updated(self, ticket: int, at: float, update: Update) -> None:
        """A request has got something; `at`: seconds of the monotonic clock."""

    def lost(self, ticket: int) -> None:
        """A request has ended with its engine, or was refused by it."""


class Jobs:
    """All jobs: gives them to the worker, and the worker's events to them. Runs in the event loop.

    `on_close` is called with every job that nobody reads any more.
    """

    def __init__(
        self,
        worker: EngineWorker,
        observers: Sequence[RequestObserver] = (),
        on_close: Callable[[Job], None] | None = None,
    ) -> None:
        self._worker, self._observers, self._numbers = worker, observers, itertools.count(1)
        self._on_close = on_close
        self._owners: dict[int, tuple[Job, int]] = {}
        """Job and index in it by ticket, of requests that are not over in the engine."""
        self._unread: dict[int, int] = {}
        """Prompt tokens by ticket, of requests without a first update."""
        self._growing = set[Job]()
        """Jobs that may get further requests."""
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def live(self) -> int:
        """Requests that wait or run in the engine."""
        return len(self._owners)

    @property
    def unread_tokens(self) -> int:
        """Prompt tokens of the requests without a first update."""
        return sum(self._unread.values())

    def open(self, requests: Sequence[Request], per_prompt: int = 1) -> Job:
        """Give requests to the engine: `per_prompt` choices of each prompt."""
        job = Job(self, per_prompt)
        self.extend(job, requests)
        return job

    def open_growing(self) -> Job:
        """A job whose requests follow, until it is closed."""
        job = Job(self)
        self._growing.add(job)
        self._empty.clear()
        return job

    def extend(self, job: Job, requests: Sequence[Request]) -> None:
        """Give further requests of a job to the engine."""
        for request in requests:
            ticket = next(self._numbers)
            self._owners[ticket], self._unread[ticket] = (job, job.add(ticket)), len(request.prompt)
            self._worker.submit(ticket, request)
            for observer in self._observers:
                observer.opened(ticket, request)
            self._empty.clear()

    def cancel(self, job: Job, index: int) -> None:
        """Cancel a request of a job, if it is not over; it counts as live until the engine has ended it."""
        if job.tickets[index] in self._owners:
            self._worker.cancel(job.tickets[index])

    def close(self, job: Job) -> None:
        """Cancel the requests of a job that are not over."""
        for index in range(len(job.tickets)):
            self.cancel(job, index)
        self._growing.discard(job)
        self._note_empty()
        if self._on_close is not None:
            self._on_close(job)

    def prompt_progress(self, ticket: int) -> tuple[int, int, int]:
        """Tokens of a prompt whose request has got nothing yet: all, those read, and those of them that were cached."""
        return self._unread.get(ticket, 0), *self._worker.prompt_progress(ticket)

    def pause(self, job: Job) -> None:
        """Set the requests of a job aside in the engine."""
        for ticket in job.tickets:
            self._worker.pause(ticket)

    def resume(self, job: Job) -> None:
        """Let the requests of a job go on."""
        for ticket in job.tickets:
            self._worker.resume(ticket)

    @property
    def paused(self) -> int:
        """Requests that wait for a slow reader."""
        return sum(job.paused for job, _ in self._owners.values())

    def receive(self, events: Sequence[Event]) -> None:
        """Deliver the events of a step."""
        for event in events:
            owner = self._owners.get(event.ticket)
            if owner is None:  # The job failed with an earlier engine.
                self._worker.cancel(event.ticket)
                continue
            job, index = owner
            self._unread.pop(event.ticket, None)
            if event.update is None:
                job.fail(server_error(f"the engine refused the request: {event.error}"))
                self._forget(event.ticket)
                self._tell_lost([event.ticket])
                continue
            job.put(index, event.at, event.update)
            if event.update.finish_reason is not None:
                self._forget(event.ticket)
            for observer in self._observers:
                observer.updated(event.ticket, event.at, event.update)

    def _tell_lost(self, tickets: Iterable[int]) -> None:
        for observer in self._observers:
            for ticket in tickets:
                observer.lost(ticket)

    def fail_all(self, error: ApiError) -> None:
        """End all jobs with an error; the engine has lost them."""
        for job in self._unfinished:
            job.fail(error)
        self._tell_lost(self._owners)
        self._owners.clear()
        self._unread.clear()
        self._growing.clear()
        self._empty.set()

    def engine_failed(self) -> None:
        """End all jobs: the engine has crashed."""
        self.fail_all(unavailable("the engine has crashed and is being restarted; repeat the request", 1))

    async def drain(self, seconds: float) -> None:
        """Wait until no request is left; after `seconds` the rest ends with an error."""
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            for job in self._unfinished:
                job.fail(unavailable("the server is shutting down"))
                self.close(job)

    @property
    def _unfinished(self) -> set[Job]:
        return self._growing | {job for job, _ in self._owners.values()}

    def _forget(self, ticket: int) -> None:
        del self._owners[ticket]
        self._unread.pop(ticket, None)
        self._note_empty()

    def _note_empty(self) -> None:
        if not self._owners and not self._growing:
            self._empty.set()
