"""The rejection test of speculative sampling, for chains, several drafts of one token, and draws without replacement."""

import torch
from jaxtyping import Float

from foretell.accept.base import Accepted, Acceptor
from foretell.laws import Laws
from foretell.sampling import pick
from foretell.tree import TokenTree

TRIAL = 1
"""Random stream of the first trial at a node; the residual draw has a stream of its own."""
RESIDUAL = 1 << 11


class Rejection(Acceptor):
    """Each drafted child is accepted with probability min(1, p/q); after a refusal p becomes the normalised residual max(0, p - q).

    One draft is speculative sampling (arXiv 2211.17192, 2302.01318), several are SpecInfer's multi-step rule (arXiv 2305.09781); where siblings
    were drawn without replacement the refused token also leaves q, which is then renormalised. A picked child is a point mass: it is accepted when
    the target's own draw names it. Among children of one node, picked ones come last in the walk through a draw from what p has become.
    """

    lossless = True
    same_seed = False

    def accept(self, tree: TokenTree, row: int, laws: Laws) -> Accepted:
        """Walk the tree of text `row` from its root."""
        children, node, path = tree.children(row), int(tree.trunk[row]) - 1, list[int]()
        while True:
            here = children.get(node, [])
            step, token = self._step(tree, row, node, here, laws)
            if step is None:
                return Accepted(tuple(path), token)
            path.append(step)
            node = step

    def _step(self, tree: TokenTree, row: int, node: int, children: list[int], laws: Laws) -> tuple[int | None, int]:
        drawn = [c for c in children if tree.drawn_from[row, c] >= 0]
        picked = [c for c in children if tree.drawn_from[row, c] < 0]
        if not drawn:
            token = laws.draw(row, node)
        else:
            p = laws.probabilities(row, node)
            used: dict[int, Float[torch.Tensor, " v"]] = {}
            for trial, child in enumerate(drawn):
                origin, token = int(tree.drawn_from[row, child]), int(tree.token[row, child])
                q = used.get(origin)
                if q is None:
                    assert tree.q is not None
                    q = tree.q[row, origin].to(p)
                if laws.uniform(row, node, TRIAL + trial) * float(q[token]) < float(p[token]):
                    return child, token
                p = residual(p, q)
                if tree.distinct:
                    q = q.clone()
                    q[token] = 0
                    total = q.sum()
                    used[origin] = q / total if total > 0 else q
            token = pick(p, laws.uniform(row, node, RESIDUAL))
        return next((c for c in picked if tree.token[row, c] == token), None), token


def residual(p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
    """Normalised max(0, p - q); p itself where the two agree up to rounding."""
    left = (p - q).clamp_min(0)
    total = left.sum()
    return left / total if total > 0 else p
