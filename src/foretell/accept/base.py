"""The interface of acceptors."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from foretell.accept.fidelity import TokenFidelity
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions, Reads


@dataclass(frozen=True)
class AcceptResult:
    """Accepted nodes from the root down, the root excluded, and the token that follows the last of them.

    Where an accepted draft ends the answer (`ProcessedDistributions.goes_on`), it is this token.
    """

    path: tuple[int, ...]
    token: int
    fidelity: tuple[TokenFidelity, ...] = ()
    """Deviation from the target for each new token; empty for a lossless rule."""


class Acceptor(ABC):
    """Decides which drafted tokens of a request are accepted, from the target's processed distributions."""

    label: ClassVar[str] = ""
    """Short name of the rule for the table of methods."""
    lossless: ClassVar[bool]
    """Whether new tokens follow the target's distribution exactly."""
    same_seed: ClassVar[bool]
    """Whether a seed gives the tokens of plain decoding, not only their distribution."""
    takes_added: ClassVar[bool] = True
    """Whether drafts that were not sampled may be added to the tree without a change of the answer's distribution."""

    reads: ClassVar[Reads] = Reads.DISTRIBUTIONS
    """What the host needs to know of the target's distributions where they lie on a device."""

    @abstractmethod
    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Accept a path in the tree of batch row `row`."""
