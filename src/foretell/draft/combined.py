"""Several retrievers at once; the trie takes the most probable of their continuations."""

from collections.abc import Sequence

from foretell.core.context import Context
from foretell.draft.base import CompositeDrafter, Continuation, Retriever


class CombinedRetriever(CompositeDrafter, Retriever):
    """Proposes the continuations of all its retrievers; their estimated probabilities decide which enter the tree."""

    label = "several retrievers"

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        super().__init__(retrievers)
        self.retrievers = tuple(retrievers)

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """The continuations of all retrievers, per request."""
        by_retriever = [r.retrieve(context, budget) for r in self.retrievers]
        if context.origins is not None:
            self._record_origins(context, by_retriever)
        return [[c for part in row for c in part] for row in zip(*by_retriever, strict=True)]

    def _record_origins(self, context: Context, by_retriever: Sequence[Sequence[Sequence[Continuation]]]) -> None:
        """Record for every prefix the retriever that estimates its probability highest."""
        assert context.origins is not None
        for i, row in enumerate(context.rows):
            best = dict[tuple[int, ...], float]()
            for retriever, by_row in zip(self.retrievers, by_retriever, strict=True):
                for continuation in by_row[i] if context.origins.asks(row) else ():
                    for length, probability in enumerate(continuation.cumulative_acceptance, 1):
                        prefix = continuation.tokens[:length]
                        if probability > best.get(prefix, -1.0):
                            best[prefix] = probability
                            context.origins.record(row, prefix, retriever.origin)
