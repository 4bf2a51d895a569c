"""APAR (Liu et al., arXiv 2401.06761): a model that was tuned to fork writes the details of its text side by side."""

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from foretell.core.sampling import CounterRNG, Stream
from foretell.engine.request import Request, Update
from foretell.plan.base import Plan, PlanFieldError, PlanRequest, PlanRun, PlanTask, child_request
from foretell.plan.control_tokens import ForkRules, find_control_tokens
from foretell.plan.ordered_text import Segment
from foretell.tokenizer.stream import Detokenizer


class AparPlan(Plan):
    """APAR, for models of `foretell train apar`. Lossy: a detail does not see the details before it."""

    type: Literal["apar"] = "apar"
    max_forks: int = Field(32, ge=1, le=256)
    """Most forks of one stretch of text."""
    max_depth: int = Field(2, ge=1, le=8)
    """Most details inside each other."""

    def run(self, task: PlanTask) -> "AparRun":
        """A run that answers a conversation; see `Plan.run`."""
        return AparRun(task, self)


@dataclass
class _Stream:
    """A request and the text that it writes: the segment that it is in, and all its tokens with those before it."""

    context: list[int]
    depth: int
    segment: Segment
    detokenizer: Detokenizer
    left: int
    """Tokens that it may still write."""
    seed: int

    def push(self, tokens: list[int]) -> None:
        """Write tokens into the segment."""
        self.segment.write(self.detokenizer.push(tokens), tuple(tokens))

    def close(self) -> None:
        """End the segment."""
        self.segment.write(self.detokenizer.finish())
        self.segment.closed = True


class AparRun(PlanRun):
    """A stream of text per request. At a fork a further request goes on with the detail of what was just introduced,
    and the stream with what follows; the detail comes first in the text.

    `max_new_tokens` bounds every path through the text, not their sum.
    """

    def __init__(self, task: PlanTask, plan: AparPlan) -> None:
        super().__init__(task, plan.type)
        tokens = find_control_tokens(task.codec)
        if tokens is None:
            raise PlanFieldError("plan", "this model has no tokens to fork with: tune one with foretell train apar")
        self._plan, self._tokens = plan, tokens
        # A tokenizer may leave out ids below those of its special tokens.
        self._vocab = max(task.codec.tokenizer.get_vocab_size(), tokens.fork + 1, tokens.child + 1)
        self._streams: dict[int, _Stream] = {}
        """By number of their request."""
        self._forked = list[_Stream]()
        """Streams without a request yet."""

    def begin(self) -> list[Request]:
        """The root of the text."""
        request, detokenizer = self.task.request, self.task.codec.detokenizer()
        left = min(request.max_new_tokens, self.task.context - len(request.prompt))
        seed = request.sampling_params.seed
        self._forked = [_Stream(list(request.prompt), 0, self.text.append(), detokenizer, left, seed)]
        return self._requests()

    def on_update(self, request: PlanRequest, update: Update) -> None:
        """Write the tokens of a stream, and fork."""
        stream, ending = self._streams[request.number], request.request.ending_tokens
        for token in update.tokens:
            stream.context.append(token)
            stream.left -= 1
            if token == self._tokens.fork:
                self._fork(stream)
            elif token in ending:
                stream.segment.write("", (token,))
            else:
                stream.push([token])
        if request.finish_reason is not None:
            stream.close()

    @property
    def ending(self) -> tuple[str, str | int | None]:
        """`length` where a stream was cut."""
        return "length" if any(r.finish_reason == "length" for r in self.requests) else "stop", None

    def seed_of(self, request: Request, number: int) -> int:
        """That of the stream: it follows from the place of the fork, not from the order in which streams began."""
        return request.sampling_params.seed

    def _fork(self, stream: _Stream) -> None:
        """End the segment; the detail and the rest follow."""
        stream.segment.write("", (self._tokens.fork,))
        stream.close()
        detail = self.text.insert_after(stream.segment)
        rest = self.text.insert_after(detail)
        if stream.left > 1:
            context = [*stream.context, self._tokens.child]
            seed = CounterRNG(stream.seed).key(len(context), Stream.PLAN)
            detokenizer = self.task.codec.detokenizer()
            self._forked.append(_Stream(context, stream.depth + 1, detail, detokenizer, stream.left - 1, seed))
            self.want(self._requests)
        else:
            detail.closed = True
        stream.segment, stream.detokenizer = rest, self.task.codec.detokenizer()

    def _requests(self) -> list[Request]:
        """The requests of the streams that have none."""
        made = list[Request]()
        for stream in self._forked:
            self._streams[len(self.requests) + len(made)] = stream
            forks = self._plan.max_forks if stream.depth < self._plan.max_depth else 0
            rules = ForkRules(self._tokens, self._vocab, forks, after_child=stream.depth > 0)
            request = child_request(self.task, tuple(stream.context), stream.left, seed=stream.seed)
            made.append(replace(request, constraint=rules))
        self._forked = []
        self.report.parts = len(self._streams)
        self.report.outcome = "expanded" if len(self._streams) > 1 else "plain"
        return made
