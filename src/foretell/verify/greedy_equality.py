"""First check: greedy answers equal those of plain decoding."""

from dataclasses import dataclass

from foretell.verify.classifier import TokenDivergence


@dataclass(frozen=True)
class GreedyEquality:
    """Greedy answers compared with plain decoding, one prompt at a time."""

    prompts: int
    tokens: int
    tokens_per_pass: float
    divergences: tuple[TokenDivergence, ...]

    @property
    def passed(self) -> bool:
        """Every difference is a tie."""
        return all(d.verdict == "tie" for d in self.divergences)
