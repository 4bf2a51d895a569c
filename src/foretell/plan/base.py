"""What a plan is: an answer that several requests of the engine write.

A plan never keeps the target's distribution: it changes what the model is asked. Its requests are decoded by any
method, so a plan composes with every drafter.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict

from foretell.core.sampling import CounterRNG, Stream
from foretell.engine.request import Request, Update
from foretell.engine.statistics import RequestStatistics, StepTime
from foretell.plan.ordered_text import OrderedText
from foretell.plan.statistics import PlanClock
from foretell.tokenizer.codec import Message, TextCodec
from foretell.tokenizer.stream import StopStrings

Encode = Callable[[Sequence[Message], bool], list[int]]
"""Token ids of the conversation with these turns in place of its last one; with True the last of them is continued."""


class PlanFieldError(ValueError):
    """A request asks for something that its plan cannot give; `name`: the field of `Request` or `SamplingParams`."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class PlanTask:
    """A conversation to answer.

    `request`: what answers it without a plan; its sampling parameters, stop strings, method and limits hold for the
    plan's requests too.
    """

    question: str
    """The text of the last message."""
    request: Request
    codec: TextCodec
    encode: Encode
    context: int
    """Longest sequence of the model, in tokens."""

    def ask(self, text: str, reply: str = "") -> list[int]:
        """Token ids of the conversation with this text in place of the question; `reply`: how the answer begins."""
        asked: list[Message] = [{"role": "user", "content": text}]
        return self.encode([*asked, {"role": "assistant", "content": reply}] if reply else asked, bool(reply))

    def fits(self, request: Request) -> bool:
        """Whether the model can read the request's prompt and write all its tokens."""
        return len(request.prompt) + request.max_new_tokens <= self.context


@dataclass
class PlanReport:
    """How an answer came about."""

    type: str
    outcome: str = "plain"
    """`expanded`, or `plain`: the model answered the conversation as it is."""
    reason: str = ""
    """Why the outcome is `plain`."""
    parts: int = 1
    """Parts of the answer that were written side by side."""
    requests: int = 0
    passes: int = 0
    """Passes of the target that gave tokens to any of the requests."""


class Plan(BaseModel, ABC):
    """The options of a plan."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    @abstractmethod
    def run(self, task: PlanTask) -> "PlanRun":
        """A run that answers a conversation.

        Raises:
            PlanFieldError: the request asks for something that the plan cannot give.
        """


@dataclass(frozen=True)
class PlanStep:
    """What follows from the updates of a pass."""

    update: Update | None = None
    """What the answer gets; its `request` is 0."""
    make_requests: Callable[[], list[Request]] | None = None
    """Makes further requests, numbered on from those before. It encodes texts, which may take milliseconds."""
    cancel: tuple[int, ...] = ()
    """Numbers of the requests to cancel; their last updates are awaited."""


@dataclass
class PlanRequest:
    """A request of a run, and what it has got."""

    number: int
    request: Request
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    statistics: RequestStatistics | None = None
    """Once it is over."""
    dropped: bool = False
    """Whether the run has cancelled it."""


class PlanRun(ABC):
    """An answer in the making, without input and output: who drives it submits its requests to an engine, hands over
    their updates pass by pass, cancels those that it names, and shows its text.

    Stop strings are looked for in the text of the whole answer. `clock` gives seconds.
    """

    def __init__(self, task: PlanTask, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        _check(task)
        self.task, self.report = task, PlanReport(name)
        self.requests = list[PlanRequest]()
        self.text = OrderedText()
        self._clock = PlanClock(clock)
        self._stop = StopStrings(task.request.stop, task.request.include_stop_str_in_output)
        self._wanted: Callable[[], list[Request]] | None = None
        self._cancel = list[int]()
        self._end: tuple[str, str | int | None] | None = None
        """`finish_reason` and `stop_reason` of an answer that ends before its requests do."""
        self._error: Exception | None = None

    @abstractmethod
    def begin(self) -> list[Request]:
        """The first requests."""

    @abstractmethod
    def on_update(self, request: PlanRequest, update: Update) -> None:
        """A request has got something: write text, want further requests, drop others."""

    @property
    @abstractmethod
    def ending(self) -> tuple[str, str | int | None]:
        """`finish_reason` and `stop_reason` of an answer whose requests are all over."""

    def start(self) -> PlanStep:
        """Begin."""
        self.want(self.begin)
        return self._step()

    def observe(self, updates: Sequence[tuple[int, Update]], time: StepTime | None = None) -> PlanStep:
        """Take the updates of one pass, each with the number of its request; `time`: of the pass, if it is known."""
        self.report.passes += any(update.tokens for _, update in updates)
        self._clock.count(time)
        for number, update in updates:
            request = self.requests[number]
            request.text, request.tokens = request.text + update.text, request.tokens + len(update.tokens)
            if update.finish_reason is not None:
                request.finish_reason, request.stop_reason = update.finish_reason, update.stop_reason
                request.statistics = update.statistics
                self._check_end(request, update.error)
            if self._end is None:
                self.on_update(request, update)
            else:
                self.count(update)
        return self._step()

    def want(self, make: Callable[[], list[Request]]) -> None:
        """Ask for further requests, which `make` makes."""
        self._wanted = make

    def drop(self, requests: Sequence[PlanRequest]) -> None:
        """Cancel those of the requests that are not over."""
        for request in requests:
            if request.finish_reason is None and not request.dropped:
                request.dropped = True
                self._cancel.append(request.number)

    def count(self, update: Update) -> None:
        """Let the tokens of an update count that are not shown."""
        self.text.append(closed=True).write("", update.tokens)

    def end(self, finish_reason: str, stop_reason: str | int | None = None) -> None:
        """End the answer with the text that was written so far."""
        self._end, self._wanted = self._end or (finish_reason, stop_reason), None
        self.drop(self.requests)

    def _check_end(self, request: PlanRequest, error: Exception | None) -> None:
        """A request is over: one that fails, or is cancelled from outside, ends the answer."""
        if error is not None:
            self._error = self._error or error
            self.end("error")
        elif request.finish_reason == "cancelled" and not request.dropped:
            self.end("cancelled")

    def _step(self) -> PlanStep:
        text, tokens = self._new_text()
        is_over = self._wanted is None and all(r.finish_reason is not None for r in self.requests)
        update = None
        if is_over:
            rest, more = self._rest()
            text, tokens = text + rest, tokens + more
            statistics = self._clock.total([r.statistics for r in self.requests if r.statistics is not None])
            reason, stop = self._end or self.ending
            update = Update(
                0, tokens, text, 0, finish_reason=reason, stop_reason=stop, error=self._error, statistics=statistics
            )
        elif text or tokens:
            update = Update(0, tokens, text, 0)
        cancel, self._cancel = tuple(self._cancel), []
        return PlanStep(update, None if self._wanted is None else self._make_requests, cancel)

    def _new_text(self) -> tuple[str, tuple[int, ...]]:
        """The text that may be shown now, up to a stop string, and its tokens."""
        text, tokens = self.text.release()
        if self._end is not None and self._end[1] is not None:  # after a stop string
            return "", tokens
        text, stop = self._stop.push(text)
        if text:
            self._clock.mark_text(sum(r.tokens for r in self.requests))
        if stop is not None:
            self.end("stop", stop)
        return text, tokens

    def _rest(self) -> tuple[str, tuple[int, ...]]:
        """What was held back until the end."""
        self.text.close()
        text, tokens = self._new_text()
        stopped = self._end is not None and self._end[1] is not None
        return text + ("" if stopped else self._stop.finish()), tokens

    def _make_requests(self) -> list[Request]:
        """The requests that are wanted, each with a seed of its own, except for the task's."""
        assert self._wanted is not None
        wanted, self._wanted = self._wanted(), None
        made = [
            r if r is self.task.request else self._with_seed(r, i) for i, r in enumerate(wanted, len(self.requests))
        ]
        self.requests += [PlanRequest(i, r) for i, r in enumerate(made, len(self.requests))]
        self.report.requests = len(self.requests)
        return made

    def seed_of(self, request: Request, number: int) -> int:
        """The seed of a request."""
        return CounterRNG(request.sampling_params.seed).key(number, Stream.PLAN)

    def _with_seed(self, request: Request, number: int) -> Request:
        return replace(request, sampling_params=replace(request.sampling_params, seed=self.seed_of(request, number)))


def child_request(task: PlanTask, prompt: Sequence[int], max_new_tokens: int, **sampling: object) -> Request:
    """The task's request with another prompt and without its stop strings; `sampling`: other sampling parameters."""
    params = replace(task.request.sampling_params, **sampling)  # type: ignore[arg-type]
    return replace(task.request, prompt=prompt, sampling_params=params, max_new_tokens=max_new_tokens, stop=())


_UNSUPPORTED = (
    "logprobs",
    "prompt_logprobs",
    "stop_token_ids",
    "ignore_eos",
    "constraint",
    "prediction",
    "return_drafts",
)
"""Fields of `Request` that belong to one stretch of tokens."""
_UNSUPPORTED_SAMPLING = ("min_tokens", "allowed_token_ids")


def _check(task: PlanTask) -> None:
    """Raise `PlanFieldError` for a task that no plan can answer."""
    values = {name: getattr(task.request, name) for name in _UNSUPPORTED}
    values |= {name: getattr(task.request.sampling_params, name) or None for name in _UNSUPPORTED_SAMPLING}
    for name, value in values.items():
        if value is not None and value is not False and value != ():
            raise PlanFieldError(name, f"a plan writes the answer in several parts and takes no {name}; leave out one")


def question_of(messages: Sequence[Message]) -> str:
    """The text that a plan answers.

    Raises:
        PlanFieldError: the last message is not the user's.
    """
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise PlanFieldError("messages", "a plan answers the last message, which must be a text of the user")
    text: str = messages[-1]["content"]
    return text
