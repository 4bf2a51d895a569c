"""A tree given in advance by paths of ranks: Medusa's tree choices, and the merged trees of SpecInfer."""

from dataclasses import dataclass
from functools import cached_property

from foretell.core.best_tree import Path
from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor
from foretell.draft.union import DrafterUnion
from foretell.shape.base import Shape, TreeBuilder, add_top_ranks, expand_level


@dataclass(frozen=True)
class FixedTree(Shape[Predictor | DrafterUnion]):
    """The node at path `(i, j, …)` holds the token of rank `j` after the token of rank `i`, … (Medusa, arXiv
    2401.10774); `choices`: all paths.

    `draw`: children are sampled instead of chosen by rank. `distinct`: siblings are sampled without replacement
    (Sequoia, arXiv 2402.12374), so that no token is verified twice. Otherwise equal samples stay separate nodes,
    because merging them into one test would bias the distribution.

    The sampled trees of several drafters are merged (SpecInfer, arXiv 2305.09781): they take turns at the children of
    every node, its own drafter first. Each child has the distribution of its drafter, as `Rejection` needs.

    Raises:
        ValueError: a path without its ancestors.
    """

    label = "fixed tree"

    choices: tuple[Path, ...]
    draw: bool = False
    distinct: bool = True

    drafter_type = Predictor, DrafterUnion

    def __post_init__(self) -> None:
        known = {(), *self.choices}
        orphan = next((p for p in self.choices if p[:-1] not in known), None)
        if orphan is not None:
            raise ValueError(f"a tree must hold the ancestors of its nodes: it holds {orphan} without {orphan[:-1]}")

    @cached_property
    def _levels(self) -> list[tuple[list[int], list[list[int]], list[int]]]:
        """Per depth: the nodes of the level above that have children, the ranks of these, and the number of the drafter
        of each node, modulo that of all drafters.
        """
        children = dict[Path, list[int]]()
        for *parent, rank in sorted(self.choices):
            children.setdefault(tuple(parent), []).append(rank)
        above: list[Path] = [()]
        out = list[tuple[list[int], list[list[int]], list[int]]]()
        while True:
            ranks = [children.get(parent, []) for parent in above]
            inner = [i for i, r in enumerate(ranks) if r]
            if not inner:
                return out
            out.append((inner, [ranks[i] for i in inner], [sum(above[i]) for i in inner]))
            above = [(*above[i], r) for i in inner for r in ranks[i]]

    def grow(self, draft: Predictor | DrafterUnion, context: Context) -> TokenTree:
        """The tree for each request, down to its maximum depth."""
        drafters = draft.drafters if isinstance(draft, DrafterUnion) else (draft,)
        builder = TreeBuilder(context, distinct=self.draw and self.distinct)
        for inner, ranks, turns in self._levels:
            builder.frontier = builder.frontier[:, inner]
            if not builder.grows:
                break
            if self.draw or len(drafters) > 1:
                expand_level(builder, [builder.expand(d) for d in drafters], ranks, self.draw, turns=turns)
            else:
                add_top_ranks(builder, builder.top_tokens(drafters[0], 1 + max(map(max, ranks))), ranks)
        return builder.build()
