"""Sampling from rows of logits on the device, with the tokens of the CPU to the bit; see `distributions.sampler`.

A program samples from one row. Weights are integers, so sums and comparisons do not depend on their order; the limits
of top-k and top-p are searched by bisection over the weights that occur, without sorting. Compiled without contraction
of multiplications and additions.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int

from foretell.model.triton.launch import Launch

BLOCK, WARPS = 1024, 8
"""Tokens that a program looks at together, and its warps: the most that spill no registers."""
_ROUND = tl.constexpr(6755399441055744.0)
_LEAST_EXPONENT = tl.constexpr(-40.0)


@triton.jit
def _bits_of(x):
    return x.to(tl.int64, bitcast=True)


@triton.jit
def _number(bits):
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def _weigh(x, largest, inverse, shift):
    """Integer weights 2^shift e^((x - largest) inverse); NaN weighs nothing."""
    exponent = tl.where(x == largest, 0.0, (x - largest) * inverse)
    counts = exponent >= _LEAST_EXPONENT
    exponent = tl.where(counts, exponent, _LEAST_EXPONENT)
    rounded = exponent * 1.4426950408889634 + _ROUND
    n = rounded - _ROUND
    r = (exponent - n * 0.6931471803691238) - n * 1.9082149292705877e-10
    p = r * (1.0 / 3628800) + 1.0 / 362880
    p = p * r + 1.0 / 40320
    p = p * r + 1.0 / 5040
    p = p * r + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    # The low bits of _ROUND are 0, so those of `rounded` are n.
    power = (_bits_of(rounded) - 0x4338000000000000 + shift) << 52
    scaled = _number(_bits_of(p) + power) + _ROUND
    return tl.where(counts, _bits_of(scaled) - 0x4338000000000000, 0)


@triton.jit
def exponential_variates(key, token):
    """-log(u) of the number u in (0, 1] that SplitMix64's stream of `key` has for a token; see `core.sampling`."""
    x = key.to(tl.uint64) + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    u = ((x ^ (x >> 31)) >> 11).to(tl.float64) * 1.1102230246251565e-16 + 5.551115123125783e-17
    bits = _bits_of(u)
    exponent = (bits >> 52) - 1022
    m = _number((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000)
    small = m < 0.7071067811865476
    m = tl.where(small, m * 2, m)
    exponent = tl.where(small, exponent - 1, exponent)
    s = (m - 1) / (m + 1)
    z = s * s
    series = z * 0.0
    for i in tl.static_range(12):
        series = series * z + 1.0 / (2 * (11 - i) + 1)
    return -(exponent.to(tl.float64) * 0.6931471805599453 + 2 * s * series)


@triton.jit
def _limit(weights, vocab, least, goal, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest weight, at least `least`, such that the tokens that weigh as much or more are `goal` (`COUNTS`), or
    weigh `goal` together; and what those above it are or weigh. Of the tokens below `least` none counts.
    """
    offset = tl.arange(0, BLOCK)
    low, high, above = least, (least * 0) + (1 << 60), least * 0
    while low < high:
        # Halfway between the binary representations, so that few steps find the order of magnitude.
        lower = _bits_of(low.to(tl.float64))
        pivot = tl.ceil(_number(lower + ((_bits_of(high.to(tl.float64)) - lower + 1) >> 1))).to(tl.int64)
        reached = tl.zeros([BLOCK], tl.int64)
        next_above = tl.full([BLOCK], 1 << 60, tl.int64)
        next_below = tl.zeros([BLOCK], tl.int64)
        for first in range(0, vocab, BLOCK):
            w = tl.load(weights + first + offset, mask=first + offset < vocab, other=0)
            heavy = w >= pivot
            reached += tl.where(heavy, tl.full([BLOCK], 1, tl.int64) if COUNTS else w, 0)
            next_above = tl.minimum(next_above, tl.where(heavy, w, 1 << 60))
            next_below = tl.maximum(next_below, tl.where(heavy, 0, w))
        sum_reached = tl.sum(reached)
        if sum_reached >= goal:
            low = tl.min(next_above)
        else:
            above = sum_reached
            high = tl.maximum(tl.max(next_below), least)
    return low, above


@triton.jit
def draw_kernel(logits, place, real, whole, weights, tokens, vocab, shift, BLOCK: tl.constexpr):
    """A token of row `place[i]` of the logits, -1: none; and the weights that truncation leaves.

    `real`: the inverse of the temperature, top-p and the least weight of min-p; `whole`: the key of the noise, and
    top-k or the vocabulary's size.
    """
    i = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    row = logits + tl.load(place + i).to(tl.int64) * vocab
    weights += i.to(tl.int64) * vocab
    inverse, top_p, least = tl.load(real + 3 * i), tl.load(real + 3 * i + 1), tl.load(real + 3 * i + 2).to(tl.int64)
    key, top_k = tl.load(whole + 2 * i), tl.load(whole + 2 * i + 1)
    most = tl.full([BLOCK], float("-inf"), tl.float64)
    for first in range(0, vocab, BLOCK):
        x = tl.load(row + first + offset, mask=first + offset < vocab, other=float("-inf")).to(tl.float64)
        most = tl.maximum(most, tl.where(x == x, x, float("-inf")))
    largest = tl.max(most)
    sums = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab, BLOCK):
        inside = first + offset < vocab
        x = tl.load(row + first + offset, mask=inside, other=float("-inf")).to(tl.float64)
        w = tl.where(inside, _weigh(x, largest, inverse, shift), 0)
        w = tl.where(largest > float("-inf"), w, 0)
        tl.store(weights + first + offset, w, mask=inside)
        sums += w
    total = tl.sum(sums)
    tl.debug_barrier()  # What follows reads the weights that other threads wrote.
    lightest = total * 0 + 1
    equals = total * 0 + vocab
    if total > 0:
        if top_k < vocab:
            lightest, _ = _limit(weights, vocab, lightest * 0, top_k, True, BLOCK)
            lightest = tl.maximum(lightest, 1)
        if top_p < 1:
            if top_k < vocab:
                sums = tl.zeros([BLOCK], tl.int64)
                for first in range(0, vocab, BLOCK):
                    w = tl.load(weights + first + offset, mask=first + offset < vocab, other=0)
                    sums += tl.where(w >= lightest, w, 0)
                total = tl.sum(sums)
            goal = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
            lightest, above = _limit(weights, vocab, lightest, goal, False, BLOCK)
            equals = (goal - above + lightest - 1) // lightest
    best = tl.full([BLOCK], float("inf"), tl.float64)
    winner = tl.full([BLOCK], -1, tl.int64)
    seen = total * 0
    for first in range(0, vocab, BLOCK):
        token = (first + offset).to(tl.int64)
        inside = token < vocab
        w = tl.load(weights + token, mask=inside, other=0)
        equal = (w == lightest).to(tl.int64)
        kept = (w > lightest) | ((w == lightest) & (seen + tl.cumsum(equal) <= equals))
        seen += tl.sum(equal)
        w = tl.where(kept & (w >= least), w, 0)
        tl.store(weights + token, w, mask=inside)
        runs = w > 0
        time = exponential_variates(key, token) / tl.where(runs, w, 1).to(tl.float64)
        ahead = runs & (time < best)
        best = tl.where(ahead, time, best)
        winner = tl.where(ahead, token, winner)
    fastest = tl.min(best)
    tl.store(tokens + i, tl.min(tl.where(best == fastest, winner, vocab)))


def draw(
    logits: Float[torch.Tensor, "k v"],
    place: Int[torch.Tensor, " r"],
    real: Float[torch.Tensor, "r 3"],
    whole: Int[torch.Tensor, "r 2"],
    shift: int,
) -> tuple[Launch, Int[torch.Tensor, " r"], Int[torch.Tensor, "r v"]]:
    """The launch that gives the token of each of these rows, -1: none, and the weights that truncation leaves; see
    `draw_kernel`.
    """
    vocab = logits.shape[1]
    tokens = torch.empty(len(place), dtype=torch.int64, device=logits.device)
    weights = torch.empty(len(place), vocab, dtype=torch.int64, device=logits.device)
    arguments = {
        "logits": logits,
        "place": place,
        "real": real,
        "whole": whole,
        "weights": weights,
        "tokens": tokens,
        "vocab": vocab,
        "shift": shift,
        "BLOCK": BLOCK,
    }
    return Launch(draw_kernel, (len(place),), arguments, WARPS), tokens, weights
