"""Weights that are read from disk in every pass: the numbers stay the same, the limit holds, and errors are told."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretell.bench.random_file import random_model_file
from foretell.model import kernels as native
from foretell.model.kernels import uncached_file
from foretell.model.kernels.packed_file import PackedReader
from foretell.model.kernels.uncached_file import PAGE, UncachedFile
from foretell.model.load import packed_cache
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.native import finish_writing
from foretell.model.load.network import build_network, build_streamed_network
from foretell.model.offload.block_store import BlockStore, OffloadedDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.testing import TINY
from helpers import chain_tree, random_tokens

CPU = torch.device("cpu")
CONFIG = replace(TINY, vocab=49152, hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, ffn=96, tied=True)
needs_kernels = pytest.mark.skipif(not native.available(), reason=native.unavailable_reason() or "available")


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GGUFWeights:
    """Weights in a mapped file, with a cache of packed weights of their own."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "WORTH_CACHING", 0)
    monkeypatch.setattr("foretell.bench.random_file.find_model", lambda shape: (shape, CONFIG))
    return GGUFWeights(GGUF(random_model_file("small", "Q8_0", tmp_path)), CONFIG)


def scores(network: Network) -> torch.Tensor:
    logits: torch.Tensor = DecoderRunner(network).forward([0], chain_tree(random_tokens(20))).logits
    return logits


def limited(weights: GGUFWeights, limit: int) -> OffloadedDecoder[object]:
    found = build_streamed_network(CONFIG, weights, "int8-activations", CPU, limit)
    assert isinstance(found, OffloadedDecoder)
    return found


def sizes(weights: GGUFWeights) -> list[int]:
    """Bytes of the parts of the packed weights: head, norm and blocks."""
    build_network(CONFIG, weights, "int8-activations", CPU)
    finish_writing()
    (path,) = packed_cache.cache_folder().glob("*.packed")
    return PackedReader(path).sizes()


@needs_kernels
def test_every_limit_gives_the_bits_of_the_model_in_memory_and_holds(weights: GGUFWeights) -> None:
    head, norm, *blocks = sizes(weights)
    expected = scores(build_network(CONFIG, weights, "int8-activations", CPU))
    least, all_bytes = norm + max(blocks), head + norm + sum(blocks)
    for limit in (least, least + max(blocks), head + norm + 2 * max(blocks), all_bytes // 4, all_bytes // 2, all_bytes):
        network = limited(weights, max(least, limit))
        for _ in range(2):
            assert torch.equal(scores(network), expected)
        assert network.store.peak_bytes <= max(least, limit)
        in_memory = network.store.fetch_count <= len(blocks)
        assert in_memory == (limit == all_bytes)
    with pytest.raises(ValueError, match=r"limit of .* is too small: what stays in memory and one block alone take"):
        limited(weights, least - PAGE)


@needs_kernels
def test_a_head_that_does_not_fit_is_read_in_pieces(weights: GGUFWeights) -> None:
    head, norm, *blocks = sizes(weights)
    streamed, resident = limited(weights, 4 * max(blocks)), limited(weights, head + norm + 2 * max(blocks))
    assert streamed.store.count > resident.store.count == CONFIG.layers
    assert streamed.store.resident_bytes < head
    assert torch.equal(scores(streamed.first_layers(2)), scores(resident.first_layers(2)))


@needs_kernels
@pytest.mark.parametrize("part", ["head", "block"])
def test_a_damaged_part_is_refused(part: str, weights: GGUFWeights) -> None:
    head, norm, *blocks = sizes(weights)
    (path,) = packed_cache.cache_folder().glob("*.packed")
    raw = bytearray(path.read_bytes())
    raw[PAGE + (1000 if part == "head" else head + norm + 1000)] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=f"damaged .*{'head' if part == 'head' else 'part'}'s checksum differs"):
        scores(limited(weights, 3 * max(blocks)))


@needs_kernels
def test_a_file_that_becomes_shorter_ends_the_pass_with_a_sentence(weights: GGUFWeights) -> None:
    blocks = sizes(weights)[2:]
    network = limited(weights, 3 * max(blocks))
    scores(network)
    (path,) = packed_cache.cache_folder().glob("*.packed")
    os.truncate(path, PAGE)
    with pytest.raises(OSError, match="truncated"):
        scores(network)


@pytest.mark.parametrize("direct", [True, False])
def test_reads_past_the_page_cache_give_the_bytes_of_the_file(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(uncached_file, "_DIRECT", 0)
    raw = os.urandom(5 * PAGE)
    (tmp_path / "file").write_bytes(raw)
    file = UncachedFile(tmp_path / "file")
    assert file.is_direct <= direct
    assert file.read(PAGE, 3 * PAGE).numpy().tobytes() == raw[PAGE : 4 * PAGE]
    with pytest.raises(OSError, match="truncated, 4096 bytes are missing"):
        file.read(4 * PAGE, 2 * PAGE)


class Part:
    """A part of one byte."""

    nbytes = 1

    def __init__(self, number: int) -> None:
        self.number = number


def test_the_next_parts_are_read_while_one_runs() -> None:
    read = list[int]()

    def fetch(i: int) -> Part:
        read.append(i)
        return Part(i)

    store = BlockStore(6, fetch, lambda: None, 5, 0, [1] * 6)
    assert store.resident_blocks == 2
    first, second = ([[0, 2, 3], [1], [4], [5], [2], [3]], [[], [], [4], [5], [2], [3]])
    for asked, expected in zip([*range(6), *range(6)], first + second, strict=True):
        read.clear()
        assert store.get(asked).number == asked
        store.wait()
        assert read == expected, f"after part {asked}"


def test_parts_in_another_order_are_the_right_ones() -> None:
    store = BlockStore(6, Part, lambda: None, 4, 0, [1] * 6)
    for i in (0, 1, 4, 2, 2, 5, 0, 3):
        assert store.get(i).number == i


def test_an_error_of_the_disk_reaches_who_asks_for_the_part() -> None:
    def fetch(i: int) -> Part:
        if i == 3:
            raise OSError(5, "Input/output error")
        return Part(i)

    store = BlockStore(5, fetch, lambda: None, 3, 0, [1] * 5)
    for i in range(3):
        store.get(i)
    with pytest.raises(OSError, match="Input/output error"):
        store.get(3)
    assert store.get(4).number == 4, "what was read after it is still there"
