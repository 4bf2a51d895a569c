"""When the tokens of one answer arrived: the one clock that every contender, ours or not, is read by."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Arrivals:
    """Tokens of one answer; `count[i]` of them arrived together `at[i]` seconds after the request was made."""

    tokens: tuple[int, ...]
    at: tuple[float, ...]
    count: tuple[int, ...]


@dataclass
class Clock:
    """Notes what arrives; starts when made."""

    started: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    count: list[int] = field(default_factory=list)

    def note(self, tokens: Sequence[int]) -> None:
        """These tokens are here now."""
        self.at.append(time.perf_counter() - self.started)
        self.count.append(len(tokens))
        self.tokens.extend(tokens)

    def stop(self, most: int | None = None) -> Arrivals:
        """What arrived, no more than `most` tokens of it."""
        count, left = list[int](), len(self.tokens) if most is None else most
        for n in self.count:
            count.append(min(n, left))
            left -= count[-1]
        kept = [i for i, n in enumerate(count) if n]
        return Arrivals(tuple(self.tokens[:most]), tuple(self.at[i] for i in kept), tuple(count[i] for i in kept))
