"""The contract of an acceptor: which drafts stand, and what the target says after them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from foretell.accept.fidelity import TokenFidelity
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions


@dataclass(frozen=True)
class AcceptResult:
    """Drafted nodes that stand, root first and root excluded, and the token decided after the last of them."""

    path: tuple[int, ...]
    token: int
    fidelity: tuple[TokenFidelity, ...] = ()
    """What each decided token cost in fidelity, in order; nothing for a lossless rule."""


class Acceptor(ABC):
    """Decides over one text's tree from the target's processed distributions; never sees logits, flags or
    parameters.
    """

    label: ClassVar[str] = ""
    """The rule, in a few words, for the table of methods."""
    lossless: ClassVar[bool]
    """Whether the decided text follows the target's law exactly."""
    same_seed: ClassVar[bool]
    """Whether equal seeds give the text of plain decoding, not only its law."""

    @abstractmethod
    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Walk the tree of text `row` from its root."""
