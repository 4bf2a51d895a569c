"""Accept what left early, or left out layers, without verification."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float

from foretell.accept.base import Acceptor, AcceptResult
from foretell.accept.fidelity import TokenFidelity, kl_divergence, total_variation
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions


@dataclass(frozen=True)
class AcceptExits(Acceptor):
    """Every drafted token is accepted, and the target's own token follows (FREE, arXiv 2310.05424).

    Which tokens are drafted is the drafter's decision: those that an exit is sure of. The tree must be a chain.

    `exact_keys`: the cache is that of a full pass over the same text, so deviations from the target can be reported.
    With copied keys nothing is reported: even a token of all layers is not the target's own then.
    """

    exact_keys: bool = True

    label = "all that left early"

    lossless = False
    same_seed = False
    takes_added = False

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Accept the chain of batch row `row`."""
        children, node, path = tree.children(row), tree.root(row), list[int]()
        fidelity = list[TokenFidelity]()
        while node in children:
            child = children[node][0]
            if self.exact_keys:
                fidelity.append(_deviation(tree, row, node, child, distributions))
            if not distributions.goes_on(row, child):
                return AcceptResult(tuple(path), int(tree.token[row, child]), tuple(fidelity))
            path.append(child)
            node = child
        if self.exact_keys:
            fidelity.append(TokenFidelity(0.0, 0.0, False))
        return AcceptResult(tuple(path), distributions.sample(row, node), tuple(fidelity))


@dataclass(frozen=True)
class AcceptReduced(Acceptor):
    """The token of a pass that left out layers is the answer's; the tree must be a root (SkipDecode, arXiv 2307.02628).

    `reference`: the whole model's logits after the last token of a cache row, or None if they are not known in this
    step; then deviations are not reported. None: they never are.
    """

    reference: Callable[[int], Float[torch.Tensor, " v"] | None] | None = None

    label = "all"

    lossless = False
    same_seed = False
    takes_added = False

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Sample the next token of batch row `row`."""
        node = tree.root(row)
        token = distributions.sample(row, node)
        whole = None if self.reference is None else distributions.with_logits(row, node, self.reference)
        if whole is None:
            return AcceptResult((), token)
        own = whole.sample(row, node)
        if distributions.sampling_params(row).temperature == 0:
            divergence = whole.log_ratio(row, node, own, token) if token != own else 0.0
            return AcceptResult((), token, (TokenFidelity(float(token != own), divergence, token != own),))
        p, q = whole.probabilities(row, node), distributions.probabilities(row, node)
        return AcceptResult((), token, (TokenFidelity(total_variation(q, p), kl_divergence(q, p), token != own),))


def _deviation(
    tree: TokenTree, row: int, node: int, child: int, distributions: ProcessedDistributions
) -> TokenFidelity:
    """The deviation of a drafted token from the target's distribution after the node before it."""
    own, token = distributions.sample(row, node), int(tree.token[row, child])
    q_index = int(tree.q_index[row, child])
    if distributions.sampling_params(row).temperature == 0 or q_index < 0 or tree.q is None:
        changed = token != own
        return TokenFidelity(
            float(changed), distributions.log_ratio(row, node, own, token) if changed else 0.0, changed
        )
    p, q = distributions.probabilities(row, node), tree.q[row, q_index]
    return TokenFidelity(total_variation(q, p), kl_divergence(q, p), token != own)
