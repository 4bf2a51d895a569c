"""Rotary embedding of queries and keys, and the writing of keys and values into the blocks of the cache: one kernel."""

import triton
import triton.language as tl

from foretell.model.triton.attention import BLOCK
from foretell.model.triton.numbers import rotated, stored


@triton.jit
def _rotary(
    x, stride, head, token, valid, cos, sin,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One head of some tokens, its first `2 * HALF` numbers rotated in float32, in the dtype of `x`."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask, row = valid[:, None] & (dim < D), x + token[:, None] * stride + head * D
    own = tl.load(row + dim, mask=mask, other=0)
    if HALF:
        turned = dim < 2 * HALF
        other = tl.load(row + tl.where(dim < HALF, dim + HALF, dim - HALF), mask=mask & turned, other=0)
        angle = token[:, None] * HALF + dim % HALF
        c = tl.load(cos + angle, mask=mask & turned, other=1)
        s = tl.load(sin + angle, mask=mask & turned, other=0)
        signed = tl.where(dim < HALF, -other.to(tl.float32), other.to(tl.float32))
        own = tl.where(turned, (own.to(tl.float32) * c + signed * s).to(own.dtype), own)
    return own


@triton.jit
def write_pages(
    q, k, v, q_stride, k_stride, v_stride, cos, sin, factors, fields, table, q_out, k_cache, v_cache, k_scale,
    v_scale, tokens, head_blocks, width,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HALF: tl.constexpr, FACTORS: tl.constexpr, NUMBERS: tl.constexpr, ROTATED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Of `TOKENS` tokens (program 0), one head (program 1): the queries, then the keys, then the values.

    q, k, v: `[t, heads, D]` with a stride per token. cos, sin: `[t, HALF]`; HALF 0: not rotated. factors: `[t]` on the
    queries. q_out: `[t, HEADS, D]`, as `attend` reads them. The cache: see `attend`. A token in no slot (-1) writes
    nothing. `QUERIES` False: there are none.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, valid, dim = tl.program_id(1), token < tokens, tl.arange(0, BLOCK_D)
    if QUERIES:
        if head < HEADS:
            x = _rotary(q, q_stride, head, token, valid, cos, sin, TOKENS, D, BLOCK_D, HALF)
            if FACTORS:
                x = x * tl.load(factors + token, mask=valid, other=1).to(x.dtype)[:, None]
            x = x.to(q_out.dtype.element_ty)
            if NUMBERS:
                x = rotated(x.to(tl.float32), TOKENS, BLOCK_D, ROTATED).to(q_out.dtype.element_ty)
            place = (token * HEADS + head)[:, None] * D + dim[None, :]
            tl.store(q_out + place, x, mask=valid[:, None] & (dim[None, :] < D))
            return
        head -= HEADS
    slot = tl.load(fields + tokens + token, mask=valid, other=-1)
    held = valid & (slot >= 0)
    row = tl.load(fields + token, mask=held, other=0)
    block = tl.load(table + row * width + slot // BLOCK, mask=held, other=0).to(tl.int64)
    if head < KV_HEADS:
        x = _rotary(k, k_stride, head, token, valid, cos, sin, TOKENS, D, BLOCK_D, HALF)
        _write(x, k_cache, k_scale, head, block, slot, held, head_blocks, D, BLOCK_D, NUMBERS, ROTATED, TOKENS)
    else:
        head -= KV_HEADS
        x = _rotary(v, v_stride, head, token, valid, cos, sin, TOKENS, D, BLOCK_D, 0)
        _write(x, v_cache, v_scale, head, block, slot, held, head_blocks, D, BLOCK_D, NUMBERS, ROTATED, TOKENS)


@triton.jit
def _write(
    x, cache, scales, head, block, slot, held, head_blocks,
    D: tl.constexpr, BLOCK_D: tl.constexpr, NUMBERS: tl.constexpr, ROTATED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Keys or values of one head, in their slots."""
    dim = tl.arange(0, BLOCK_D)
    at = (head.to(tl.int64) * head_blocks + block) * BLOCK + slot % BLOCK
    if NUMBERS:
        numbers, scale = stored(rotated(x.to(tl.float32), TOKENS, BLOCK_D, ROTATED), NUMBERS)
        tl.store(scales + at, scale, mask=held)
    else:
        numbers = x.to(cache.dtype.element_ty)
    tl.store(cache + at[:, None] * D + dim[None, :], numbers, mask=held[:, None] & (dim[None, :] < D))
