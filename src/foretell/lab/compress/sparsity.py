"""How many weights are set to zero, and which: a share of every output, or a pattern N:M."""

import re
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float

Tensor = torch.Tensor


@dataclass(frozen=True)
class Pattern:
    """At most `kept` of every `group` consecutive inputs of an output are not zero: `kept:group`."""

    kept: int
    group: int

    @staticmethod
    def parse(text: str) -> "Pattern":
        """The pattern of a text such as 2:4.

        Raises:
            ValueError: it is no pattern.
        """
        match = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
        if match is None or not 0 < int(match[1]) < int(match[2]):
            raise ValueError(f"--pattern {text}: name how many of how many weights are kept, such as 2:4 or 4:8")
        return Pattern(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}"


@dataclass(frozen=True)
class Sparsity:
    """`share`: of the weights that become zero; with a pattern, the pattern's.

    Raises:
        ValueError: a share outside 0..1.
    """

    share: float
    pattern: Pattern | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"the share of weights to prune lies in 0..1, found {self.share}")

    @staticmethod
    def of(pattern: Pattern) -> "Sparsity":
        """The sparsity of a pattern."""
        return Sparsity(1 - pattern.kept / pattern.group, pattern)

    def __str__(self) -> str:
        return f"{self.share:g}" if self.pattern is None else str(self.pattern)

    def check(self, inputs: int, name: str) -> None:
        """Refuse rows that are no whole groups of the pattern.

        Raises:
            ValueError: the matrix called `name` has such rows.
        """
        if self.pattern is not None and inputs % self.pattern.group:
            raise ValueError(f"the {inputs} inputs of {name} are no whole groups of {self.pattern.group}, as "
                             f"the pattern {self.pattern} needs")  # fmt: skip

    def pruned(self, score: Float[Tensor, "o i"]) -> Bool[Tensor, "o i"]:
        """True for the weights that become zero: those of the least score within an output or a group of the pattern;
        of equal ones the first.
        """
        if self.pattern is None:
            return least_in_rows(score, round(self.share * score.shape[-1]))
        groups = score.unflatten(-1, (-1, self.pattern.group))
        return least_in_rows(groups, self.pattern.group - self.pattern.kept).flatten(-2)


def least_in_rows(score: Float[Tensor, "*o i"], count: int) -> Bool[Tensor, "*o i"]:
    """True for the `count` smallest numbers of every row; of equal ones the first."""
    smallest = score.argsort(dim=-1, stable=True)[..., :count]
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, smallest, True)
