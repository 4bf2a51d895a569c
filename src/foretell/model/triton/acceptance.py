"""The rejection test of sampled drafts on the device, at every node of the trees at once: the host waits for all results
together, and walks down the trees by itself.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int

from foretell.model.triton.sampling import BLOCK, WARPS


class NodeDrafts(NamedTuple):
    """The sampled drafts below `m` nodes, at most `t` each, in the order in which they are tested."""

    draft: Int[torch.Tensor, "m t"]
    """Their tokens."""
    source: Int[torch.Tensor, "m t"]
    """The rows of the drafters' distributions that they were sampled from."""
    count: Int[torch.Tensor, " m"]
    distinct: Bool[torch.Tensor, " m"]
    """Whether drafts of one source were drawn without replacement."""
    uniform: Float[torch.Tensor, "m u"]
    """Random numbers in [0, 1): one for every test, and the last one for the token after them; `u = t + 1`."""


class NodeTests(NamedTuple):
    """Results of the tests below `m` nodes."""

    accepted: Int[torch.Tensor, " m"]
    """The number of the accepted draft; -1: none."""
    token: Int[torch.Tensor, " m"]
    """The token after the node."""
    ratio: Float[torch.Tensor, "m t 2"]
    """What each test compared, up to the accepted draft: the drafter's probability of the draft, and the target's."""
    left: Float[torch.Tensor, "m v"]
    """The distribution of the token after the last refused draft."""


@triton.jit
def _remaining(q, draft, source, before, row, token, inside, distinct, vocab):
    """Numbers of the row of a drafter's distribution, less the first `before` drafts that were drawn from it."""
    x = tl.load(q + row * vocab + token, mask=inside, other=0).to(tl.float64)
    for s in range(0, before):
        gone = distinct & (tl.load(source + s) == row)
        x = tl.where((token == tl.load(draft + s)) & gone, 0.0, x)
    return x


@triton.jit
def reject_kernel(
    weights, place, q, draft, source, count, distinct, uniform, accepted, chosen, ratio, left, vocab, most,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The tests below node `i`, whose tokens weigh row `place[i]` of the weights; see `NodeDrafts` and `NodeTests`."""
    i = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    weights += tl.load(place + i).to(tl.int64) * vocab
    p = left + i.to(tl.int64) * vocab
    source += i * most
    draft += i * most
    uniform += i * (most + 1)
    drafted, without = tl.load(count + i), tl.load(distinct + i) > 0
    sums = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab, BLOCK):
        sums += tl.load(weights + first + offset, mask=first + offset < vocab, other=0)
    total = tl.sum(sums).to(tl.float64)
    for first in range(0, vocab, BLOCK):
        inside = first + offset < vocab
        w = tl.load(weights + first + offset, mask=inside, other=0).to(tl.float64)
        tl.store(p + first + offset, w / total, mask=inside)
    tl.debug_barrier()  # What follows reads what other threads wrote.
    trial, passed = drafted * 0, drafted * 0 - 1
    while (trial < drafted) & (passed < 0):
        row, token = tl.load(source + trial).to(tl.int64), tl.load(draft + trial)
        removed, norm = trial * 0, total * 0 + 1
        for s in range(0, trial):
            removed += (without & (tl.load(source + s) == row)).to(removed.dtype)
        if removed > 0:
            parts = tl.zeros([BLOCK], tl.float64)
            for first in range(0, vocab, BLOCK):
                at = first + offset
                parts += _remaining(q, draft, source, trial, row, at, at < vocab, without, vocab)
            norm = tl.sum(parts)
            norm = tl.where(norm > 0, norm, 1.0)
        chance = _remaining(q, draft, source, trial, row, token, token < vocab, without, vocab) / norm
        target = tl.load(p + token)
        tl.store(ratio + 2 * (i * most + trial), chance)
        tl.store(ratio + 2 * (i * most + trial) + 1, target)
        if tl.load(uniform + trial) * chance < target:
            passed = trial
        else:
            parts = tl.zeros([BLOCK], tl.float64)
            for first in range(0, vocab, BLOCK):
                at = first + offset
                x = _remaining(q, draft, source, trial, row, at, at < vocab, without, vocab) / norm
                parts += tl.maximum(tl.load(p + at, mask=at < vocab, other=0) - x, 0.0)
            rest = tl.sum(parts)
            tl.debug_barrier()
            if rest > 0:
                for first in range(0, vocab, BLOCK):
                    at = first + offset
                    x = _remaining(q, draft, source, trial, row, at, at < vocab, without, vocab) / norm
                    x = tl.maximum(tl.load(p + at, mask=at < vocab, other=0) - x, 0.0) / rest
                    tl.store(p + at, x, mask=at < vocab)
            tl.debug_barrier()
        trial += 1
    # The token at a quantile of what is left, as `core.sampling.sample_from` finds it.
    reached = total * 0
    for first in range(0, vocab, BLOCK):
        x = tl.load(p + first + offset, mask=first + offset < vocab, other=0)
        reached = tl.max(reached + tl.cumsum(x))
    quantile = reached * tl.load(uniform + most)
    sampled, last, reached = (drafted * 0).to(tl.int64) + vocab, (drafted * 0).to(tl.int64), total * 0
    for first in range(0, vocab, BLOCK):
        at = (first + offset).to(tl.int64)
        x = tl.load(p + at, mask=at < vocab, other=0)
        cumulative = reached + tl.cumsum(x)
        reached = tl.max(cumulative)
        sampled = tl.minimum(sampled, tl.min(tl.where((cumulative > quantile) & (at < vocab), at, vocab)))
        last = tl.maximum(last, tl.max(tl.where(x > 0, at, 0)))
    sampled = tl.where(sampled < vocab, sampled, last)
    if passed >= 0:
        sampled = tl.load(draft + passed).to(tl.int64)
    tl.store(accepted + i, passed.to(tl.int64))
    tl.store(chosen + i, sampled)


def reject(
    weights: Int[torch.Tensor, "r v"],
    place: Int[torch.Tensor, " m"],
    q: Float[torch.Tensor, "s v"],
    drafts: NodeDrafts,
) -> NodeTests:
    """Test the drafts below `m` nodes, whose tokens have the weights `place[i]`."""
    (nodes, most), vocab = drafts.draft.shape, weights.shape[1]
    tests = NodeTests(
        place.new_empty(nodes, dtype=torch.int64),
        place.new_empty(nodes, dtype=torch.int64),
        place.new_empty(nodes, most, 2, dtype=torch.float64),
        place.new_empty(nodes, vocab, dtype=torch.float64),
    )
    reject_kernel[(nodes,)](
        weights, place, q, *drafts, *tests, vocab, most, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False
    )
    return tests
