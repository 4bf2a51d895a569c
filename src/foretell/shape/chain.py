"""Chains of drafted tokens: the shape of speculative sampling."""

from dataclasses import dataclass, replace

import numpy as np

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions
from foretell.draft.base import Predictor
from foretell.model.kernels import NodeLimits
from foretell.shape.base import Shape, TreeBuilder, add_top_ranks, expand_level


@dataclass(frozen=True)
class Chain(Shape[Predictor]):
    """A chain of up to `length` tokens (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    `draw`: tokens are sampled from the drafter's distribution; otherwise they are its most probable ones. `confidence`:
    the chain ends *with* a token to which the drafter itself gives less than this probability (Draft & Verify, arXiv
    2309.08168; Hugging Face's `assistant_confidence_threshold`). `fallback`: it ends *before* a token where the
    drafter's most probable token has less (BiLD, arXiv 2302.07863). A sampled token may end the chain but must not be
    left out because of its own value: that would bias the distribution that it was sampled from. `adaptive`: `length`
    is a bound, and the engine's budget shortens the chain of a request by the acceptance of its earlier ones.

    Raises:
        ValueError: a negative length, or a threshold outside 0..1.
    """

    label = "chain"

    length: int
    draw: bool = True
    confidence: float = 0.0
    fallback: float = 0.0
    adaptive: bool = False

    drafter_type = Predictor

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"a chain has 0 or more drafted tokens, found {self.length}")
        if not (0 <= self.confidence <= 1 and 0 <= self.fallback <= 1):
            raise ValueError(
                f"the confidence to stop at lies in 0..1, found {self.confidence} and fallback {self.fallback}"
            )

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """A chain for each request; nodes after an early end are not valid."""
        if self.length and _takes_argmax(context, self.draw):
            tree = draft.grow_chain(context, self.length, NodeLimits(self.fallback, self.confidence))
            if tree is None and not (self.confidence or self.fallback):
                tree = draft.grow_dynamic_tree(context, (self.length, 1, self.length), (0.0, 0.0))
            if tree is not None:
                return tree
        builder = TreeBuilder(replace(context, max_depth=np.minimum(context.max_depth, self.length)))
        return (self._argmax_chains if _takes_argmax(context, self.draw) else self._chains)(draft, builder)

    def _chains(self, draft: Predictor, builder: TreeBuilder) -> TokenTree:
        active = list(range(len(builder.frontier)))
        while active := [row for row, yes in enumerate(builder.expandable[:, 0]) if yes and row in active]:
            distributions, parents = builder.expand(draft), builder.frontier[:, 0].tolist()
            active = [
                row
                for row in active
                if distributions.is_known(row, parents[row])
                and _is_confident(distributions, row, parents[row], self.fallback)
            ]
            expand_level(builder, [distributions], [(0,)], self.draw, active)
            node = builder.tree.nodes - 1
            active = [
                row
                for row in active
                if _is_confident(distributions, row, parents[row], self.confidence, int(builder.tree.token[row, node]))
            ]
        return builder.build()

    def _argmax_chains(self, draft: Predictor, builder: TreeBuilder) -> TokenTree:
        """The same where every token is the argmax: vectorised over the requests, and with scores."""
        rows = len(builder.frontier)
        active, row = builder.expandable[:, 0], np.arange(rows)
        scores = [np.ones(rows)]
        while active.any():
            best = builder.top_tokens(draft, 1)
            index = best.logit_index[row, builder.frontier[:, 0]]
            probability = best.probability[index, 0] if len(best.probability) else np.zeros(rows)
            active &= (index >= 0) & (probability >= self.fallback)
            add_top_ranks(builder, best, [(0,)], active)
            scores.append(np.where(active, scores[-1] * probability, 0.0))
            active &= (probability >= self.confidence) & (builder.depth < builder.context.max_depth)
        return replace(builder.build(), score=np.stack(scores, 1))


def _takes_argmax(context: Context, draw: bool) -> bool:
    """Whether every drafted token is the argmax of the drafter's logits, whatever the sampling parameters."""
    return all(s.uses_raw_logits and not (draw and s.temperature) for s in context.sampling_params)


def _is_confident(
    distributions: ProcessedDistributions, row: int, node: int, threshold: float, token: int | None = None
) -> bool:
    """Whether the drafter gives `token` (None: its most probable one) at least this probability after `node`."""
    if threshold <= 0:
        return True
    confidence = distributions.confidence(row, node)
    return float(confidence.max() if token is None else confidence[token]) >= threshold
