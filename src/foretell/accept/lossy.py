"""The common walk of lossy acceptors, which accept drafts that the target would not have sampled, and report by how
much they deviate.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float

from foretell.accept.base import Acceptor, AcceptResult
from foretell.accept.fidelity import MIN_PROBABILITY, TokenFidelity, kl_divergence, total_variation
from foretell.accept.rejection import DraftDistributions
from foretell.core.sampling import Stream, sample_from
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions

_MIN_SCORE_PROBABILITY = 1e-300
"""Lower bound of probabilities in the score of a path, before their logarithm is taken."""


@dataclass(frozen=True)
class LossyAcceptor(Acceptor):
    """A rule that accepts part of the probability mass of each draft distribution.

    A draft x from q is accepted with probability accepted_mass(p, q)[x] / q[x]; for a draft that was not sampled, q is
    one-hot. A rule is its set of `acceptable` tokens, which are always accepted, or it overrides `accepted_mass` and
    `residual` to be random. All accepted branches are followed; the longest path wins, ties by its probability. The
    token after it is sampled from what `residual` makes of p. At temperature 0 every rule is its set, and the target's
    most probable token follows.

    `minimum_block`: tokens per pass that are decided whatever the rule says, as far as the tree allows (the minimum
    block size of Stern et al., arXiv 1811.03115, who found that it hurts). 1 has no effect, since the target's own
    token always follows.

    Raises:
        ValueError: a minimum block below 1.
    """

    minimum_block: int = field(default=1, kw_only=True)

    lossless = False
    same_seed = False
    softmax_at_zero: ClassVar[bool] = True
    """At temperature 0 the rule sees the model's softmax; False: the one-hot distribution, under which most rules
    accept the most probable token only.
    """
    first_only: ClassVar[bool] = False
    """At most one child of a node is accepted: the first that passes its test."""

    def __post_init__(self) -> None:
        if self.minimum_block < 1:
            raise ValueError(f"every pass decides at least one token, found a minimum block of {self.minimum_block}")

    def fixed_rate(self, depth: int) -> float | None:
        """The chance of a draft after `depth` accepted ones, whatever the rule says; None: the rule decides."""
        return 1.0 if depth + 1 < self.minimum_block else None

    @abstractmethod
    def acceptable(self, p: Float[torch.Tensor, " v"]) -> Bool[torch.Tensor, " v"]:
        """Tokens that are accepted where the target's distribution is p."""

    def accepted_mass(self, p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
        """The part of q that is accepted, at most q everywhere."""
        return q * self.acceptable(p)

    def residual(self, p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
        """The distribution of the token after a draft from q was rejected."""
        return p

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Accept the longest path that passes in the tree of batch row `row`."""
        children, root = tree.children(row), tree.root(row)
        decisions: dict[int, _NodeDecision] = {}
        best: tuple[int, float, tuple[int, ...]] = (0, 0.0, ())
        queue = [best]
        while queue:
            current = queue.pop()
            best = max(best, current, key=lambda x: x[:2])
            length, score, path = current
            node = path[-1] if path else root
            if not distributions.goes_on(row, node):
                continue
            rate = self.fixed_rate(length)
            decision = self._decide_node(tree, row, node, children.get(node, []), rate, distributions)
            decisions[node] = decision
            for child in decision.accepted:
                p = float(decision.p[int(tree.token[row, child])])
                queue.append((length + 1, score + math.log(max(p, _MIN_SCORE_PROBABILITY)), (*path, child)))
        path = best[2]
        if path and path[-1] not in decisions:  # It ends the answer.
            path, token = path[:-1], int(tree.token[row, path[-1]])
        else:
            node = path[-1] if path else root
            residual = decisions[node].residual
            token = (
                distributions.sample(row, node)
                if residual is None
                else sample_from(residual, distributions.uniform(row, node, Stream.RESIDUAL))
            )
        nodes = (root, *path)
        new_tokens = [*(int(tree.token[row, n]) for n in path), token]
        fidelity = tuple(
            decisions[n].token_fidelity(distributions, row, n, t) for n, t in zip(nodes, new_tokens, strict=True)
        )
        return AcceptResult(path, token, fidelity)

    def _decide_node(
        self,
        tree: TokenTree,
        row: int,
        node: int,
        children: list[int],
        rate: float | None,
        distributions: ProcessedDistributions,
    ) -> "_NodeDecision":
        """Test the children of a node."""
        p = (distributions.softmax_at if self.softmax_at_zero else distributions.probabilities)(row, node)
        greedy, draft_distributions = distributions.sampling_params(row).temperature == 0, DraftDistributions(tree, row)
        residual, rejected, distribution, accepted = p, 1.0, torch.zeros_like(p), list[int]()
        for number, child in enumerate(children):
            token, q = int(tree.token[row, child]), draft_distributions.distribution(child, p)
            if rate is not None:
                mass = q * rate
            else:
                mass = q * self.acceptable(p) if greedy else self.accepted_mass(residual, q)
            distribution = distribution + rejected * mass
            rejected *= max(0.0, 1 - float(mass.sum()))
            if not (self.first_only and accepted):
                uniform = distributions.uniform(row, node, Stream.ACCEPT, number)
                if uniform * float(q[token]) < float(mass[token]):
                    accepted.append(child)
            if not greedy:
                residual = self.residual(residual, q)
            draft_distributions.reject(child)
        return _NodeDecision(p, accepted, None if residual is p else residual, distribution + rejected * residual)


@dataclass(frozen=True)
class _NodeDecision:
    """The result of the tests at a node."""

    p: Float[torch.Tensor, " v"]
    """The target's distribution."""
    accepted: list[int]
    residual: Float[torch.Tensor, " v"] | None
    """The distribution of the token if no child is accepted; None: p."""
    distribution: Float[torch.Tensor, " v"]
    """The distribution of the next token over all outcomes of the tests."""

    def token_fidelity(self, distributions: ProcessedDistributions, row: int, node: int, token: int) -> TokenFidelity:
        """Deviation of the new token; exact for chains and for siblings that are tested in order.

        At temperature 0 both distributions are one-hot: the variation is 1 where they differ, and the divergence is the
        log of the ratio of the target's softmax between its own token and the new one.
        """
        own = distributions.sample(row, node)
        if distributions.sampling_params(row).temperature == 0:
            p = distributions.softmax_at(row, node)
            log_ratio = float((p[own] / p[token].clamp_min(MIN_PROBABILITY)).log())
            return TokenFidelity(float(token != own), log_ratio, token != own)
        p = distributions.probabilities(row, node)
        return TokenFidelity(total_variation(self.distribution, p), kl_divergence(self.distribution, p), token != own)
