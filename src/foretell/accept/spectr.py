"""SpecTr's k-sequential selection: optimal transport between several independent drafts of a token and the target."""

import torch
from jaxtyping import Float

from foretell.accept.base import Acceptor, AcceptResult
from foretell.core.sampling import Stream, sample_from
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions

_BISECTION_STEPS = 48
"""The division factor is found to 2^-48 of its range."""


class KSequentialSelection(Acceptor):
    """K-SEQ over independent samples: each is accepted with probability min(1, p/(ρ q)), ρ the least valid division
    factor (SpecTr, arXiv 2310.15141).

    Use it with `BranchingTree((k, 1, 1, …), distinct=False)`: k independent chains. Chains with the same tokens so far
    share one prefix: their next tokens are tested together, with a ρ for their number, and the chains that hold the
    accepted token remain. The rule accepts at least (1 - 1/e) times as often as the best possible one. Children that
    were not sampled are accepted if they hold the target's own token, as in `Rejection`.

    Raises:
        ValueError: siblings were sampled without replacement; the rule holds for independent samples only.
    """

    label = "optimal transport (K-SEQ)"

    lossless = True
    same_seed = False

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Accept a path in the tree of batch row `row`, along all chains that hold the accepted tokens."""
        children, chains = tree.children(row), [tree.root(row)]
        while True:
            drafts = [c for node in chains for c in children.get(node, ())]
            token = self._token(tree, row, chains[0], drafts, distributions)
            remaining = [c for c in drafts if tree.token[row, c] == token]
            if not remaining or not distributions.goes_on(row, remaining[0]):
                return AcceptResult(tuple(tree.ancestors(row, chains[0])[int(tree.prefix_length[row]) :]), token)
            chains = remaining

    def _token(
        self, tree: TokenTree, row: int, node: int, drafts: list[int], distributions: ProcessedDistributions
    ) -> int:
        """The token after `node`, given its drafts from all chains with the same prefix."""
        sampled = [c for c in drafts if tree.q_index[row, c] >= 0]
        if not sampled:
            return distributions.sample(row, node)
        if tree.distinct[row] and len(sampled) > 1:
            raise ValueError(
                "SpecTr needs independent samples, and these were drawn without replacement: use "
                "BranchingTree(..., distinct=False)"
            )
        assert tree.q is not None
        p = distributions.probabilities(row, node)
        q = tree.q[row, tree.q_index[row, sampled[0]]].to(p)
        rho = division_factor(p, q, len(sampled))
        for trial, child in enumerate(sampled):
            token = int(tree.token[row, child])
            if distributions.uniform(row, node, Stream.ACCEPT, trial) * rho * float(q[token]) < float(p[token]):
                return token
        left = residual_after_rejections(p, q, len(sampled), rho)
        return sample_from(left, distributions.uniform(row, node, Stream.RESIDUAL))


def division_factor(p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"], draws: int) -> float:
    """The least ρ in 1..`draws` for which K-SEQ is exact: 1 - (1 - β)^k = ρ β with β = sum min(q, p/ρ)."""
    shared = q > 0
    p, q = p[shared], q[shared]
    low, high = 1.0, float(draws)
    for _ in range(_BISECTION_STEPS if draws > 1 else 0):
        middle = (low + high) / 2
        beta = float(torch.minimum(q, p / middle).sum())
        if 1 - (1 - beta) ** draws > middle * beta:
            low = middle
        else:
            high = middle
    return high


def residual_after_rejections(
    p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"], draws: int, rho: float
) -> Float[torch.Tensor, " v"]:
    """The distribution of the token when all `draws` samples were rejected, not normalised; p itself where rounding
    leaves nothing.
    """
    taken = torch.minimum(q, p / rho)
    beta = float(taken.sum())
    if beta <= 0:
        return p
    left = (p - taken * ((1 - (1 - beta) ** draws) / beta)).clamp_min(0)
    return left if left.sum() > 0 else p
