"""The lossy family: acceptors that let a draft stand where the target would have said something else, and report what
that costs.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float

from foretell.accept.base import Acceptor, AcceptResult
from foretell.accept.fidelity import TokenFidelity, kl_divergence, total_variation
from foretell.accept.rejection import RESIDUAL, TRIAL, DraftDistributions
from foretell.core.sampling import sample_from
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions


@dataclass(frozen=True)
class LossyAcceptor(Acceptor):
    """One idea, several rules: of the tokens that a drafter offers, a rule says which part of their probability may
    stand.

    A draft x from law q stands with probability accepted(p, q)[x] / q[x]; a picked draft is a draw from one point. A
    rule is its `tolerated` set (a draft in it always stands), or overrides `accepted` and `rest` to be random. The
    longest path of drafts that stand wins, ties by probability; what follows is drawn from what `rest` leaves of p. At
    temperature 0 every rule is its set, and what follows is the target's best token.

    `minimum`: as many tokens are decided by a pass as the tree allows whatever the rule says (the minimum block size of
    Stern et al., arXiv 1811.03115; the authors found that it hurts). 1 changes nothing: the target's own token always
    comes after the drafts.
    """

    minimum_block: int = field(default=1, kw_only=True)

    lossless = False
    same_seed = False
    softmax_at_zero: ClassVar[bool] = True
    """At temperature 0 the rule sees the model's softmax; False: the one-hot law, under which most rules tolerate
    nothing.
    """
    first_only: ClassVar[bool] = False
    """At most one child of a node stands: the first that passes its test."""

    def __post_init__(self) -> None:
        if self.minimum_block < 1:
            raise ValueError(f"every pass decides at least one token, found a minimum block of {self.minimum_block}")

    @abstractmethod
    def acceptable(self, p: Float[torch.Tensor, " v"]) -> Bool[torch.Tensor, " v"]:
        """Tokens good enough where the target's law is p."""

    def accepted_mass(self, p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
        """The part of q that may stand, at most q everywhere."""
        return q * self.acceptable(p)

    def residual(self, p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
        """The law that decides after a draft from q was refused."""
        return p

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Walk all paths of text `row` that stand."""
        children, root = tree.children(row), int(tree.prefix_length[row]) - 1
        judged: dict[int, _NodeDecision] = {}
        best: tuple[int, float, tuple[int, ...]] = (0, 0.0, ())
        queue = [best]
        while queue:
            here = queue.pop()
            best = max(best, here, key=lambda x: x[:2])
            length, score, path = here
            node = path[-1] if path else root
            judged[node] = self._decide_node(
                tree, row, node, children.get(node, []), length + 1 < self.minimum_block, distributions
            )
            for child in judged[node].accepted:
                chance = float(judged[node].p[int(tree.token[row, child])])
                queue.append((length + 1, score + math.log(max(chance, 1e-300)), (*path, child)))
        path = best[2]
        nodes = (root, *path)
        left = judged[nodes[-1]].residual
        token = (
            distributions.sample(row, nodes[-1])
            if left is None
            else sample_from(left, distributions.uniform(row, nodes[-1], RESIDUAL))
        )
        decided = [*(int(tree.token[row, n]) for n in path), token]
        tolls = tuple(judged[n].token_fidelity(distributions, row, n, t) for n, t in zip(nodes, decided, strict=True))
        return AcceptResult(path, token, tolls)

    def _decide_node(
        self,
        tree: TokenTree,
        row: int,
        node: int,
        children: list[int],
        free: bool,
        distributions: ProcessedDistributions,
    ) -> "_NodeDecision":
        """Which children of a node stand, what decides if none does, and the law that all this makes of the next
        token.
        """
        p = (distributions.softmax_at if self.softmax_at_zero else distributions.probabilities)(row, node)
        greedy, draft_distributions = distributions.sampling_params(row).temperature == 0, DraftDistributions(tree, row)
        left, refused, distribution, standing = p, 1.0, torch.zeros_like(p), list[int]()
        for trial, child in enumerate(children):
            token, q = int(tree.token[row, child]), draft_distributions.distribution(child, p)
            part = q if free else q * self.acceptable(p) if greedy else self.accepted_mass(left, q)
            distribution = distribution + refused * part
            refused *= max(0.0, 1 - float(part.sum()))
            open_to_it = not (self.first_only and standing)
            if open_to_it and distributions.uniform(row, node, TRIAL + trial) * float(q[token]) < float(part[token]):
                standing.append(child)
            if not greedy:
                left = self.residual(left, q)
            draft_distributions.reject(child)
        return _NodeDecision(p, standing, None if left is p else left, distribution + refused * left)


@dataclass(frozen=True)
class _NodeDecision:
    """A node after the verdict: the target's law there, children that stand, what is left of p (None: p), and the law
    of the decided token.
    """

    p: Float[torch.Tensor, " v"]
    accepted: list[int]
    residual: Float[torch.Tensor, " v"] | None
    distribution: Float[torch.Tensor, " v"]

    def token_fidelity(self, distributions: ProcessedDistributions, row: int, node: int, token: int) -> TokenFidelity:
        """What the decided token costs; exact for chains and for siblings that are judged in their order.

        At temperature 0 both laws are points: the variation is 1 where they differ, and the divergence is read as the
        log of how much likelier the target's softmax holds its own token.
        """
        own = distributions.sample(row, node)
        if distributions.sampling_params(row).temperature == 0:
            p = distributions.softmax_at(row, node)
            return TokenFidelity(float(token != own), float((p[own] / p[token].clamp_min(1e-10)).log()), token != own)
        p = distributions.probabilities(row, node)
        return TokenFidelity(total_variation(self.distribution, p), kl_divergence(self.distribution, p), token != own)
