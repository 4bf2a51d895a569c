"""Several retrievers at once; the trie takes the most probable of their continuations."""

from collections.abc import Sequence

from foretell.core.context import Context
from foretell.draft.base import CompositeDrafter, Continuation, Retriever


class CombinedRetriever(CompositeDrafter, Retriever):
    """Proposes the continuations of all its retrievers; their estimated probabilities decide which enter the tree."""

    label = "several retrievers"

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        if not retrievers:
            raise ValueError("at least one retriever is needed")
        super().__init__(retrievers)
        self.retrievers = tuple(retrievers)

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """The continuations of all retrievers, per request."""
        found = [r.retrieve(context, budget) for r in self.retrievers]
        return [[c for part in row for c in part] for row in zip(*found, strict=True)]
