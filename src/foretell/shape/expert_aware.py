"""Trees for mixtures of experts: nodes that promise the most tokens for the experts that they add to a pass."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from foretell.core.context import Context, StepResult
from foretell.core.engine_bound import EngineBound
from foretell.core.expert_forecast import ExpertForecast
from foretell.core.tree import NodeMask, TokenTree
from foretell.draft.base import Predictor
from foretell.shape.base import Shape

_DECAY = 0.98
"""Share of the counted tokens and weights that is kept per step."""


@dataclass(frozen=True)
class ExpertSizes:
    """Experts per layer, experts per token, layers with experts; weights of an expert, and weights that every pass
    reads beside experts.
    """

    count: int
    active: int
    layers: int
    expert: int
    fixed: int

    def weights(self, experts: float) -> float:
        """Weights that a pass over so many experts of all layers reads."""
        return self.fixed + self.expert * experts


class ExpertAwareTree(EngineBound, Shape[Predictor]):
    """Of the trees of another shape, the nodes that maximise expected tokens per weight that the pass reads.

    A pass over a mixture of experts reads every expert that one of its tokens has, so nodes do not cost the same: one
    whose experts others have already is free. Nodes are taken in order of score over the weights that they are expected
    to add, up to the number at which the score of all, less the tokens that decoding gives for the weights of all, is
    largest; tokens per weight are learned. So where most experts are read anyway, large trees are kept whole. The
    expected number of experts of
    independent tokens is the sum over experts of `1 - prod(1 - p)` (MoESD, arXiv 2505.19645). Only counts decide, no
    times, so that answers are the same in every run; only acceptors whose output does not depend on the drafts
    (`Match`) should follow.

    `inner`: the shape that drafts; its trees need scores, or they are verified whole.
    """

    label = "dynamic tree that shares experts"

    drafter_type = Predictor

    def __init__(self, inner: Shape[Predictor], sizes: ExpertSizes) -> None:
        self._inner, self.sizes, self.forecast = inner, sizes, ExpertForecast(sizes.layers, sizes.count, sizes.active)
        self._tokens, self._weights = 1.0, sizes.weights(sizes.layers * sizes.active)

    @property
    def rate(self) -> float:
        """Tokens per weight that passes read."""
        return self._tokens / self._weights

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """The most profitable nodes of the other shape's trees."""
        tree = self._inner.grow(draft, context)
        if tree.score is None:
            return tree
        return replace(tree, valid=tree.valid & self._profitable(tree, tree.score))

    def _profitable(self, tree: TokenTree, score: Float[np.ndarray, "b n"]) -> NodeMask:
        """The nodes to keep, roots included: those up to the best end of the order in which nodes are taken."""
        order, costs = self._in_order(tree, score)
        gain = np.cumsum([float(score[place]) for place in order]) - self.rate * np.cumsum(costs)
        best = int(gain.argmax()) + 1 if len(gain) and gain.max() > 0 else 0
        kept = np.zeros(tree.valid.shape, bool)
        kept[:, 0] = True
        for place in order[:best]:
            kept[place] = True
        return kept

    def _in_order(self, tree: TokenTree, score: Float[np.ndarray, "b n"]) -> tuple[list[tuple[int, int]], list[float]]:
        """The drafted nodes, each after its parent and with the highest score over the weights that it adds to those
        before it; and these weights.
        """
        probability = {token: self.forecast.probabilities(token) for token in set(tree.token[tree.valid].tolist())}
        absent = np.ones((self.sizes.layers, self.sizes.count))
        """Probability that no token so far has an expert."""
        for token in tree.token[:, 0].tolist():
            absent *= 1 - probability[token]
        order, costs = list[tuple[int, int]](), list[float]()
        taken, row = np.zeros(tree.valid.shape, bool), np.arange(tree.rows)[:, None]
        taken[:, 0] = True
        while (candidate := tree.valid & ~taken & taken[row, np.maximum(tree.parent, 0)]).any():
            nodes = np.argwhere(candidate)
            own = np.stack([probability[int(tree.token[i, j])] for i, j in nodes])
            cost = self.sizes.expert * np.einsum("nle,le->n", own, absent)
            best = int((score[candidate] / np.maximum(cost, 1.0)).argmax())
            i, j = map(int, nodes[best])
            taken[i, j] = True
            absent *= 1 - own[best]
            order.append((i, j))
            costs.append(float(cost[best]))
        return order, costs

    def observe(self, step: StepResult) -> None:
        """Learn the experts of the pass, and tokens per weight unless it read a prompt."""
        self._inner.observe(step)
        whole = step.whole
        if not whole.output.routes:
            return
        index, active = whole.output.hidden_index, whole.tree.active
        self.forecast.observe(whole.tree.token[active], np.stack([r[index[active]] for r in whole.output.routes]))
        if whole.tree.is_decode:
            self._tokens = _DECAY * self._tokens + sum(map(len, whole.new_tokens))
            self._weights = _DECAY * self._weights + self.sizes.weights(sum(whole.output.experts))
