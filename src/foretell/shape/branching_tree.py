"""A tree with a fixed number of children per depth: the expansion and merge of SpecInfer."""

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor
from foretell.draft.union import DrafterUnion
from foretell.shape.base import Shape, TreeBuilder, expand_level


@dataclass(frozen=True)
class BranchingTree(Shape[Predictor]):
    """Every node at depth `i` gets `widths[i]` children (SpecInfer, arXiv 2305.09781).

    `distinct`: siblings are sampled without replacement, so that no token is verified twice. Otherwise equal samples
    stay separate nodes, because merging them into one test would bias the distribution. `draw=False`: children are the
    most probable tokens.

    Raises:
        ValueError: a width below 1.
    """

    label = "tree with fixed branching"

    widths: tuple[int, ...]
    distinct: bool = True
    draw: bool = True

    drafter_type = Predictor

    def __post_init__(self) -> None:
        if not all(w >= 1 for w in self.widths):
            raise ValueError(f"every depth needs at least one branch, found {self.widths}")

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """The full tree for each request."""
        return self.grow_merged((draft,), context)

    def grow_merged(self, drafters: Sequence[Predictor], context: Context) -> TokenTree:
        """The full tree for each request from several drafters, which take turns at the children of every node: its own
        drafter first.
        """
        builder, turns = TreeBuilder(context, self.distinct), [0]
        for width in self.widths:
            if not builder.grows:
                break
            distributions = [builder.expand(d) for d in drafters]
            expand_level(builder, distributions, [range(width)] * len(turns), self.draw, turns=turns)
            turns = [turn + i for turn in turns for i in range(width)]
        return builder.build()


@dataclass(frozen=True)
class MergedTree(Shape[DrafterUnion]):
    """The trees of several drafters, merged: every node has children of all of them, the first one its own drafter's.

    Siblings are sampled without replacement from the drafters' distributions in turn, so no token is verified twice and
    each has a distribution of its own, as `Rejection` needs. With one drafter it is `tree`.
    """

    label = "tree with fixed branching"

    tree: BranchingTree

    drafter_type = DrafterUnion

    def grow(self, draft: DrafterUnion, context: Context) -> TokenTree:
        """The full tree for each request."""
        return self.tree.grow_merged(draft.drafters, context)
