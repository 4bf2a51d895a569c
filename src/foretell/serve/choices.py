"""What each choice of a request has got so far, and the pieces that a wire format writes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.engine.provenance import PassDrafts
from foretell.engine.request import Request, Update, describe_error
from foretell.engine.statistics import RequestStatistics
from foretell.serve.errors import bad_request, server_error, unavailable
from foretell.serve.thinking import Phase, Phases

TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens of a position with their log-probabilities."""


@dataclass(frozen=True)
class Piece:
    """New text of a choice with its tokens; `finish_reason` as OpenAI knows it, in the last piece only."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    """Of the prompt's tokens from the second one on; in the first piece only."""
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    passes: tuple[PassDrafts, ...] = ()
    """Where the request asks for its drafts."""

    @staticmethod
    def of(index: int, updates: Sequence[Update]) -> "Piece":
        """Consecutive updates of a request as one piece."""
        last = updates[-1]
        if len(updates) == 1:
            return Piece(
                index,
                last.text,
                last.tokens,
                last.logprobs,
                last.top_logprobs,
                last.prompt_logprobs,
                last.prompt_top_logprobs,
                last.finish_reason,
                last.stop_reason,
                last.passes,
            )
        return Piece(
            index,
            "".join(u.text for u in updates),
            tuple(t for u in updates for t in u.tokens),
            tuple(p for u in updates for p in u.logprobs),
            tuple(p for u in updates for p in u.top_logprobs),
            tuple(p for u in updates for p in u.prompt_logprobs),
            tuple(p for u in updates for p in u.prompt_top_logprobs),
            last.finish_reason,
            last.stop_reason,
            tuple(p for u in updates for p in u.passes),
        )


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

    def add(self, at: float, updates: Sequence[Update]) -> Piece:
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
        self.drafted += sum(u.drafted for u in updates)
        self.accepted += sum(u.accepted for u in updates)
        self.statistics = last.statistics
        return piece


class Choices:
    """All choices of a request; `started`: seconds of the monotonic clock."""

    def __init__(
        self, requests: Sequence[Request], per_prompt: int, started: float | None = None, phases: Phases | None = None
    ) -> None:
        self.all = [Choice(i, request, phases=phases) for i, request in enumerate(requests)]
        self.per_prompt = per_prompt
        self.started = time.monotonic() if started is None else started

    def add(self, batch: Sequence[tuple[int, float, Update]]) -> list[Piece]:
        """Add the updates of a batch: one piece per choice that got any.

        Raises:
            ApiError: the engine has ended a request with an error.
        """
        updates: dict[int, list[Update]] = {}
        for index, _, update in batch:
            updates.setdefault(index, []).append(update)
        at = {index: at for index, at, _ in batch}
        return [self.all[index].add(at[index], found) for index, found in updates.items()]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts; a prompt with several choices counts once, and those of a plan's requests are added
        once it is over.
        """
        return sum(c.prompt_tokens for c in self.all[:: self.per_prompt])

    @property
    def completion_tokens(self) -> int:
        """New tokens of all choices."""
        return sum(c.tokens for c in self.all)

    @property
    def reasoning_tokens(self) -> int:
        """New tokens of all choices that are reasoning."""
        return sum(c.phase.tokens for c in self.all if c.phase is not None)
