"""What each choice of a request has got so far, and the pieces that a wire format writes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.engine.request import Output, Request, describe_error
from foretell.engine.statistics import RequestStatistics
from foretell.serve.errors import bad_request, server_error, unavailable
from foretell.serve.thinking import Phase, Phases


@dataclass(frozen=True)
class Piece(Output):
    """What a choice got since its last piece; `finish_reason` as OpenAI knows it, in the last piece only."""

    index: int = 0
    """Number of the choice."""

    @staticmethod
    def of(index: int, outputs: Sequence[Output]) -> "Piece":
        """Consecutive outputs of a request as one piece."""
        return Piece(**vars(Output.join(outputs)), index=index)


@dataclass
class Choice:
    """A choice so far."""

    index: int
    request: Request
    tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    drafted: int = 0
    accepted: int = 0
    """Drafts that were verified, and tokens that were drafted."""
    statistics: RequestStatistics | None = None
    """Once it is over."""
    phases: Phases | None = None
    phase: Phase | None = None
    """Of an answer that may begin with reasoning."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens that were asked."""
        return len(self.request.prompt) if self.statistics is None else self.statistics.prompt_tokens

    def add(self, at: float, updates: Sequence[Output]) -> Piece:
        """Add updates and return them as one piece.

        Raises:
            ApiError: the engine has ended the request with an error.
        """
        last = updates[-1]
        if isinstance(last.error, ValueError):
            raise bad_request(f"the request cannot be answered: {last.error}")
        if last.error is not None:
            raise server_error(f"the engine failed on this request: {describe_error(last.error)}")
        if last.finish_reason == "cancelled":
            raise unavailable("the request was cancelled")
        piece = Piece.of(self.index, updates)
        self.first_at, self.last_at = self.first_at or at, at
        self.tokens += len(piece.tokens)
        for token in piece.tokens if self.phases is not None else ():
            assert self.phases is not None
            self.phase = self.phases.advance(self.phase or self.phases.start(), token)
        self.drafted += piece.drafted
        self.accepted += piece.accepted
        self.statistics = last.statistics
        return piece


class Choices:
    """All choices of a request; `started`: seconds of the monotonic clock."""

    def __init__(
        self,
        requests: Sequence[Request],
        per_prompt: int,
        started: float | None = None,
        phases: Phases | None = None,
        prompt_only: bool = False,
    ) -> None:
        self.all = [Choice(i, request, phases=phases) for i, request in enumerate(requests)]
        self.per_prompt, self._prompt_only = per_prompt, prompt_only
        self.started = time.monotonic() if started is None else started

    def add(self, batch: Sequence[tuple[int, float, Output]]) -> list[Piece]:
        """Add the updates of a batch: one piece per choice that got any.

        Raises:
            ApiError: the engine has ended a request with an error.
        """
        updates: dict[int, list[Output]] = {}
        for index, _, update in batch:
            updates.setdefault(index, []).append(update)
        at = {index: at for index, at, _ in batch}
        return [self.all[index].add(at[index], outputs) for index, outputs in updates.items()]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts; a prompt with several choices counts once, and those of a plan's requests are added
        once it is over.
        """
        return sum(c.prompt_tokens for c in self.all[:: self.per_prompt])

    @property
    def completion_tokens(self) -> int:
        """New tokens of all choices; of answers that are their prompts, none."""
        return 0 if self._prompt_only else sum(c.tokens for c in self.all)

    @property
    def reasoning_tokens(self) -> int:
        """New tokens of all choices that are reasoning."""
        return sum(c.phase.tokens for c in self.all if c.phase is not None)
