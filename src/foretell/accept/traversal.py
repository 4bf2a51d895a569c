"""Traversal verification: a sampled tree is tested from its leaves to its root."""

from collections.abc import Sequence
from itertools import count

from foretell.accept.base import Acceptor, AcceptResult
from foretell.accept.match import Match
from foretell.accept.rejection import was_sampled, without
from foretell.core.sampling import Stream, sample_from
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions


class TraversalVerification(Acceptor):
    """Accepts the first path, leaves first, that passes the joint test of its tokens (Weng et al., arXiv 2505.12398).

    The weight of a node is that of block verification, w = min(1, w_v p_v(x)/q_v(x)) below a node v. A leaf is accepted
    with all nodes above it with probability w. A refused one is left out of the tree: p_v becomes the normalised
    max(0, w_v p_v - q_v) of mass r, w_v becomes r/(r + 1 - w_v), and its token leaves q_v. A node without children
    left is a leaf. The token after the accepted leaf is sampled from its p. On a chain this is `BlockVerification`, on
    siblings of one level `Rejection`.

    Siblings are drawn without replacement, or are independent samples of one distribution; equal ones are one node with
    the children of all, in the place of the first. A draft that ends the answer is a leaf. Trees with tokens that were
    not sampled go to `Match`.

    Raises:
        ValueError: siblings are independent samples of different distributions.
    """

    label = "traversal verification"

    lossless = True
    same_seed = False
    takes_added = False

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Accept a path in the tree of batch row `row`."""
        children = tree.children(row)
        if not was_sampled(tree, row, (c for below in children.values() for c in below)):
            return Match().accept(tree, row, distributions)
        result = _Traversal(tree, row, distributions, children).visit([tree.root(row)], 1.0)
        assert result is not None  # The root's weight stays 1.
        return result


class _Traversal:
    """One walk through a tree."""

    def __init__(
        self, tree: TokenTree, row: int, distributions: ProcessedDistributions, children: dict[int, list[int]]
    ) -> None:
        self._tree, self._row, self._distributions, self._children = tree, row, distributions, children
        self._tests = count()

    def visit(self, nodes: Sequence[int], weight: float) -> AcceptResult | None:
        """Accept a path through a node, which equal samples may hold several times; None: it is refused."""
        tree, row, distributions, node = self._tree, self._row, self._distributions, nodes[0]
        if weight <= 0:
            return None
        is_end, p, refused = not distributions.goes_on(row, node), None, list[int]()
        for token, twins in ({} if is_end else self._below(nodes)).items():
            assert tree.q is not None
            p = distributions.probabilities(row, node) if p is None else p
            q = without(tree.q[row, tree.q_index[row, twins[0]]].to(p), refused)
            result = self.visit(twins, min(1.0, weight * float(p[token]) / float(q[token])))
            if result is not None:
                return result
            left = (weight * p - q).clamp_min(0)
            mass = float(left.sum())
            if mass > 0:
                p, weight = left / mass, mass / (mass + (1 - weight))
            elif weight < 1:
                return None
            refused.append(token)
        # The number of tests so far makes the random numbers of siblings independent.
        above = int(tree.parent[row, node])
        if weight < 1 and not (distributions.uniform(row, above, Stream.ACCEPT, next(self._tests)) < weight):
            return None
        path = tuple(tree.ancestors(row, node)[int(tree.prefix_length[row]) :])
        if is_end:
            return AcceptResult(path[:-1], int(tree.token[row, node]))
        if p is None:
            return AcceptResult(path, distributions.sample(row, node))
        return AcceptResult(path, sample_from(p, distributions.uniform(row, node, Stream.RESIDUAL)))

    def _below(self, nodes: Sequence[int]) -> dict[int, list[int]]:
        """The children of equal nodes by their tokens, in the order in which these were drawn first."""
        below = dict[int, list[int]]()
        for node in nodes:
            children = self._children.get(node, [])
            sources = {int(self._tree.q_index[self._row, c]) for c in children}
            if len(sources) > 1 and not self._tree.distinct[self._row]:
                raise ValueError(
                    "traversal verification needs independent siblings to be samples of one distribution, and these "
                    "were sampled from several: use Rejection as acceptor"
                )
            for child in children:
                below.setdefault(int(self._tree.token[self._row, child]), []).append(child)
        return below
