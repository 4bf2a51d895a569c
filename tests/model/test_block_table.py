"""The blocks of a paged cache: rows share full ones, and write to blocks of their own only."""

import numpy as np
import pytest
import torch

from foretell.model.cache.base import LayeredCache
from foretell.model.cache.block_table import BLOCK_SLOTS, BlockTable, OutOfBlocksError, blocks_for
from foretell.model.cache.kv_cache import KVCache


def filled(row_lengths: dict[int, int], limit: int | None = None) -> KVCache:
    """A cache whose keys are `1000 * row + slot`."""
    cache = KVCache(2, 1, 1, torch.float32, torch.device("cpu"))
    cache.blocks.limit = limit
    for row, length in row_lengths.items():
        write(cache, row, 0, length, 1000 * row)
    return cache


def write(cache: KVCache, row: int, first: int, last: int, offset: int) -> None:
    cache.reserve([row], [last])
    slot = torch.arange(first, last)
    for layer in range(2):
        cache.write(layer, torch.full_like(slot, row), slot, *2 * [(offset + slot).float()[:, None, None]])


def keys(cache: KVCache, row: int, length: int) -> list[int]:
    found = [cache.read(layer, torch.tensor([row]), length)[0].flatten().tolist() for layer in range(2)]
    assert found[0] == found[1]
    return list(map(int, found[0]))


@pytest.mark.parametrize("length", [1, BLOCK_SLOTS - 1, BLOCK_SLOTS, BLOCK_SLOTS + 1, 2 * BLOCK_SLOTS, 150])
def test_a_copied_row_has_the_tokens_and_shares_the_full_blocks(length: int) -> None:
    cache = filled({0: 150})
    before = cache.blocks.blocks_in_use
    cache.copy_row(0, 3, length)
    assert keys(cache, 3, length) == list(range(length))
    assert cache.blocks.blocks_in_use == before + (length % BLOCK_SLOTS > 0)


def test_what_one_row_writes_the_other_does_not_see() -> None:
    cache = filled({0: 150})
    cache.copy_row(0, 1, 130)
    write(cache, 1, 130, 200, 5000)
    write(cache, 0, 150, 160, 7000)
    cache.truncate(0, 70)  # into a shared block
    write(cache, 0, 70, 140, 9000)
    assert keys(cache, 1, 200) == [*range(130), *range(5130, 5200)]
    assert keys(cache, 0, 140) == [*range(70), *range(9070, 9140)]


def test_going_back_within_the_last_shared_block_copies_it() -> None:
    cache = filled({0: 128})
    cache.copy_row(0, 1, 128)
    cache.truncate(1, 100)
    write(cache, 1, 100, 120, 5000)
    assert keys(cache, 0, 128) == list(range(128))
    assert keys(cache, 1, 120) == [*range(100), *range(5100, 5120)]


def test_blocks_come_back_when_their_last_row_ends() -> None:
    cache = filled({0: 200})
    cache.copy_row(0, 1, 200)
    cache.truncate(0, 0)
    assert keys(cache, 1, 200) == list(range(200))
    cache.truncate(1, 0)
    assert cache.blocks.blocks_in_use == 0
    write(cache, 2, 0, 250, 0)
    assert cache.blocks.blocks == 5  # the four of row 0 and the copy serve again


@pytest.mark.parametrize("seed", range(4))
def test_any_history_keeps_the_tokens_of_every_row_and_counts_the_blocks_that_rows_hold(seed: int) -> None:
    """Blocks that no row holds are no numbers, and none of these is ever read."""
    rng, cache, texts = np.random.default_rng(seed), filled(dict.fromkeys(range(4), 1)), [[1000 * r] for r in range(4)]
    for step in range(4, 100):
        row, source, length = (int(rng.integers(n)) for n in (4, 4, 300))
        text = texts[row]
        if text and rng.random() < 0.5:
            del text[length:]
            cache.truncate(row, len(text))
        elif not text and texts[source]:
            text += texts[source][:length]
            cache.copy_row(source, row, len(text))
        else:
            first = len(text)
            text += range(1000 * step + first, 1000 * step + first + 1 + length % 90)
            write(cache, row, first, len(text), 1000 * step)
        held = {block for r, t in enumerate(texts) for block in cache.blocks.table[r, : blocks_for(len(t))].tolist()}
        assert cache.blocks.blocks_in_use == len(held)
        cache.k[:, :, [block for block in range(cache.blocks.blocks) if block not in held]] = torch.nan
        assert all(keys(cache, r, len(t)) == t for r, t in enumerate(texts))
    for row in range(4):
        cache.truncate(row, 0)
    assert cache.blocks.blocks_in_use == 0


def test_a_limited_cache_refuses_what_it_has_no_blocks_for_and_changes_nothing() -> None:
    cache = filled({0: 64, 1: 64}, limit=3)
    assert cache.free_slots == 64
    with pytest.raises(OutOfBlocksError, match="needs room for 64 more tokens"):
        cache.reserve([0, 1], [65, 65])
    assert cache.blocks.blocks_in_use == 2
    cache.reserve([0], [128])
    with pytest.raises(OutOfBlocksError, match="room for 64 more"):
        cache.copy_row(0, 2, 70)
    assert keys(cache, 0, 64) == list(range(64))


def test_only_an_empty_row_takes_shared_blocks_and_only_those_that_exist() -> None:
    blocks = BlockTable()
    blocks.extend(0, 100)
    with pytest.raises(ValueError, match="row 0 has room for 128 tokens: 129 cannot be shared"):
        blocks.share(0, 1, 129)
    blocks.extend(1, 1)
    with pytest.raises(ValueError, match="row 1 holds 1 blocks"):
        blocks.share(0, 1, 64)


def test_stores_of_different_sizes_have_as_many_blocks_each() -> None:
    sizes = ((2, 1, 1), (1, 4, 8), (0, 2, 2))
    stores = [KVCache(*size, torch.float32, torch.device("cpu")) for size in sizes]
    cache = LayeredCache(stores, [(0, 0), (1, 0), (0, 1)])
    cache.limit(3 * cache.block_bytes)
    assert cache.free_slots == 3 * BLOCK_SLOTS
    with pytest.raises(OutOfBlocksError):
        cache.reserve([0], [4 * BLOCK_SLOTS])
    cache.reserve([0], [3 * BLOCK_SLOTS])
    assert cache.free_slots == 0 and cache.nbytes == 3 * cache.block_bytes
