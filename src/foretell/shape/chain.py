"""Chains of drafted tokens: the shape of speculative sampling."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions
from foretell.draft.base import Predictor
from foretell.model.kernels import NodeLimits
from foretell.shape.base import Shape, TreeBuilder, add_top_ranks, expand_level


@dataclass(frozen=True)
class ChainLimits:
    """Where one request's chain ends.

    `confidence`: the chain ends *with* a token to which the drafter itself gives less than this probability (Draft &
    Verify, arXiv 2309.08168; Hugging Face's `assistant_confidence_threshold`). `fallback`: it ends *before* a token
    where the drafter's most probable token has less (BiLD, arXiv 2302.07863). A sampled token may end the chain but
    must not be left out because of its own value: that would bias the distribution that it was sampled from.
    """

    length: int
    confidence: float = 0.0
    fallback: float = 0.0


@dataclass(frozen=True)
class Chain(Shape[Predictor]):
    """A chain of up to `length` tokens (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    `draw`: tokens are sampled from the drafter's distribution; otherwise they are its most probable ones. `confidence`
    and `fallback` end a chain early: see `ChainLimits`.

    Raises:
        ValueError: a negative length, or a threshold outside 0..1.
    """

    label = "chain"

    length: int
    draw: bool = True
    confidence: float = 0.0
    fallback: float = 0.0

    drafter_type = Predictor

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"a chain has 0 or more drafted tokens, found {self.length}")
        if not (0 <= self.confidence <= 1 and 0 <= self.fallback <= 1):
            raise ValueError(
                f"the confidence to stop at lies in 0..1, found {self.confidence} and fallback {self.fallback}"
            )

    @property
    def limits(self) -> ChainLimits:
        """Where every request's chain ends."""
        return ChainLimits(self.length, self.confidence, self.fallback)

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """A chain for each request; nodes after an early end are not valid."""
        if self.length and _takes_argmax(context, self.draw):
            tree = draft.grow_chain(context, self.length, NodeLimits(self.fallback, self.confidence))
            if tree is None and not (self.confidence or self.fallback):
                tree = draft.grow_dynamic_tree(context, (self.length, 1, self.length), (0.0, 0.0))
            if tree is not None:
                return tree
        return grow_chains(draft, context, [self.limits] * len(context.rows), self.draw)


def grow_chains(draft: Predictor, context: Context, limits: Sequence[ChainLimits], draw: bool) -> TokenTree:
    """A chain for each request, each with its own limits."""
    builder = TreeBuilder(replace(context, max_depth=np.minimum(context.max_depth, [x.length for x in limits])))
    if _takes_argmax(context, draw):
        return _argmax_chains(draft, builder, limits)
    active = list(range(len(limits)))
    while active := [row for row in active if builder.can_expand(row, int(builder.frontier[row, 0]))]:
        distributions, parents = builder.expand(draft), builder.frontier[:, 0].tolist()
        active = [
            row
            for row in active
            if distributions.is_known(row, parents[row])
            and _is_confident(distributions, row, parents[row], limits[row].fallback)
        ]
        expand_level(builder, distributions, [(0,)], draw, active)
        node = builder.tree.nodes - 1
        active = [
            row
            for row in active
            if _is_confident(
                distributions, row, parents[row], limits[row].confidence, int(builder.tree.token[row, node])
            )
        ]
    return builder.build()


def _takes_argmax(context: Context, draw: bool) -> bool:
    """Whether every drafted token is the argmax of the drafter's logits, whatever the sampling parameters."""
    return all(s.uses_raw_logits and not (draw and s.temperature) for s in context.sampling_params)


def _argmax_chains(draft: Predictor, builder: TreeBuilder, limits: Sequence[ChainLimits]) -> TokenTree:
    """`grow_chains` where every token is the argmax: vectorised over the requests."""
    active = np.array([builder.can_expand(row, 0) for row in range(len(limits))])
    while active.any():
        best, row = builder.top_tokens(draft, 1), np.arange(len(limits))
        index = best.logit_index[row, builder.frontier[:, 0]]
        probability = best.probability[index, 0] if len(best.probability) else np.zeros(len(limits))
        active &= (index >= 0) & (probability >= [x.fallback for x in limits])
        add_top_ranks(builder, best, [(0,)], active)
        active &= (probability >= [x.confidence for x in limits]) & (builder.depth < builder.context.max_depth)
    return builder.build()


def _is_confident(
    distributions: ProcessedDistributions, row: int, node: int, threshold: float, token: int | None = None
) -> bool:
    """Whether the drafter gives `token` (None: its most probable one) at least this probability after `node`."""
    if threshold <= 0:
        return True
    confidence = distributions.confidence(row, node)
    return float(confidence.max() if token is None else confidence[token]) >= threshold
