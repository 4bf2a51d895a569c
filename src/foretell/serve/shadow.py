"""Shadow verification: a share of the finished answers is decoded again without drafts while the engine is idle."""

import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from prometheus_client import Counter

from foretell.engine.method import AnyMethod
from foretell.engine.request import Request, Update
from foretell.serve.event_buffer import Event
from foretell.serve.metrics.registry import MetricTables
from foretell.serve.request_id import REQUEST_ID
from foretell.serve.worker import EngineWorker

log = logging.getLogger(__name__)
MAX_WAITING = 64
"""Answers that wait for their check; further ones are skipped."""
_COMPLETE = ("stop", "length", "repetition")


class Result(StrEnum):
    """Of a check."""

    EQUAL = "equal"
    MISMATCH = "mismatch"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass
class _Answer:
    """A request whose answer is checked, and its tokens so far."""

    request_id: str
    request: Request
    method: str
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


def promises_the_same_text(method: AnyMethod, request: Request) -> bool:
    """Whether plain decoding must give the same tokens: for a rule that keeps a seed's text, and for every lossless one
    at temperature 0; for a request that allows no drafts there is nothing to check.
    """
    if request.max_drafts == 0 or not method.lossless:
        return False
    return method.accept.same_seed or request.sampling_params.temperature == 0


class ShadowVerifier:
    """Observes requests, and decodes a share `rate` of the finished ones again. Runs in the event loop.

    A check runs only while no request does (`idle`), and makes way for the next one. Its tickets are negative.
    """

    def __init__(
        self,
        rate: float,
        tables: MetricTables,
        method_of: Callable[[Request], AnyMethod],
        worker: EngineWorker,
        idle: Callable[[], bool],
    ) -> None:
        self._rate, self._method_of, self._worker, self._idle = rate, method_of, worker, idle
        self._checks = Counter("shadow_checks", "Answers decoded again plainly.", ("result",), registry=tables.own)
        for result in Result:
            self._checks.labels(result)
        self._live = dict[int, _Answer]()
        self._waiting = deque[_Answer]()
        self._checked: _Answer | None = None
        """The answer that is decoded again now."""
        self._ticket, self._tickets = 0, itertools.count(-1, -1)
        self._again = _Answer("", Request([0]), "")
        """What the check has got so far."""

    def opened(self, ticket: int, request: Request) -> None:
        """A request was given to the engine: a running check makes way."""
        if self._checked is not None:
            self._worker.cancel(self._ticket)
            self._waiting.appendleft(self._checked)
            self._checked = None
        method = self._method_of(request)
        if random.random() < self._rate and promises_the_same_text(method, request):
            self._live[ticket] = _Answer(REQUEST_ID.get(), request, method.name)

    def updated(self, ticket: int, at: float, update: Update) -> None:
        """A request has got something."""
        answer = self._live.get(ticket)
        if answer is not None:
            answer.tokens += update.tokens
            answer.text.append(update.text)
        if update.finish_reason is None:
            return
        self._live.pop(ticket, None)
        if answer is not None and update.finish_reason in _COMPLETE:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(answer)
            else:
                self._checks.labels(Result.SKIPPED).inc()
        self._start()

    def lost(self, ticket: int) -> None:
        """A request has ended with its engine."""
        self._live.pop(ticket, None)

    def engine_failed(self) -> None:
        """The engine has crashed, and forgotten the check."""
        self._end(Result.FAILED)

    def receive(self, events: Sequence[Event]) -> list[Event]:
        """Take the events of checks; the others are returned."""
        for event in events:
            if event.ticket == self._ticket and self._checked is not None:
                self._continue(event)
        return [event for event in events if event.ticket > 0]

    def _start(self) -> None:
        if self._checked is not None or not self._waiting or not self._idle():
            return
        self._checked, self._ticket = self._waiting.popleft(), next(self._tickets)
        request = self._checked.request
        plain = replace(
            request, method=None, max_drafts=0, logprobs=False, prompt_logprobs=None, return_drafts=False, deadline=None
        )
        self._again = _Answer("", plain, "")
        self._worker.submit(self._ticket, plain)

    def _continue(self, event: Event) -> None:
        update = event.update
        if update is None or update.finish_reason not in (None, *_COMPLETE):
            self._end(Result.FAILED)
            return
        self._again.tokens += update.tokens
        self._again.text.append(update.text)
        if update.finish_reason is not None:
            self._end(self._compare())
            self._start()

    def _compare(self) -> Result:
        answer, again = self._checked, self._again
        assert answer is not None
        if answer.tokens == again.tokens and "".join(answer.text) == "".join(again.text):
            return Result.EQUAL
        pairs = itertools.zip_longest(answer.tokens, again.tokens)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), len(again.tokens))
        fields = {
            "request_id": answer.request_id,
            "method": answer.method,
            "seed": answer.request.sampling_params.seed,
            "first_difference": position,
            "token": answer.tokens[position : position + 1],
            "plain_token": again.tokens[position : position + 1],
        }
        log.error("shadow mismatch", extra={"fields": fields})
        return Result.MISMATCH

    def _end(self, result: Result) -> None:
        if self._checked is not None:
            self._checks.labels(result).inc()
            self._checked = None
