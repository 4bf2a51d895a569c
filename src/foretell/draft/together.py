"""Several retrievers at once: the trie takes the likeliest of what they offer."""

from collections.abc import Sequence

from foretell.context import Context, Step
from foretell.draft.base import Continuation, Retriever, narrowed
from foretell.ownership import Owner
from foretell.tree import TokenTree


class Together(Retriever):
    """Offers the continuations of all its retrievers; their estimated chances decide which enter the tree."""

    label = "several retrievers"

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        if not retrievers:
            raise ValueError("at least one retriever is needed")
        self.retrievers = tuple(retrievers)
        self.taps = tuple(sorted({t for r in retrievers for t in r.taps}))

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """Everything the retrievers found."""
        found = [r.retrieve(context, budget) for r in self.retrievers]
        return [[c for part in row for c in part] for row in zip(*found, strict=True)]

    def probe(self, tree: TokenTree, context: Context) -> TokenTree:
        """The probes of every retriever."""
        for r in self.retrievers:
            tree = r.probe(tree, context)
        return tree

    def keep(self, step: Step) -> None:
        """Tell every retriever."""
        for r in self.retrievers:
            r.keep(narrowed(step, self.taps, r.taps))

    def clear(self, row: int) -> None:
        """Forget a row."""
        for r in self.retrievers:
            r.clear(row)

    def rewind(self, row: int, length: int) -> int:
        """As far as all of them can."""
        for r in self.retrievers:
            length = r.rewind(row, length)
        # Those that were asked first may know more than the last ones left.
        return min(r.rewind(row, length) for r in self.retrievers)

    def claim(self, owner: Owner) -> bool:
        """With all of them."""
        return any([super().claim(owner), *(r.claim(owner) for r in self.retrievers)])
