"""A decoding method: a drafter that guesses, a shape that arranges the guesses into a tree, an acceptor that decides which of them stand."""

from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from foretell.accept.base import Acceptor
from foretell.context import Context, Step
from foretell.draft.base import Drafter
from foretell.ownership import Owner
from foretell.shape.base import Shape
from foretell.tree import TokenTree

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

    def __post_init__(self) -> None:
        if not isinstance(self.draft, self.tree.needs):
            shape, drafter = type(self.tree).__name__, type(self.draft).__name__
            cure = "Chain, Branch, Fixed or Beam" if shape == "Trie" else "Trie"
            raise ValueError(
                f"{shape} grows from a {self.tree.needs.__name__.lower()}, and {drafter} is not one; try {cure} as the tree"
            )

    @property
    def lossless(self) -> bool:
        """Whether the text follows the target's law exactly."""
        return self.accept.lossless

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose hidden states the drafter needs."""
        return self.draft.taps

    def propose(self, context: Context) -> TokenTree:
        """Draft trees for the texts of `context`, no deeper than they have room for and the drafter can reach."""
        able = replace(context, room=self.draft.depths(context))
        return self.draft.probe(self.tree.grow(self.draft, able).limited(able.room), context)

    def keep(self, step: Step) -> None:
        """Tell drafter and shape what happened."""
        self.draft.keep(step)
        self.tree.keep(step)

    def clear(self, row: int) -> None:
        """Have drafter and shape forget a row: its request is over."""
        self.draft.clear(row)
        self.tree.clear(row)

    def rewind(self, row: int, length: int) -> int:
        """Prepare a row for a request that begins with the first `length` tokens of its last one; see `Drafter.rewind`."""
        self.tree.clear(row)
        return self.draft.rewind(row, length)

    def claim(self, owner: Owner) -> bool:
        """Serve this engine from now on; whether another one was served before. See `Exclusive.claim`."""
        return any([self.draft.claim(owner), self.tree.claim(owner)])


AnyMethod = Method[Any]
