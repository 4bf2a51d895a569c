"""Suffix arrays of token sequences, sorted up to the longest pattern that is looked up."""

import numpy as np
from jaxtyping import Bool, UInt32, UInt64

SEPARATOR = np.uint32(0xFFFFFFFF)
"""Follows every document. It is no token id, so no match and no continuation crosses it."""


def build_suffix_array(tokens: UInt32[np.ndarray, " t"], depth: int) -> UInt32[np.ndarray, " t"]:
    """Start positions of all suffixes, sorted by their first `depth` tokens or more. The last token is a separator.

    Prefix doubling (Manber & Myers 1993) that starts with as many tokens as fit 64 bits, sorts only suffixes that are
    still tied (Larsson & Sadakane 2007), and stops at `depth`. For a vocabulary of 2^16 this takes the time of about
    two sorts, and at most 20 bytes per token besides tokens and result.

    Raises:
        ValueError: 2^32 - 1 tokens or more.
    """
    if len(tokens) >= SEPARATOR:
        raise ValueError(f"a datastore holds fewer than 2^32 tokens, found {len(tokens)}: build several")
    key, compared = _pack(tokens)
    suffixes = np.argsort(key).astype(np.uint32)
    is_start = _run_starts(key[suffixes])
    rank = np.empty(len(tokens), np.uint32)
    rank[suffixes] = _run_leaders(np.arange(len(suffixes), dtype=np.uint32), is_start)
    while compared < depth:
        tied = np.flatnonzero(~(is_start & np.append(is_start[1:], True)))
        if not len(tied):
            break
        start = suffixes[tied]
        # After the end any rank is right: the separator before it has decided the order.
        key = (
            rank[start].astype(np.uint64) << np.uint64(32)
            | rank[np.minimum(start.astype(np.int64) + compared, len(tokens) - 1)]
        )
        order = np.argsort(key)
        start, key = start[order], key[order]
        suffixes[tied], is_start[tied] = start, _run_starts(key)
        rank[start] = _run_leaders(tied.astype(np.uint32), is_start[tied])
        compared *= 2
    return suffixes


def _pack(tokens: UInt32[np.ndarray, " t"]) -> tuple[UInt64[np.ndarray, " t"], int]:
    """The first tokens of every suffix in 64 bits, and their number; a separator is packed as the greatest id."""
    real = tokens[tokens != SEPARATOR]
    top = int(real.max(initial=0)) + 1
    bits = top.bit_length()
    small, key = np.minimum(tokens, np.uint32(top)), np.zeros(len(tokens), np.uint64)
    for i in range(64 // bits):
        key <<= np.uint64(bits)
        key[: max(len(key) - i, 0)] |= small[i:]
    return key, 64 // bits


def _run_starts(key: UInt64[np.ndarray, " k"]) -> Bool[np.ndarray, " k"]:
    """Whether a run of equal keys begins here."""
    out = np.ones(len(key), bool)
    np.not_equal(key[1:], key[:-1], out=out[1:])
    return out


def _run_leaders(place: UInt32[np.ndarray, " k"], leads: Bool[np.ndarray, " k"]) -> UInt32[np.ndarray, " k"]:
    """The index of the first element of each element's run."""
    return np.maximum.accumulate(np.where(leads, place, np.uint32(0)))
