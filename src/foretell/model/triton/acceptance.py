"""The rejection test of sampled drafts in one launch: what `core.draft_tests` does with torch."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int

from foretell.core.draft_tests import NodeDrafts, NodeTests
from foretell.model.triton.launch import Launch

BLOCK, WARPS = 2048, 16
"""Tokens that a program looks at together, and its warps: the most that spill no registers."""


@triton.jit
def _remaining(q, draft, before, row, token, inside, vocab):
    """Numbers of the row of a drafter's distribution, less the first `before` drafts."""
    x = tl.load(q + row * vocab + token, mask=inside, other=0).to(tl.float64)
    for s in range(before):
        x = tl.where(token == tl.load(draft + s), 0.0, x)
    return x


@triton.jit
def reject_kernel(
    weights, place, q, draft, source, count, distinct, uniform, accepted, chosen, chance, left, vocab, most,
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
        removed, norm = tl.where(without, trial, 0), total * 0 + 1
        if removed > 0:
            parts = tl.zeros([BLOCK], tl.float64)
            for first in range(0, vocab, BLOCK):
                at = first + offset
                parts += _remaining(q, draft, removed, row, at, at < vocab, vocab)
            norm = tl.sum(parts)
            norm = tl.where(norm > 0, norm, 1.0)
        drafters = _remaining(q, draft, removed, row, token, token < vocab, vocab) / norm
        targets = tl.load(p + token)
        tl.store(chance + 2 * (i * most + trial), drafters)
        tl.store(chance + 2 * (i * most + trial) + 1, targets)
        if tl.load(uniform + trial) * drafters < targets:
            passed = trial
        else:
            parts = tl.zeros([BLOCK], tl.float64)
            for first in range(0, vocab, BLOCK):
                at = first + offset
                x = _remaining(q, draft, removed, row, at, at < vocab, vocab) / norm
                parts += tl.maximum(tl.load(p + at, mask=at < vocab, other=0) - x, 0.0)
            rest = tl.sum(parts)
            tl.debug_barrier()
            if rest > 0:
                for first in range(0, vocab, BLOCK):
                    at = first + offset
                    x = _remaining(q, draft, removed, row, at, at < vocab, vocab) / norm
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


def test_drafts(
    weights: Int[torch.Tensor, "r v"], place: Int[torch.Tensor, " m"], q: Float[torch.Tensor, "s v"], drafts: NodeDrafts
) -> tuple[Launch, NodeTests]:
    """The launch that tests the drafts below `m` nodes; see `core.draft_tests.test_drafts`."""
    (nodes, most), vocab, device = drafts.draft.shape, weights.shape[1], weights.device
    tests = NodeTests(
        torch.empty(nodes, dtype=torch.int64, device=device),
        torch.empty(nodes, dtype=torch.int64, device=device),
        torch.empty(nodes, most, 2, dtype=torch.float64, device=device),
        torch.empty(nodes, vocab, dtype=torch.float64, device=device),
    )
    results = {"accepted": tests.accepted, "chosen": tests.token, "chance": tests.chance, "left": tests.left}
    sizes = {"vocab": vocab, "most": most, "BLOCK": BLOCK}
    arguments = {"weights": weights, "place": place, "q": q, **drafts._asdict(), **results, **sizes}
    return Launch(reject_kernel, (nodes,), arguments, WARPS, registers=128), tests
