"""The rejection test of speculative sampling, for chains, several drafts of one token, and draws without
replacement.
"""

import torch
from jaxtyping import Float

from foretell.accept.base import Acceptor, AcceptResult
from foretell.core.sampling import sample_from
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions

TRIAL = 1
"""Random stream of the first trial at a node; the residual draw has a stream of its own."""
RESIDUAL = 1 << 11


class Rejection(Acceptor):
    """Each drafted child is accepted with probability min(1, p/q); after a refusal p becomes the normalised residual
    max(0, p - q).

    One draft is speculative sampling (arXiv 2211.17192, 2302.01318), several are SpecInfer's multi-step rule (arXiv
    2305.09781); where siblings were drawn without replacement the refused token also leaves q, which is then
    renormalised. A picked child is a point mass: it is accepted when the target's own draw names it. Among children of
    one node, picked ones come last in the walk through a draw from what p has become.
    """

    label = "rejection"

    lossless = True
    same_seed = False

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Walk the tree of text `row` from its root."""
        children, node, path = tree.children(row), int(tree.prefix_length[row]) - 1, list[int]()
        while True:
            here = children.get(node, [])
            step, token = self._step(tree, row, node, here, distributions)
            if step is None:
                return AcceptResult(tuple(path), token)
            path.append(step)
            node = step

    def _step(
        self, tree: TokenTree, row: int, node: int, children: list[int], distributions: ProcessedDistributions
    ) -> tuple[int | None, int]:
        drawn = [c for c in children if tree.q_index[row, c] >= 0]
        picked = [c for c in children if tree.q_index[row, c] < 0]
        if not drawn:
            token = distributions.sample(row, node)
        else:
            p, draft_distributions = distributions.probabilities(row, node), DraftDistributions(tree, row)
            for trial, child in enumerate(drawn):
                token, q = int(tree.token[row, child]), draft_distributions.distribution(child, p)
                if distributions.uniform(row, node, TRIAL + trial) * float(q[token]) < float(p[token]):
                    return child, token
                p = residual(p, q)
                draft_distributions.reject(child)
            token = sample_from(p, distributions.uniform(row, node, RESIDUAL))
        return next((c for c in picked if tree.token[row, c] == token), None), token


class DraftDistributions:
    """The laws that the children of one node were drawn from, less what was refused where draws were without
    replacement.
    """

    def __init__(self, tree: TokenTree, row: int) -> None:
        self._tree, self._row = tree, row
        self._remaining: dict[int, Float[torch.Tensor, " v"]] = {}

    def distribution(self, child: int, like: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
        """What this child is a draw from, in the precision of `like`; one point for a picked child."""
        index = int(self._tree.q_index[self._row, child])
        if index < 0:
            point = torch.zeros_like(like)
            point[int(self._tree.token[self._row, child])] = 1
            return point
        if index not in self._remaining:
            assert self._tree.q is not None
            self._remaining[index] = self._tree.q[self._row, index].to(like)
        return self._remaining[index]

    def reject(self, child: int) -> None:
        """Take a refused child out of the law of its later siblings."""
        index = int(self._tree.q_index[self._row, child])
        if index >= 0 and self._tree.distinct[self._row]:
            left = self._remaining[index].clone()
            left[int(self._tree.token[self._row, child])] = 0
            total = left.sum()
            self._remaining[index] = left / total if total > 0 else left


def residual(p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
    """Normalised max(0, p - q); p itself where the two agree up to rounding."""
    left = (p - q).clamp_min(0)
    total = left.sum()
    return left / total if total > 0 else p
