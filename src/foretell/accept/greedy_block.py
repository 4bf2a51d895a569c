"""Greedy block verification: the best of several independent chains, under block verification."""

from collections.abc import Sequence

import torch
from jaxtyping import Float

from foretell.accept.base import Acceptor, AcceptResult
from foretell.accept.block import accept_block, chain_from
from foretell.accept.match import Match
from foretell.accept.rejection import was_sampled
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions


class GreedyBlockVerification(Acceptor):
    """Chooses one of k independent chains, and verifies it as a block from the law of the chosen one (Thomas and Pal,
    arXiv 2602.16961).

    The chains are compared token by token; at each the largest p/q wins. That order depends on the text before alone,
    so the chosen chain has the law of the best of k draws, which is known at every token (`best_of_draws`). Where the
    token after the accepted ones is one that other chains drafted, these are verified in the same way from there on:
    nothing has looked at what follows in them. One chain is `BlockVerification`.

    Use it with `BranchingTree((k, 1, 1, …), distinct=False)`. Chains may have different lengths, if those do not depend
    on what was drawn: they compete as far as all go, and the chosen one is verified to its end. A draft that ends the
    answer ends its chain. Trees with tokens that were not sampled go to `Match`.

    Raises:
        ValueError: the tree branches below its root, or its chains were drawn without replacement.
    """

    label = "greedy block verification"

    lossless = True
    same_seed = False
    takes_added = False

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Accept a path in the tree of batch row `row`."""
        children, node = tree.children(row), tree.root(row)
        if not was_sampled(tree, row, (c for below in children.values() for c in below)):
            return Match().accept(tree, row, distributions)
        chains = [chain_from(child, children, row, distributions, _BRANCHES) for child in children.get(node, ())]
        rounds = 0
        if tree.distinct[row] and len(chains) > 1:
            raise ValueError(
                "greedy block verification needs independent samples, and these were drawn without replacement: use "
                "BranchingTree(..., distinct=False), or TraversalVerification as acceptor"
            )
        while True:
            chosen, q, p = _choose(tree, row, node, chains, distributions)
            accepted, token = accept_block(tree, row, [node, *chosen], q, distributions, p, rounds)
            node, rest = [node, *chosen][accepted], chosen[accepted:]
            if not rest or tree.token[row, rest[0]] != token:
                followed = [int(tree.token[row, n]) for n in chosen[:accepted]] + [token]
                chains = [c for c in chains if tree.token[row, c[: accepted + 1]].tolist() == followed]
            else:  # It ends the answer.
                chains = []
            if not chains or not distributions.goes_on(row, chains[0][accepted]):
                return AcceptResult(tuple(tree.ancestors(row, node)[int(tree.prefix_length[row]) :]), token)
            node, chains, rounds = chains[0][accepted], [c[accepted + 1 :] for c in chains], rounds + 1


_BRANCHES = (
    "greedy block verification needs independent chains, and this tree branches below its root: use "
    "BranchingTree((k, 1, 1, …), distinct=False) as shape, or TraversalVerification as acceptor"
)


def _choose(
    tree: TokenTree, row: int, node: int, chains: Sequence[list[int]], distributions: ProcessedDistributions
) -> tuple[list[int], list[Float[torch.Tensor, " v"]], list[Float[torch.Tensor, " v"]]]:
    """The best of some chains below a node, the law of each of its tokens given those before, and the target's
    distributions of those for which chains competed.
    """
    assert tree.q is not None
    open_ended = [len(c) for c in chains if not c or distributions.goes_on(row, c[-1])]
    competing = min(open_ended, default=max(map(len, chains))) if len(chains) > 1 else 0
    held, below, span = list(chains), 0.0, 1.0
    law, target = list[Float[torch.Tensor, " v"]](), list[Float[torch.Tensor, " v"]]()
    for depth in range(max(map(len, chains), default=0)):
        going = [c for c in held if len(c) > depth]
        if not going:
            break
        held = going if depth < competing else [max(going, key=len)]
        q = tree.q[row, tree.q_index[row, held[0][depth]]]
        if depth >= competing:
            law.append(q)
            continue
        p = distributions.probabilities(row, held[0][depth - 1] if depth else node)
        target.append(p)
        worst_first = q.nonzero().flatten()
        worst_first = worst_first[(p[worst_first] / q[worst_first].to(p)).argsort(stable=True)]
        gain = span * q[worst_first].to(p)
        low = below + gain.cumsum(0) - gain
        law.append(torch.zeros_like(p).index_copy_(0, worst_first, best_of_draws(low, gain, len(chains))))
        places = {int(tree.token[row, c[depth]]): 0 for c in held}
        places = {token: int((worst_first == token).nonzero()) for token in places}
        best = max(places, key=lambda token: places[token])
        held = [c for c in held if tree.token[row, c[depth]] == best]
        high = float(low[places[best]] + gain[places[best]])
        below, span = float(low[places[best]]) / high, float(gain[places[best]]) / high
    return held[0][: len(law)] if law else [], law, target


def best_of_draws(
    below: Float[torch.Tensor, " v"], gain: Float[torch.Tensor, " v"], draws: int
) -> Float[torch.Tensor, " v"]:
    """The law of the best of some draws of a cumulative distribution that is `below` before each token and grows by
    `gain` at it, normalised over these tokens.
    """
    above, total, power = below + gain, torch.ones_like(gain), torch.ones_like(gain)
    for _ in range(draws - 1):  # above^n - below^n = gain * (above^(n-1) + above^(n-2) below + ...)
        power = power * below
        total = total * above + power
    law = gain * total
    return law / law.sum()
