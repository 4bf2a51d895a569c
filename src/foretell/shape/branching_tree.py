"""A tree with a fixed number of children per depth: the expansion of SpecInfer."""

from itertools import product

from foretell.shape.fixed_tree import FixedTree


class BranchingTree(FixedTree):
    """Every node at depth `i` gets `widths[i]` children (SpecInfer, arXiv 2305.09781).

    Raises:
        ValueError: a width below 1.
    """

    label = "tree with fixed branching"

    def __init__(self, widths: tuple[int, ...], distinct: bool = True, draw: bool = True) -> None:
        if not all(w >= 1 for w in widths):
            raise ValueError(f"every depth needs at least one branch, found {widths}")
        levels = (product(*map(range, widths[:depth])) for depth in range(1, len(widths) + 1))
        super().__init__(tuple(path for level in levels for path in level), draw, distinct)
