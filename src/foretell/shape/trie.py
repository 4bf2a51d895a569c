"""Retrieved continuations merged into one tree of shared prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.core.context import Context
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.draft.base import Continuation, Retriever
from foretell.shape.base import Shape

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Trie(Shape[Retriever]):
    """The `budget` likeliest prefixes of all continuations (REST, arXiv 2311.08252; a chain when there is one
    continuation).

    `least` leaves out tokens whose estimated chance of acceptance is below it: on hardware where a further node costs a
    share `c` of a pass, a node pays while its chance exceeds about `c` times the tokens per pass.
    """

    label = "trie"

    budget: int
    min_probability: float = 0.0

    drafter_type = Retriever

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError(f"a trie holds 0 or more drafted tokens, found a budget of {self.budget}")

    def grow(self, draft: Retriever, context: Context) -> TokenTree:
        """A trie per text, padded to the largest."""
        found = draft.retrieve(context, self.budget)
        chosen = [
            [prefix for prefix, _ in rank_prefixes(continuations, max_depth, self.min_probability)[: self.budget]]
            for max_depth, continuations in zip(context.max_depth.tolist(), found, strict=True)
        ]
        return trie_from_prefixes(context.last_tokens, chosen)


def rank_prefixes(
    continuations: Sequence[Continuation], max_depth: int, min_probability: float = 0.0
) -> list[tuple[Prefix, float]]:
    """Prefixes of all continuations with their chances of acceptance, likeliest first; a prefix always comes after its
    own prefixes.
    """
    # Chances of one prefix found several times are not added up: retrievers that count occurrences have already done
    # so.
    chance: dict[Prefix, float] = {}
    for c in continuations:
        for i in range(min(len(c.tokens), max_depth)):
            if c.cumulative_acceptance[i] < min_probability:
                break
            prefix = c.tokens[: i + 1]
            chance[prefix] = max(chance.get(prefix, 0.0), c.cumulative_acceptance[i])
    # Stable: among equal chances, shorter prefixes of earlier continuations come first, so ancestors are never cut.
    return sorted(chance.items(), key=lambda item: -item[1])


def trie_from_prefixes(roots: Sequence[int], chosen: Sequence[Sequence[Prefix]]) -> TokenTree:
    """The trees that hold these prefixes below their roots."""
    tokens, parents = [], []
    for root, prefixes in zip(roots, chosen, strict=True):
        kept = sorted(prefixes, key=len)
        place = {(): 0} | {p: i + 1 for i, p in enumerate(kept)}
        tokens.append([root, *(p[-1] for p in kept)])
        parents.append([-1, *(place[p[:-1]] for p in kept)])
    return tree_from_lists(tokens, parents)
