"""Optimal transport between several independent drafts of one token and the target's law: SpecTr's k-sequential
selection.
"""

import torch
from jaxtyping import Float

from foretell.accept.base import Acceptor, AcceptResult
from foretell.accept.rejection import RESIDUAL, TRIAL
from foretell.core.sampling import sample_from
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions

_BISECTION_STEPS = 48
"""Bisection steps: the division factor is found to 2^-48 of its range."""


class KSequentialSelection(Acceptor):
    """K-SEQ over independent draws: each is accepted with probability min(1, p/(ρ q)), ρ the least valid factor
    (SpecTr, arXiv 2310.15141).

    Shape it with `BranchingTree((k, 1, 1, …), distinct=False)`: k independent chains. Chains that agree so far stand
    for one prefix: their next tokens are judged together, as a multiset with its own ρ, and those that hold the
    accepted token survive. Accepts at least (1 - 1/e) times as often as the best possible rule. Picked children are
    sought when the target's own token has been drawn, as `Rejection` does.

    Raises:
        ValueError: siblings were drawn without replacement; the rule holds for independent draws only.
    """

    label = "optimal transport (K-SEQ)"

    lossless = True
    same_seed = False

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Walk the tree of text `row` from its root, along all chains that agree with what was accepted."""
        children, chains = tree.children(row), [int(tree.prefix_length[row]) - 1]
        while True:
            drafts = [c for node in chains for c in children.get(node, ())]
            token = self._token(tree, row, chains[0], drafts, distributions)
            surviving = [c for c in drafts if tree.token[row, c] == token]
            if not surviving:
                return AcceptResult(tuple(tree.ancestors(row, chains[0])[int(tree.prefix_length[row]) :]), token)
            chains = surviving

    def _token(
        self, tree: TokenTree, row: int, node: int, drafts: list[int], distributions: ProcessedDistributions
    ) -> int:
        """The token after `node`, given the drafts of it that all chains through the same prefix made."""
        drawn = [c for c in drafts if tree.q_index[row, c] >= 0]
        if not drawn:
            return distributions.sample(row, node)
        if tree.distinct[row] and len(drawn) > 1:
            raise ValueError(
                "SpecTr judges independent draws, and these were made without replacement: use Branch(..., "
                "distinct=False)"
            )
        assert tree.q is not None
        p = distributions.probabilities(row, node)
        q = tree.q[row, tree.q_index[row, drawn[0]]].to(p)
        rho = division_factor(p, q, len(drawn))
        for trial, child in enumerate(drawn):
            token = int(tree.token[row, child])
            if distributions.uniform(row, node, TRIAL + trial) * rho * float(q[token]) < float(p[token]):
                return token
        return sample_from(residual_after_rejections(p, q, len(drawn), rho), distributions.uniform(row, node, RESIDUAL))


def division_factor(p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"], draws: int) -> float:
    """The least ρ in 1..`draws` for which K-SEQ keeps the law of p: where 1 - (1 - β)^k = ρ β, β = sum min(q, p/ρ)."""
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
    """What is left of p for the case that every draw was refused, not normalised; p itself where rounding leaves
    nothing.
    """
    taken = torch.minimum(q, p / rho)
    beta = float(taken.sum())
    if beta <= 0:
        return p
    left = (p - taken * ((1 - (1 - beta) ** draws) / beta)).clamp_min(0)
    return left if left.sum() > 0 else p
