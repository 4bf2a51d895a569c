"""Arrival times of the tokens of an answer, measured in the same way for every competitor."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenTimestamps:
    """Tokens of one answer; `counts[i]` of them arrived together, `seconds[i]` after the request."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    counts: tuple[int, ...]

    def from_time(self, start: float) -> "TokenTimestamps":
        """The same, with all that arrived until `start` as one first arrival."""
        early = sum(seconds <= start for seconds in self.seconds)
        if early < 2:
            return self
        counts = (sum(self.counts[:early]), *self.counts[early:])
        return TokenTimestamps(self.tokens, self.seconds[early - 1 :], counts)


@dataclass
class TokenTimer:
    """Notes the arrival times of tokens; starts when it is made."""

    started: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int]) -> None:
        """Note tokens that arrive now."""
        self.seconds.append(time.perf_counter() - self.started)
        self.counts.append(len(tokens))
        self.tokens.extend(tokens)

    def timestamps(self, limit: int | None = None) -> TokenTimestamps:
        """The tokens so far, at most the first `limit`."""
        counts, left = list[int](), len(self.tokens) if limit is None else limit
        for n in self.counts:
            counts.append(min(n, left))
            left -= counts[-1]
        kept = [i for i, n in enumerate(counts) if n]
        seconds = tuple(self.seconds[i] for i in kept)
        return TokenTimestamps(tuple(self.tokens[:limit]), seconds, tuple(counts[i] for i in kept))
