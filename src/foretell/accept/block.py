"""Block verification: a chain judged as a whole, accepting at least as much as token by token."""

from foretell.accept.base import Acceptor, AcceptResult
from foretell.accept.match import Match
from foretell.accept.rejection import RESIDUAL, TRIAL
from foretell.core.sampling import sample_from
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions


class BlockVerification(Acceptor):
    """Accepts the longest prefix of a drawn chain that its joint test allows (Sun et al., arXiv 2403.10444).

    With running weight w_i = min(1, w_{i-1} p_i(x_i)/q_i(x_i)) the prefix of length i < γ passes with probability r/(r
    + 1 - w_i), r = sum max(0, w_i p_{i+1} - q_{i+1}), the whole chain with w_γ. The token after the longest prefix that
    passes is drawn from the normalised max(0, w p - q) there, or from p after the whole chain. Chains of picked tokens
    go to `Match`.
    """

    label = "block verification"

    lossless = True
    same_seed = False

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Judge the chain of text `row`."""
        children, root = tree.children(row), int(tree.prefix_length[row]) - 1
        chain = [root]
        while chain[-1] in children:
            below = children[chain[-1]]
            if len(below) > 1:
                raise ValueError(
                    "block verification judges chains: the tree branches; use Chain as shape, or Rejection as acceptor"
                )
            chain.append(below[0])
        drafts = chain[1:]
        if tree.q is None or any(tree.q_index[row, d] < 0 for d in drafts):
            return Match().accept(tree, row, distributions)
        weight, kept, weights = 1.0, 0, [1.0]
        for i, node in enumerate(drafts):
            token = int(tree.token[row, node])
            p, q = distributions.probabilities(row, chain[i]), tree.q[row, tree.q_index[row, node]]
            weight = min(1.0, weight * float(p[token]) / float(q[token]))
            weights.append(weight)
            passing = weight
            if i + 1 < len(drafts):
                beyond = tree.q[row, tree.q_index[row, drafts[i + 1]]]
                mass = float((weight * distributions.probabilities(row, node) - beyond).clamp_min(0).sum())
                passing = mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0
            if distributions.uniform(row, chain[i], TRIAL) < passing:
                kept = i + 1
        if kept == len(drafts):
            return AcceptResult(tuple(drafts), distributions.sample(row, chain[-1]))
        p, q = distributions.probabilities(row, chain[kept]), tree.q[row, tree.q_index[row, drafts[kept]]]
        left = (weights[kept] * p - q).clamp_min(0)
        return AcceptResult(
            tuple(drafts[:kept]),
            sample_from(left if left.sum() > 0 else p, distributions.uniform(row, chain[kept], RESIDUAL)),
        )
