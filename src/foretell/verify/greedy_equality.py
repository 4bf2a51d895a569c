"""First check: greedy answers equal those of plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.engine.request import Completion
from foretell.verify.classifier import TokenDivergence


@dataclass(frozen=True)
class GreedyEquality:
    """Greedy answers compared with those of plain decoding, one prompt at a time."""

    prompts: int
    tokens: int
    tokens_per_pass: float
    divergences: tuple[TokenDivergence, ...]

    @staticmethod
    def of(completions: Sequence[Completion], divergences: tuple[TokenDivergence, ...]) -> "GreedyEquality":
        """Count tokens and passes of the answers."""
        tokens = sum(len(c.tokens) for c in completions)
        passes = sum(c.statistics.target_passes for c in completions)
        return GreedyEquality(len(completions), tokens, tokens / passes if passes else 0.0, divergences)

    @property
    def passed(self) -> bool:
        """Whether every divergence is a tie."""
        return all(d.verdict == "tie" for d in self.divergences)
