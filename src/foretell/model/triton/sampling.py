"""Sampling from rows of logits on the device, with the tokens of the CPU to the bit; see `distributions.sampler`.

A program has one chunk of one row: `largest_kernel`, `weigh_kernel` and, if a row is truncated, `select_kernel`; then
`finish_kernel` has one row. Weights are integers, so sums and comparisons do not depend on their order. A histogram of
the weights, or of the numbers of tokens, tells the bin in which the limit of top-k or top-p lies. Only the tokens of
this bin are searched, by bisection over the weights that occur, without sorting. Compiled without contraction of
multiplications and additions.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int

from foretell.model.triton.launch import Launch

BLOCK, WARPS = 1024, 8
"""Tokens of a chunk, which a program looks at together, and its warps: the most that spill no registers."""
BINS = tl.constexpr(1024)
_RANKED = tl.constexpr(16)
"""Chunks that are compared with all others at once."""
_FIELDS = tl.constexpr(6)
"""Of a row: see `draw`."""
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
def _noise(key, token):
    """53 bits that SplitMix64's stream of `key` has for a token; see `core.sampling`."""
    x = key.to(tl.uint64) + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return ((x ^ (x >> 31)) >> 11).to(tl.int64)


@triton.jit
def exponential_variates(key, token):
    """-log(u) of the number u in (0, 1] that the noise of a token is."""
    u = _noise(key, token).to(tl.float64) * 1.1102230246251565e-16 + 5.551115123125783e-17
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
def _bin_of(w):
    """The bin of weights above 0 and up to 2^50, 16 for every power of two; the heavier, the higher."""
    return (_bits_of(w.to(tl.float64)) >> 48) - 0x3FF0


@triton.jit
def _row(fields, scratch, i, CHUNKS: tl.constexpr):
    """Key, top-p, the least weight of min-p and top-k of a row; and its scratch memory: of every chunk the largest
    logit and the sum of the weights; the numbers of tokens at the front and at the back of the list; and the histogram.
    """
    fields += _FIELDS * i
    top_p = _number(tl.load(fields + 3))
    return tl.load(fields + 1), top_p, tl.load(fields + 4), tl.load(fields + 5), scratch + i * (2 * CHUNKS + 2 + BINS)


@triton.jit
def _enter(w, key, token, count, listed, vocab):
    """Put the tokens that may be the first of these in the race at the back of the list. Bounds of 2^53 -log(u) in
    float32 tell them, 2^53 (1 - u) and this over u (1 - u as `exponential_variates` rounds it, 2^-54 less or more): its
    logarithm in float64 takes long.
    """
    if tl.max(w) > 0:
        rest, weight = ((1 << 53) - 1 - _noise(key, token)).to(tl.float32), tl.where(w > 0, w, 1).to(tl.float32)
        upper = (rest + 1) / weight / tl.maximum(1 - rest * 1.1102230246251565e-16 - 1e-6, 1e-20)
        enters = (w > 0) & (rest / weight <= 1.001 * tl.min(tl.where(w > 0, upper, float("inf"))))
        start = tl.atomic_add(count, tl.sum(enters.to(tl.int64)), sem="relaxed")
        tl.store(listed + vocab - start - tl.cumsum(enters.to(tl.int32)), token, mask=enters)


@triton.jit
def largest_kernel(logits, fields, scratch, vocab, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a chunk that is not NaN; and an empty list and histogram."""
    i, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, _, scratch = _row(fields, scratch, i, CHUNKS)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + tl.load(fields + _FIELDS * i) * vocab + at, mask=at < vocab, other=float("-inf"))
    tl.store(scratch + chunk, _bits_of(tl.max(tl.where(x == x, x, float("-inf")).to(tl.float64))))
    if chunk == 0:
        tl.store(scratch + 2 * CHUNKS + tl.arange(0, 2), tl.zeros([2], tl.int64))
        tl.store(scratch + 2 * CHUNKS + 2 + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))


@triton.jit
def _lower_bound(most, largest, inverse, shift, scratch, top_p, top_k, vocab, chunks, CHUNKS: tl.constexpr):
    """A weight, at least 1, that the limit of top-k, or else of top-p, is not below."""
    number = tl.arange(0, CHUNKS)
    heaviest = tl.where(number < chunks, _weigh(most, largest, inverse, shift), 0)
    bound = top_k * 0
    if top_k >= vocab:
        # Tokens below it weigh together less than half of 1 - top_p; the other half is for rounding.
        bound = (0.5 * (1 - top_p) * tl.sum(heaviest).to(tl.float64) / vocab).to(tl.int64)
    elif top_k <= chunks:
        rank = tl.zeros([CHUNKS], tl.int32)
        for first in range(0, CHUNKS, _RANKED):
            other = first + tl.arange(0, _RANKED)
            other = _number(tl.load(scratch + other, mask=other < chunks, other=-0x10000000000000))  # -infinity
            rank += tl.sum((other[None, :] > most[:, None]).to(tl.int32), 1)
        bound = tl.min(tl.where((rank < top_k) & (number < chunks), heaviest, 1 << 60))
    return tl.maximum(bound, 1)


@triton.jit
def weigh_kernel(logits, fields, scratch, weights, listed, vocab, shift, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The weights of a chunk. Of a row that is truncated their sum and histogram (numbers of tokens if there is a
    top-k); of another one the tokens that may be the first in the race.
    """
    i, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    key, top_p, least, top_k, scratch = _row(fields, scratch, i, CHUNKS)
    inverse, number = _number(tl.load(fields + _FIELDS * i + 2)), tl.arange(0, CHUNKS)
    most = _number(tl.load(scratch + number, mask=number < chunks, other=-0x10000000000000))
    largest = tl.max(most)
    truncated, bound = (top_k < vocab) | (top_p < 1), top_k * 0
    if truncated:
        bound = _lower_bound(most, largest, inverse, shift, scratch, top_p, top_k, vocab, chunks, CHUNKS)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + tl.load(fields + _FIELDS * i) * vocab + at, mask=at < vocab, other=float("-inf"))
    w = tl.where(at < vocab, _weigh(x.to(tl.float64), largest, inverse, shift), 0)
    w = tl.where(largest > float("-inf"), w, 0)
    if truncated:
        tl.store(scratch + CHUNKS + chunk, tl.sum(w))
        held = scratch + 2 * CHUNKS + 2 + _bin_of(w)
        tl.atomic_add(held, tl.where(top_k < vocab, 1, w), mask=w >= bound, sem="relaxed")
    else:
        w = tl.where(w >= least, w, 0)
        _enter(w, key, at, scratch + 2 * CHUNKS + 1, listed + i * vocab, vocab)
    tl.store(weights + i * vocab + at, w, mask=at < vocab)


@triton.jit
def _limiting_bin(scratch, top_p, top_k, vocab, chunks, CHUNKS: tl.constexpr):
    """The bin of the limit of top-k, or else of top-p, -1: none; what the bins above it have; and what is asked for."""
    bins, number = tl.arange(0, BINS), tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(scratch + CHUNKS + number, mask=number < chunks, other=0)).to(tl.float64)
    goal = tl.where(top_k < vocab, top_k, tl.ceil(top_p * total).to(tl.int64))
    held = tl.load(scratch + 2 * CHUNKS + 2 + bins)
    reached = tl.sum(held) - tl.cumsum(held) + held
    return tl.max(tl.where(reached >= goal, bins, -1)), tl.max(tl.where(reached >= goal, 0, reached)), goal


@triton.jit
def select_kernel(fields, scratch, weights, listed, vocab, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Of a chunk of a row that is truncated, the tokens of the limiting bin (if there are top-k and top-p, those above
    it too) come to the front of the list, the lighter ones lose their weights, and the heavier ones enter the race.
    """
    i, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, top_p, least, top_k, scratch = _row(fields, scratch, i, CHUNKS)
    if (top_k < vocab) | (top_p < 1):
        limit, _, _ = _limiting_bin(scratch, top_p, top_k, vocab, tl.num_programs(1), CHUNKS)
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        w = tl.load(weights + i * vocab + at, mask=at < vocab, other=0)
        held, last = _bin_of(w), tl.where((top_k < vocab) & (top_p < 1), BINS, limit)
        lists = (w > 0) & (held >= limit) & (held <= last)
        stays = (w > 0) & (held > last) & (w >= least)
        tl.store(weights + i * vocab + at, tl.full([BLOCK], 0, tl.int64), mask=(at < vocab) & ~(lists | stays))
        counts = lists.to(tl.int32)
        if tl.max(counts) > 0:
            start = tl.atomic_add(scratch + 2 * CHUNKS, tl.sum(counts).to(tl.int64), sem="relaxed")
            tl.store(listed + i * vocab + start + tl.cumsum(counts) - 1, at, mask=lists)
        _enter(tl.where(stays, w, 0), key, at, scratch + 2 * CHUNKS + 1, listed + i * vocab, vocab)


@triton.jit
def _limit(weights, listed, n, vocab, least, goal, tied, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest weight, at least `least`, such that the listed tokens that weigh as much or more are `goal`
    (`COUNTS`), or weigh `goal` together; and what those above it are or weigh. Of the tokens below `least` none counts.
    If `tied` is above 0, tokens of this weight weigh the more the lower they are, and the others nothing.
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
        for first in range(0, n, BLOCK):
            inside = first + offset < n
            token = tl.load(listed + first + offset, mask=inside, other=0)
            w = tl.load(weights + token, mask=inside, other=0)
            w = tl.where(tied > 0, tl.where(w == tied, vocab - token, 0), w)
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
def finish_kernel(fields, scratch, weights, listed, tokens, vocab, chunks, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The limit among the tokens at the front of the list, the weights that it leaves them, and the first in the race
    of all listed ones.
    """
    i, offset = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    key, top_p, least, top_k, scratch = _row(fields, scratch, i, CHUNKS)
    weights += i * vocab
    listed += i * vocab
    n, entered = tl.load(scratch + 2 * CHUNKS), tl.load(scratch + 2 * CHUNKS + 1)
    zero = n * 0
    lightest, last = zero + 1, zero + vocab
    if n > 0:
        _bin, above, goal = _limiting_bin(scratch, top_p, top_k, vocab, chunks, CHUNKS)
        if top_k < vocab:
            above = tl.where(top_p < 1, 0, above)
            lightest, _more = _limit(weights, listed, n, vocab, zero, goal - above, zero, True, BLOCK)
            lightest = tl.maximum(lightest, 1)
        if top_p < 1:
            if top_k < vocab:
                sums = tl.zeros([BLOCK], tl.int64)
                for first in range(0, n, BLOCK):
                    token = tl.load(listed + first + offset, mask=first + offset < n, other=0)
                    w = tl.load(weights + token, mask=first + offset < n, other=0)
                    sums += tl.where(w >= lightest, w, 0)
                goal = tl.ceil(top_p * tl.sum(sums).to(tl.float64)).to(tl.int64)
            lightest, more = _limit(weights, listed, n, vocab, lightest, goal - above, zero, False, BLOCK)
            equals = (goal - above - more + lightest - 1) // lightest
            lowest, _more = _limit(weights, listed, n, vocab, zero + 1, equals, lightest, True, BLOCK)
            last = vocab - lowest
    best = tl.full([BLOCK], float("inf"), tl.float64)
    winner = tl.full([BLOCK], -1, tl.int64)
    for first in range(0, n + entered, BLOCK):
        at = first + offset
        inside = at < n + entered
        token = tl.load(listed + tl.where(at < n, at, vocab - 1 - (at - n)), mask=inside, other=0).to(tl.int64)
        w = tl.load(weights + token, mask=inside, other=0)
        runs = inside & ((w > lightest) | ((w == lightest) & (token <= last))) & (w >= least)
        tl.store(weights + token, tl.zeros([BLOCK], tl.int64), mask=inside & ~runs)
        time = exponential_variates(key, token) / tl.where(runs, w, 1).to(tl.float64)
        ahead = runs & ((time < best) | ((time == best) & (token < winner)))
        best = tl.where(ahead, time, best)
        winner = tl.where(ahead, token, winner)
    tl.store(tokens + i, tl.min(tl.where(best == tl.min(best), winner, vocab)))


def draw(
    logits: Float[torch.Tensor, "k v"], fields: Int[torch.Tensor, "r 6"], shift: int, truncates: bool
) -> tuple[list[Launch], Int[torch.Tensor, " r"], Int[torch.Tensor, "r v"]]:
    """The launches that give a token of each of these rows, -1: none, and the weights that truncation leaves.

    Fields of a row: its place in the logits; the key of the noise; the bits of the inverse of the temperature, and of
    top-p; the least weight of min-p; top-k or the vocabulary's size. `truncates`: a row has a top-k or a top-p.
    """
    (rows, vocab), device = (len(fields), logits.shape[1]), logits.device
    chunks = -(-vocab // BLOCK)
    padded = max(_RANKED.value, 1 << (chunks - 1).bit_length())
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    weights = torch.empty(rows, vocab, dtype=torch.int64, device=device)
    scratch = torch.empty(rows, 2 * padded + 2 + BINS.value, dtype=torch.int64, device=device)
    listed = torch.empty(rows, vocab, dtype=torch.int32, device=device)
    shared = {"fields": fields, "scratch": scratch, "vocab": vocab, "CHUNKS": padded, "BLOCK": BLOCK}
    lists, source, grid = {**shared, "weights": weights, "listed": listed}, {"logits": logits}, (rows, chunks)
    launches = [
        Launch(largest_kernel, grid, {**shared, **source}, WARPS),
        Launch(weigh_kernel, grid, {**lists, **source, "shift": shift}, WARPS, registers=64),
        Launch(finish_kernel, (rows,), {**lists, "tokens": tokens, "chunks": chunks}, WARPS),
    ]
    if truncates:
        launches.insert(2, Launch(select_kernel, grid, lists, WARPS))
    return launches, tokens, weights
