"""What a runtime must do to be measured beside ours: generate a fixed number of tokens greedily, and read tokens on top
of a cached text.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from foretell.bench.timestamps import TokenTimestamps


class ForwardBackend(ABC):
    """Reads a few new tokens on top of a text that it holds, again and again, as a target pass does."""

    name: str

    @abstractmethod
    def prefill(self, tokens: Sequence[int]) -> None:
        """Read the text that every pass continues."""

    @abstractmethod
    def forward(self, tokens: Sequence[int]) -> None:
        """One pass over new tokens, a score of the whole vocabulary for each."""

    def rollback(self) -> None:
        """Drop what the last pass added; not timed."""
        return


class Peer(ABC):
    """Another runtime with the same weights."""

    name: str

    @abstractmethod
    def generate(self, prompt: Sequence[int], count: int) -> TokenTimestamps:
        """Exactly `count` tokens after the prompt, greedily; an end of sequence does not end it."""
