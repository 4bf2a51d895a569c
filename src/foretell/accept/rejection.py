"""The rejection test of speculative sampling, for chains and for several drafts of one token."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float

from foretell.accept.base import Acceptor, AcceptResult
from foretell.core.sampling import Stream, sample_from
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions, Reads


class Rejection(Acceptor):
    """Each sampled child is accepted with probability min(1, p/q); after a rejection p becomes the normalised residual
    max(0, p - q).

    With one draft this is speculative sampling (arXiv 2211.17192, 2302.01318), with several SpecInfer's multi-step rule
    (arXiv 2305.09781). Where siblings were sampled without replacement, a rejected token is also removed from the q of
    the later ones, whichever drafter's that is, which is then renormalised. Children that were not sampled come last:
    one is accepted if it holds the token sampled from the final residual.
    """

    label = "rejection"

    lossless = True
    same_seed = False
    reads = Reads.TESTS

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Accept a path in the tree of batch row `row`."""
        children, node, path = tree.children(row), tree.root(row), list[int]()
        while True:
            child, token = self._accept_child(tree, row, node, children.get(node, []), distributions)
            if child is None or not distributions.goes_on(row, child):
                return AcceptResult(tuple(path), token)
            path.append(child)
            node = child

    def _accept_child(
        self, tree: TokenTree, row: int, node: int, children: list[int], distributions: ProcessedDistributions
    ) -> tuple[int | None, int]:
        """The accepted child of a node, if any, and the token after the node."""
        sampled = [c for c in children if tree.q_index[row, c] >= 0]
        others = [c for c in children if tree.q_index[row, c] < 0]
        if not sampled:
            token = distributions.sample(row, node)
        elif (tested := distributions.tested(row, node)) is not None:
            number, token = tested
            if number >= 0:
                return sampled[number], token
        else:
            p, draft_distributions = distributions.probabilities(row, node), DraftDistributions(tree, row)
            for trial, child in enumerate(sampled):
                token, q = int(tree.token[row, child]), draft_distributions.distribution(child, p)
                if distributions.uniform(row, node, Stream.ACCEPT, trial) * float(q[token]) < float(p[token]):
                    return child, token
                p = residual(p, q)
                draft_distributions.reject(child)
            token = sample_from(p, distributions.uniform(row, node, Stream.RESIDUAL))
        return next((c for c in others if tree.token[row, c] == token), None), token


class DraftDistributions:
    """The distributions that the children of one node were sampled from; without replacement, less the rejected
    tokens.
    """

    def __init__(self, tree: TokenTree, row: int) -> None:
        self._tree, self._row = tree, row
        self._rejected = list[int]()

    def distribution(self, child: int, like: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
        """The distribution of this child in the precision of `like`; one-hot for a child that was not sampled."""
        index = int(self._tree.q_index[self._row, child])
        if index < 0:
            one_hot = torch.zeros_like(like)
            one_hot[int(self._tree.token[self._row, child])] = 1
            return one_hot
        assert self._tree.q is not None
        return without(self._tree.q[self._row, index].to(like), self._rejected)

    def reject(self, child: int) -> None:
        """Remove a rejected child from its siblings' distributions if they were sampled without replacement."""
        if self._tree.q_index[self._row, child] >= 0 and self._tree.distinct[self._row]:
            self._rejected.append(int(self._tree.token[self._row, child]))


def without(q: Float[torch.Tensor, " v"], tokens: Sequence[int]) -> Float[torch.Tensor, " v"]:
    """Normalised `q` less these tokens; zero where nothing is left."""
    if not tokens:
        return q
    left = q.index_fill(0, torch.tensor(tokens, device=q.device), 0)
    total = left.sum()
    return left / total if total > 0 else left


def residual(p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
    """Normalised max(0, p - q); p itself where that is zero everywhere."""
    left = (p - q).clamp_min(0)
    total = left.sum()
    return left / total if total > 0 else p


def was_sampled(tree: TokenTree, row: int, nodes: Iterable[int]) -> bool:
    """Whether all these nodes were sampled from distributions that the tree has."""
    return tree.q is not None and all(tree.q_index[row, node] >= 0 for node in nodes)
