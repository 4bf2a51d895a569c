"""Retrieved continuations as one trie."""

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.core.context import Context
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.draft.base import Continuation, Retriever
from foretell.shape.base import Shape

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Trie(Shape[Retriever]):
    """The `budget` most probable prefixes of all continuations (REST, arXiv 2311.08252); a chain if there is one
    continuation.

    `min_probability`: least estimated probability of acceptance of a token. Where a further node costs a share `c` of a
    pass, a node pays if its probability exceeds about `c` times the tokens per pass. `elastic`: see `Shape`.

    Raises:
        ValueError: a negative budget.
    """

    label = "trie"

    budget: int
    min_probability: float = 0.0
    elastic: bool = False

    drafter_type = Retriever

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError(f"a trie holds 0 or more drafted tokens, found a budget of {self.budget}")

    def grow(self, draft: Retriever, context: Context) -> TokenTree:
        """A trie for each request, padded to the largest."""
        retrieved, least = draft.retrieve(context, self.budget), max(self.min_probability, context.least_score)
        chosen = [
            rank_prefixes(continuations, max_depth, least)[: self.budget]
            for max_depth, continuations in zip(context.max_depth.tolist(), retrieved, strict=True)
        ]
        return trie_from_prefixes(context.last_tokens, chosen)


def rank_prefixes(
    continuations: Sequence[Continuation], max_depth: int, min_probability: float = 0.0
) -> list[tuple[Prefix, float]]:
    """Prefixes of all continuations with their probabilities of acceptance, the most probable first; a prefix always
    comes after its own prefixes.
    """
    # Probabilities of a prefix that occurs several times are not added up: retrievers that count occurrences have done
    # so already.
    probability: dict[Prefix, float] = {}
    for c in continuations:
        for i in range(min(len(c.tokens), max_depth)):
            if c.cumulative_acceptance[i] < min_probability:
                break
            prefix = c.tokens[: i + 1]
            probability[prefix] = max(probability.get(prefix, 0.0), c.cumulative_acceptance[i])
    # Stable: among equals, shorter prefixes of earlier continuations come first, so ancestors are never cut off.
    return sorted(probability.items(), key=lambda item: -item[1])


def trie_from_prefixes(roots: Sequence[int], chosen: Sequence[Sequence[tuple[Prefix, float]]]) -> TokenTree:
    """The tries of these prefixes below the roots; the probabilities of acceptance are the scores."""
    tokens, parents, scores = [], [], []
    for root, prefixes in zip(roots, chosen, strict=True):
        ordered = sorted(prefixes, key=lambda item: len(item[0]))
        node = {(): 0} | {p: i + 1 for i, (p, _) in enumerate(ordered)}
        tokens.append([root, *(p[-1] for p, _ in ordered)])
        parents.append([-1, *(node[p[:-1]] for p, _ in ordered)])
        scores.append([1.0, *(probability for _, probability in ordered)])
    return tree_from_lists(tokens, parents, scores)
