"""Attention of a pass over the paged cache: tree attention with grouped queries, split over the context.

A program has a tile of tokens of one row with the query heads of one key-value head. It reads the keys that they may
see block by block, by the table of the row's blocks: no copy of a row's cache, no mask from the host. Keys are summed
in parts of `SPLIT` slots (Flash-Decoding: Dao et al., 2023), each with an online softmax, and the parts are sink in
order of the context. Parts and their order depend on the slots alone, so a token's result does not depend on the other
rows and tokens of its pass, nor on whether one program joins all parts (`FOLD`) or each has a program of its own.
"""

import triton
import triton.language as tl

from foretell.model.triton.numbers import rotated, widened

BLOCK = tl.constexpr(64)
"""Slots of a block of the cache; `BLOCK_SLOTS` of `cache.block_table`."""
WORD_BITS = tl.constexpr(16)
"""Slots of a word of `PagedLayout.words`, whose upper half counts the ancestors of the words before."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):
    """The hyperbolic tangent: near zero by Cephes' polynomial, which has no cancellation there."""
    square = x * x
    small = -5.70498872745e-3 * square + 2.06390887954e-2
    small = small * square - 5.37397155531e-2
    small = small * square + 1.33314422036e-1
    small = x + x * square * (small * square - 3.33332819422e-1)
    large = 1 - 2 / (tl.exp(2 * tl.minimum(tl.abs(x), 20.0)) + 1)
    return tl.where(square < 0.39, small, tl.where(x < 0, -large, large))


@triton.jit
def _set_bits(x):
    """Number of set bits of 16-bit words."""
    x = x - ((x >> 1) & 0x5555)
    x = (x & 0x3333) + ((x >> 2) & 0x3333)
    x = (x + (x >> 4)) & 0x0F0F
    return (x + (x >> 8)) & 0x1F


@triton.jit
def _visible(slot, prefix, least, words, token, TREE: tl.constexpr, WORDS: tl.constexpr, WINDOW: tl.constexpr):
    """Which slots tokens attend to, `[m, n]`: their prefix, and in tree blocks their ancestors, in the window."""
    behind = slot[None, :] - prefix[:, None]
    seen = behind < 0
    position = slot[None, :]
    if TREE and WORDS > 0:
        in_words = (behind >= 0) & (behind < WORDS * WORD_BITS)
        bit = behind & (WORD_BITS - 1)
        word = tl.load(words + token[:, None] * WORDS + (behind // WORD_BITS), mask=in_words, other=0)
        seen = seen | (in_words & (((word >> bit) & 1) > 0))
        if WINDOW:
            rank = ((word >> 16) & 0xFFFF) + _set_bits(word & ((1 << bit) - 1))
            position = tl.where(behind < 0, position, prefix[:, None] + rank)
    if WINDOW:
        seen = seen & (position > least[:, None])
    return seen


@triton.jit
def _add_blocks(
    total, sums, peak, q, k, v, k_scale, v_scale, table, first, last, prefix, least, words, token, scale, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, NUMBERS: tl.constexpr, SOFTCAP: tl.constexpr, TREE: tl.constexpr,
    WORDS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Add the blocks of slots `first .. last-1` to weighted values `total`, sums of weights and greatest scores."""
    dim, within = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    place = within[:, None] * D + dim[None, :]
    for start in range(first, last, BLOCK):
        at = tl.load(table + start // BLOCK).to(tl.int64) * BLOCK
        if BLOCK_D == D:
            keys, values = tl.load(k + at * D + place), tl.load(v + at * D + place)
        else:
            keys = tl.load(k + at * D + place, mask=dim[None, :] < D, other=0)
            values = tl.load(v + at * D + place, mask=dim[None, :] < D, other=0)
        keys, values = widened(keys, q.dtype, NUMBERS), widened(values, q.dtype, NUMBERS)
        score = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if NUMBERS:
            score = score * tl.load(k_scale + at + within)[None, :]
        if SOFTCAP:
            score = _tanh(score / softcap) * softcap
        seen = _visible(start + within, prefix, least, words, token, TREE, WORDS, WINDOW)
        score = score * LOG2_E + tl.where(seen, 0.0, float("-inf"))  # masks change their layout as numbers only
        higher = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight, kept = tl.exp2(score - base[:, None]), tl.exp2(peak - base)
        sums = sums * kept + tl.sum(weight, 1)
        if NUMBERS:
            weight = weight * tl.load(v_scale + at + within)[None, :]
        total = total * kept[:, None] + tl.dot(weight.to(q.dtype), values, input_precision="ieee")
        peak = higher
    return total, sums, peak


@triton.jit
def _join(total, sums, peak, more, more_sums, more_peak):
    """Two neighbouring parts as one."""
    higher = tl.maximum(peak, more_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    left, right = tl.exp2(peak - base), tl.exp2(more_peak - base)
    return total * left[:, None] + more * right[:, None], sums * left + more_sums * right, higher


@triton.jit
def _finish(
    total, sums, peak, out, extra, token, head, valid,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EXTRA: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    """Write the weighted mean of the values, with a head's sink among the weights, in the basis of the heads."""
    if EXTRA:
        sink = tl.load(extra + head).to(tl.float32) * LOG2_E
        higher = tl.maximum(peak, sink)
        left = tl.exp2(peak - higher)
        total, sums = total * left[:, None], sums * left + tl.exp2(sink - higher)
    mean = rotated(total / tl.where(valid > 0, sums, 1.0)[:, None], BLOCK_M, BLOCK_D, ROTATED)
    dim = tl.arange(0, BLOCK_D)
    place = (token * HEADS + head)[:, None] * D + dim[None, :]
    tl.store(out + place, mean.to(out.dtype.element_ty), mask=valid[:, None] * (D - dim[None, :]) > 0)


@triton.jit
def _tile(
    tiles, fields, tokens, window, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
):  # fmt: skip
    """Of every query of a tile: its token, head in the group, prefix, and the last position before its window; 1 if
    it is one, and the tile's first and last slots. `fields`: see `PagedLayout`.
    """
    first, count = tl.load(tiles + 2 * tl.program_id(0)), tl.load(tiles + 2 * tl.program_id(0) + 1)
    query = tl.arange(0, BLOCK_M)
    valid = tl.where(query // GROUP < count, 1, 0)
    token = first + tl.minimum(query // GROUP, tl.maximum(count - 1, 0))
    prefix = tl.load(fields + 3 * tokens + token)
    end = tl.max(tl.load(fields + 5 * tokens + token), 0)
    least = tl.load(fields + 4 * tokens + token)
    begin = 0
    if WINDOW:
        least -= tl.load(fields + 2 * tokens + token) % window + 1 if CHUNKED else window
        begin = tl.maximum(tl.min(least, 0) + 1, 0) // BLOCK * BLOCK
    return token, query % GROUP, valid, prefix, least, begin, tl.where(count > 0, end, 0)


@triton.jit
def attend(
    q, k_cache, v_cache, k_scale, v_scale, table, fields, words, tiles, extra, out, parts, part_sums, tokens,
    head_blocks, width, splits, window, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr, WORDS: tl.constexpr, NUMBERS: tl.constexpr, ROTATED: tl.constexpr, EXTRA: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Attention of the tile of program 0 and the key-value head of program 1; without `FOLD`, over the part of program
    2 only, which `combine` joins with the others.

    q: `[t, HEADS, D]` rotated. k_cache, v_cache: `[kv heads, head_blocks, BLOCK, D]` of the layer, and their scales.
    table: `[rows, width]`. extra: `[HEADS]`, scores that join the softmax. out: `[t, HEADS, D]`. parts:
    `[tiles, kv heads, splits, BLOCK_M, D]`, part_sums with 2 numbers for D.
    """
    token, in_group, valid, prefix, least, begin, end = _tile(
        tiles, fields, tokens, window, GROUP, BLOCK_M, WINDOW, CHUNKED
    )
    if begin >= end:
        return
    kv_head, part = tl.program_id(1), tl.program_id(2)
    head, dim = kv_head * GROUP + in_group, tl.arange(0, BLOCK_D)
    in_head = kv_head.to(tl.int64) * head_blocks * BLOCK
    k_cache += in_head * D
    v_cache += in_head * D
    k_scale += in_head
    v_scale += in_head
    table += tl.load(fields + tl.min(token, 0)) * width
    place = (token * HEADS + head)[:, None] * D + dim[None, :]
    queries = tl.load(q + place, mask=valid[:, None] * (D - dim[None, :]) > 0, other=0)
    # Blocks before the first slot that is not in every prefix need no ancestors.
    plain = tl.min(prefix, 0) // BLOCK * BLOCK
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    first, last = (begin // SPLIT, tl.cdiv(end, SPLIT)) if FOLD else (part, part + 1)
    for number in range(first, last):
        start = tl.maximum(number * SPLIT, begin)
        stop = tl.minimum((number + 1) * SPLIT, end)
        middle = tl.minimum(tl.maximum(plain, start), stop)
        more = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        more_sums = tl.zeros([BLOCK_M], tl.float32)
        more_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        more, more_sums, more_peak = _add_blocks(
            more, more_sums, more_peak, queries, k_cache, v_cache, k_scale, v_scale, table, start, middle, prefix,
            least, words, token, scale, softcap, D, BLOCK_D, NUMBERS, SOFTCAP, False, WORDS, WINDOW,
        )  # fmt: skip
        more, more_sums, more_peak = _add_blocks(
            more, more_sums, more_peak, queries, k_cache, v_cache, k_scale, v_scale, table, middle, stop, prefix,
            least, words, token, scale, softcap, D, BLOCK_D, NUMBERS, SOFTCAP, True, WORDS, WINDOW,
        )  # fmt: skip
        if FOLD:
            total, sums, peak = _join(total, sums, peak, more, more_sums, more_peak)
        else:
            total, sums, peak = more, more_sums, more_peak
    if FOLD:
        _finish(total, sums, peak, out, extra, token, head, valid, HEADS, D, BLOCK_M, BLOCK_D, EXTRA, ROTATED)
    else:
        query = tl.arange(0, BLOCK_M)
        at = ((tl.program_id(0) * tl.num_programs(1) + kv_head).to(tl.int64) * splits + part) * BLOCK_M + query
        tl.store(parts + at[:, None] * D + dim[None, :], total, mask=valid[:, None] * (D - dim[None, :]) > 0)
        tl.store(part_sums + 2 * at, sums, mask=valid > 0)
        tl.store(part_sums + 2 * at + 1, peak, mask=valid > 0)


@triton.jit
def combine(
    fields, tiles, extra, out, parts, part_sums, tokens, splits, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr, ROTATED: tl.constexpr, EXTRA: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Join the parts that `attend` has written, in order."""
    token, in_group, valid, _, _, begin, end = _tile(tiles, fields, tokens, window, GROUP, BLOCK_M, WINDOW, CHUNKED)
    if begin >= end:
        return
    kv_head, dim, query = tl.program_id(1), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Parts that are loaded while others are sink: as many as registers hold.
    ahead: tl.constexpr = 4 if BLOCK_D == D and D <= 128 else 2
    for number in tl.range(begin // SPLIT, tl.cdiv(end, SPLIT), num_stages=ahead):
        at = ((tl.program_id(0) * tl.num_programs(1) + kv_head).to(tl.int64) * splits + number) * BLOCK_M + query
        more = tl.load(parts + at[:, None] * D + dim[None, :], mask=valid[:, None] * (D - dim[None, :]) > 0, other=0)
        more_sums = tl.load(part_sums + 2 * at, mask=valid > 0, other=0)
        more_peak = tl.load(part_sums + 2 * at + 1, mask=valid > 0, other=float("-inf"))
        total, sums, peak = _join(total, sums, peak, more, more_sums, more_peak)
    head = kv_head * GROUP + in_group
    _finish(total, sums, peak, out, extra, token, head, valid, HEADS, D, BLOCK_M, BLOCK_D, EXTRA, ROTATED)
