"""A tree with a fixed number of children per depth: the expansion configurations of SpecInfer."""

from dataclasses import dataclass

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor
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
        builder = TreeBuilder(context, self.distinct)
        for width in self.widths:
            if not builder.grows:
                break
            expand_level(builder, builder.expand(draft), [range(width)] * builder.frontier.shape[1], self.draw)
        return builder.build()
