"""A tree given in advance by paths of ranks: Medusa's tree choices."""

from dataclasses import dataclass
from functools import cached_property

from foretell.core.best_tree import Path
from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor
from foretell.shape.base import Shape, TreeBuilder, add_top_ranks, expand_level


@dataclass(frozen=True)
class FixedTree(Shape[Predictor]):
    """The node at path `(i, j, …)` holds the token of rank `j` after the token of rank `i`, … (Medusa, arXiv
    2401.10774); `choices`: all paths.

    `draw`: siblings are sampled without replacement instead of chosen by rank (Sequoia, arXiv 2402.12374).

    Raises:
        ValueError: a path without its ancestors.
    """

    label = "fixed tree"

    choices: tuple[Path, ...]
    draw: bool = False

    drafter_type = Predictor

    def __post_init__(self) -> None:
        known = {(), *self.choices}
        orphan = next((p for p in self.choices if p[:-1] not in known), None)
        if orphan is not None:
            raise ValueError(f"a tree must hold the ancestors of its nodes: it holds {orphan} without {orphan[:-1]}")

    @cached_property
    def _levels(self) -> list[tuple[list[int], list[list[int]]]]:
        """Per depth: the nodes of the level above that have children, and the ranks of the children."""
        above: list[Path] = [()]
        out = list[tuple[list[int], list[list[int]]]]()
        while True:
            ranks = [sorted(c[-1] for c in self.choices if c[:-1] == parent) for parent in above]
            inner = [i for i, r in enumerate(ranks) if r]
            if not inner:
                return out
            out.append((inner, [ranks[i] for i in inner]))
            above = [(*above[i], r) for i in inner for r in ranks[i]]

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """The tree for each request, down to its maximum depth."""
        builder = TreeBuilder(context, distinct=self.draw)
        for inner, ranks in self._levels:
            builder.frontier = builder.frontier[:, inner]
            if not builder.grows:
                break
            if self.draw:
                expand_level(builder, [builder.expand(draft)], ranks, draw=True)
            else:
                add_top_ranks(builder, builder.top_tokens(draft, 1 + max(map(max, ranks))), ranks)
        return builder.build()
