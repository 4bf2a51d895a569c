"""A decoding method: a drafter that guesses, a shape that arranges the guesses into a tree, an acceptor that decides
which of them stand.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from foretell.accept.base import Acceptor
from foretell.core.context import Context, StepResult
from foretell.core.ownership import Owner
from foretell.core.tree import TokenTree
from foretell.draft.base import Drafter
from foretell.shape.base import Shape

D = TypeVar("D", bound=Drafter)


@dataclass(frozen=True)
class Method(Generic[D]):
    """Drafter x shape x acceptor.

    Raises:
        ValueError: the shape cannot grow from this kind of drafter.
    """

    draft: D
    tree: Shape[D]
    accept: Acceptor
    name: str = field(default="custom", kw_only=True)
    drafter_label: str = field(default="", kw_only=True)
    """What drafts, in a few words; empty: the drafter's own label."""

    def __post_init__(self) -> None:
        if not isinstance(self.draft, self.tree.needs):
            shape, drafter = type(self.tree).__name__, type(self.draft).__name__
            cure = "Chain, Branch, Fixed or Beam" if shape == "Trie" else "Trie"
            raise ValueError(
                f"{shape} grows from a {self.tree.needs.__name__.lower()}, and {drafter} is not one; try {cure} as the "
                f"tree"
            )

    @property
    def lossless(self) -> bool:
        """Whether the text follows the target's law exactly."""
        return self.accept.lossless

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Target layers whose hidden states the drafter needs."""
        return self.draft.hidden_layers

    def propose(self, context: Context) -> TokenTree:
        """Draft trees for the texts of `context`, no deeper than they have room for and the drafter can reach."""
        able = replace(context, max_depth=self.draft.max_depths(context))
        return self.draft.add_probes(self.tree.grow(self.draft, able).limit_depth(able.max_depth), context)

    def observe(self, step: StepResult) -> None:
        """Tell drafter and shape what happened."""
        self.draft.observe(step)
        self.tree.observe(step)

    def release(self, row: int) -> None:
        """Have drafter and shape forget a row: its request is over."""
        self.draft.release(row)
        self.tree.release(row)

    def rewind(self, row: int, length: int) -> int:
        """Prepare a row for a request that begins with the first `length` tokens of its last one; see
        `Drafter.rewind`.
        """
        self.tree.release(row)
        return self.draft.rewind(row, length)

    def claim(self, owner: Owner) -> bool:
        """Serve this engine from now on; whether another one was served before. See `Exclusive.claim`."""
        return any([self.draft.claim(owner), self.tree.claim(owner)])


AnyMethod = Method[Any]
