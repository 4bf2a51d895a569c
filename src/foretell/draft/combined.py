"""Several retrievers at once: the trie takes the likeliest of what they offer."""

from collections.abc import Sequence

from foretell.core.context import Context, StepResult
from foretell.core.engine_bound import BindingEngine
from foretell.core.tree import TokenTree
from foretell.draft.base import Continuation, Retriever, with_hidden_layers


class CombinedRetriever(Retriever):
    """Offers the continuations of all its retrievers; their estimated chances decide which enter the tree."""

    label = "several retrievers"

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        if not retrievers:
            raise ValueError("at least one retriever is needed")
        self.retrievers = tuple(retrievers)
        self.hidden_layers = tuple(sorted({t for r in retrievers for t in r.hidden_layers}))

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """Everything the retrievers found."""
        found = [r.retrieve(context, budget) for r in self.retrievers]
        return [[c for part in row for c in part] for row in zip(*found, strict=True)]

    def add_probes(self, tree: TokenTree, context: Context) -> TokenTree:
        """The probes of every retriever."""
        for r in self.retrievers:
            tree = r.add_probes(tree, context)
        return tree

    def observe(self, step: StepResult) -> None:
        """Tell every retriever."""
        for r in self.retrievers:
            r.observe(with_hidden_layers(step, self.hidden_layers, r.hidden_layers))

    def release(self, row: int) -> None:
        """Forget a row."""
        for r in self.retrievers:
            r.release(row)

    def rewind(self, row: int, length: int) -> int:
        """As far as all of them can."""
        for r in self.retrievers:
            length = r.rewind(row, length)
        # Those that were asked first may know more than the last ones left.
        return min(r.rewind(row, length) for r in self.retrievers)

    def bind(self, engine: BindingEngine) -> bool:
        """With all of them."""
        return any([super().bind(engine), *(r.bind(engine) for r in self.retrievers)])
