"""When the tokens of one answer arrived: the one clock that every competitor, ours or not, is read by."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenTimestamps:
    """Tokens of one answer; `count[i]` of them arrived together `at[i]` seconds after the request was made."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass
class TokenTimer:
    """Notes what arrives; starts when made."""

    started: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int]) -> None:
        """These tokens are here now."""
        self.seconds.append(time.perf_counter() - self.started)
        self.counts.append(len(tokens))
        self.tokens.extend(tokens)

    def timestamps(self, limit: int | None = None) -> TokenTimestamps:
        """What arrived, no more than `most` tokens of it."""
        count, left = list[int](), len(self.tokens) if limit is None else limit
        for n in self.counts:
            count.append(min(n, left))
            left -= count[-1]
        kept = [i for i, n in enumerate(count) if n]
        return TokenTimestamps(
            tuple(self.tokens[:limit]), tuple(self.seconds[i] for i in kept), tuple(count[i] for i in kept)
        )
