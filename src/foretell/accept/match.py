"""Let the target choose, and follow the tree while it holds what was chosen."""

from foretell.accept.base import Acceptor, AcceptResult
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions


class Match(Acceptor):
    """The target's own token is drawn once per node and sought among its children.

    Greedy verification at temperature 0 (Stern et al., arXiv 1811.03115); above it every decided token is a draw from
    the target, so the law is exact for any drafts, and equal seeds give the very text of plain decoding.
    """

    label = "match"

    lossless = True
    same_seed = True

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Walk the tree of text `row` from its root."""
        children, node, path = tree.children(row), int(tree.prefix_length[row]) - 1, list[int]()
        while True:
            token = distributions.sample(row, node)
            step = next((c for c in children.get(node, ()) if tree.token[row, c] == token), None)
            if step is None:
                return AcceptResult(tuple(path), token)
            path.append(step)
            node = step
