"""Block verification: a joint test of a chain that accepts at least as many tokens as testing them one by one."""

from foretell.accept.base import Acceptor, AcceptResult
from foretell.accept.match import Match
from foretell.core.sampling import Stream, sample_from
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions


class BlockVerification(Acceptor):
    """Accepts the longest prefix of a sampled chain that passes the joint test (Sun et al., arXiv 2403.10444).

    With w_i = min(1, w_{i-1} p_i(x_i)/q_i(x_i)), the prefix of length i < γ passes with probability r/(r + 1 - w_i),
    where r = sum max(0, w_i p_{i+1} - q_{i+1}); the full chain passes with w_γ. The token after the longest prefix that
    passes is sampled from the normalised max(0, w p - q) there, or from p after the full chain. A draft that ends the
    answer ends the chain. Chains with tokens that were not sampled go to `Match`.

    Raises:
        ValueError: the tree is not a chain.
    """

    label = "block verification"

    lossless = True
    same_seed = False
    takes_added = False

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Accept a prefix of the chain of batch row `row`."""
        children, root = tree.children(row), tree.root(row)
        chain = [root]
        while chain[-1] in children and distributions.goes_on(row, chain[-1]):
            below = children[chain[-1]]
            if len(below) > 1:
                raise ValueError(
                    "block verification needs a chain, and this tree branches: use Chain as shape, or Rejection as "
                    "acceptor"
                )
            chain.append(below[0])
        drafts = chain[1:]
        if tree.q is None or any(tree.q_index[row, d] < 0 for d in drafts):
            return Match().accept(tree, row, distributions)
        weight, accepted, weights = 1.0, 0, [1.0]
        for i, node in enumerate(drafts):
            token = int(tree.token[row, node])
            p, q = distributions.probabilities(row, chain[i]), tree.q[row, tree.q_index[row, node]]
            weight = min(1.0, weight * float(p[token]) / float(q[token]))
            weights.append(weight)
            pass_probability = weight
            if i + 1 < len(drafts):
                next_q = tree.q[row, tree.q_index[row, drafts[i + 1]]]
                mass = float((weight * distributions.probabilities(row, node) - next_q).clamp_min(0).sum())
                pass_probability = mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0
            if distributions.uniform(row, chain[i], Stream.ACCEPT) < pass_probability:
                accepted = i + 1
        if accepted and accepted == len(drafts) and not distributions.goes_on(row, chain[-1]):
            return AcceptResult(tuple(drafts[:-1]), int(tree.token[row, chain[-1]]))
        if accepted == len(drafts):
            return AcceptResult(tuple(drafts), distributions.sample(row, chain[-1]))
        end = chain[accepted]
        p, q = distributions.probabilities(row, end), tree.q[row, tree.q_index[row, drafts[accepted]]]
        residual = (weights[accepted] * p - q).clamp_min(0)
        uniform = distributions.uniform(row, end, Stream.RESIDUAL)
        return AcceptResult(tuple(drafts[:accepted]), sample_from(residual if residual.sum() > 0 else p, uniform))
