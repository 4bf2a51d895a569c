"""The best single continuation of a retriever, for engines that verify chains."""

from dataclasses import dataclass

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import Continuation, Retriever
from foretell.shape.base import Shape
from foretell.shape.trie import trie_from_prefixes


@dataclass(frozen=True)
class BestChain(Shape[Retriever]):
    """Of all continuations the one with the most expected accepted tokens, up to `length` of them."""

    label = "chain"

    length: int
    elastic: bool = True

    drafter_type = Retriever

    def grow(self, draft: Retriever, context: Context) -> TokenTree:
        """A chain for each request."""
        chains = list[list[tuple[tuple[int, ...], float]]]()
        retrieved = draft.retrieve(context, self.length)
        for continuations, depth in zip(retrieved, context.max_depth.tolist(), strict=True):
            best = max(continuations, key=lambda c: sum(c.cumulative_acceptance[:depth]), default=Continuation((), ()))
            chances = [p for p in best.cumulative_acceptance[:depth] if p >= context.least_score]
            chains.append([(best.tokens[: n + 1], chance) for n, chance in enumerate(chances)])
        return trie_from_prefixes(context.last_tokens, chains)
