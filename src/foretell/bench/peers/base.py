"""Interfaces of another runtime: generate greedily, and read tokens on top of a prefix."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from foretell.bench.timestamps import TokenTimestamps

LOOKUP_NGRAM, LOOKUP_TOKENS = 3, 10
"""Prompt lookup of the peers: longest n-gram that is searched, and tokens drafted."""


class ForwardBackend(ABC):
    """Forward passes over new tokens on top of a cached prefix, as verification does; the prefix stays the same."""

    name: str

    @abstractmethod
    def prefill(self, tokens: Sequence[int]) -> None:
        """Read the prefix."""

    @abstractmethod
    def forward(self, tokens: Sequence[int]) -> None:
        """One pass over new tokens, with logits over the whole vocabulary for each."""

    def rollback(self) -> None:
        """Remove the tokens of the last pass from the cache; not timed."""
        return


class Peer(ABC):
    """Another runtime with the same weights."""

    name: str
    pid: int | None = None
    """Its process; None: this one."""

    @abstractmethod
    def generate(self, prompt: Sequence[int], count: int) -> TokenTimestamps:
        """Generate exactly `count` tokens greedily; an end-of-sequence token does not end it."""
