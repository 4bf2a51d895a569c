"""Block verification: a joint test of a chain that accepts at least as many tokens as testing them one by one."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float

from foretell.accept.base import Acceptor, AcceptResult
from foretell.accept.match import Match
from foretell.accept.rejection import was_sampled
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
        chain = chain_from(root, children, row, distributions, _BRANCHES)
        if tree.q is None or not was_sampled(tree, row, chain[1:]):
            return Match().accept(tree, row, distributions)
        q = [tree.q[row, tree.q_index[row, node]] for node in chain[1:]]
        accepted, token = accept_block(tree, row, chain, q, distributions)
        return AcceptResult(tuple(chain[1 : accepted + 1]), token)


_BRANCHES = "block verification needs a chain, and this tree branches: use Chain as shape, or Rejection as acceptor"


def chain_from(
    node: int, children: Mapping[int, list[int]], row: int, distributions: ProcessedDistributions, branches: str
) -> list[int]:
    """The nodes from `node` down, as far as the answer goes on.

    Raises:
        ValueError: one has several children; `branches` is the message.
    """
    chain = [node]
    while chain[-1] in children and distributions.goes_on(row, chain[-1]):
        below = children[chain[-1]]
        if len(below) > 1:
            raise ValueError(branches)
        chain.append(below[0])
    return chain


def accept_block(
    tree: TokenTree,
    row: int,
    chain: Sequence[int],
    q: Sequence[Float[torch.Tensor, " v"]],
    distributions: ProcessedDistributions,
    p: Sequence[Float[torch.Tensor, " v"]] = (),
    number: int = 0,
) -> tuple[int, int]:
    """How many drafts of a chain of nodes are accepted, and the token after them. `chain[0]` is decided; `chain[i + 1]`
    was drawn from `q[i]`. `p`: the target's distributions after the first nodes, as far as they are known. `number`: of
    the random numbers at each node, which.
    """
    weights, p, length = [1.0], list(p), len(q)
    for i, node in enumerate(chain[1:]):
        if i == len(p):
            p.append(distributions.probabilities(row, chain[i]))
        token = int(tree.token[row, node])
        weights.append(min(1.0, weights[-1] * float(p[i][token]) / float(q[i][token])))
    for accepted in range(length, 0, -1):
        weight = pass_probability = weights[accepted]
        if accepted < length and weight < 1:
            mass = float((weight * p[accepted] - q[accepted]).clamp_min(0).sum())
            pass_probability = mass / (mass + 1 - weight)
        if distributions.uniform(row, chain[accepted - 1], Stream.ACCEPT, number) < pass_probability:
            break
    else:
        accepted = 0
    end = chain[accepted]
    if accepted == length and length and not distributions.goes_on(row, end):
        return accepted - 1, int(tree.token[row, end])
    if accepted == length:
        return accepted, distributions.sample(row, end)
    residual = (weights[accepted] * p[accepted] - q[accepted]).clamp_min(0)
    uniform = distributions.uniform(row, end, Stream.RESIDUAL, number)
    return accepted, sample_from(residual if residual.sum() > 0 else p[accepted], uniform)
