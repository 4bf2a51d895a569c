"""Mixtures of experts under a limit of memory: the numbers stay the same, the limit holds, only what a pass needs is
read, and what is read ahead is used.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.accept import Match
from foretell.bench.random_file import random_model_file
from foretell.draft import NoDrafter, PromptLookup
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model import kernels as native
from foretell.model.config.model import MoEConfig
from foretell.model.kernels.expert_cache import ExpertBytes, ExpertCache, Key
from foretell.model.kernels.packed_file import PackedReader
from foretell.model.kernels.structures import Precision
from foretell.model.kernels.uncached_file import PAGE
from foretell.model.load import packed_cache
from foretell.model.load.expert_offload import ExpertOffload, ExpertOffloadedDecoder
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.native import finish_writing, packed_file
from foretell.model.load.network import build_network, build_streamed_network
from foretell.model.load.streamed import StreamedHead
from foretell.model.offload.block_store import OffloadedDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.shape import RootOnly, Trie
from foretell.testing import TINY
from helpers import chain_tree, random_tokens

CPU = torch.device("cpu")
EXPERTS = MoEConfig(count=12, active=3, ffn=96, layers=(0, 1, 2))
CONFIG = replace(
    TINY, architecture="mixtral", vocab=49152, hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, ffn=96, tied=True,
    experts=EXPERTS,
)  # fmt: skip
PRECISION: Precision = "int8-activations"
pytestmark = pytest.mark.skipif(not native.available(), reason=native.unavailable_reason() or "available")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretell.bench.random_file.find_model", lambda shape: (shape, CONFIG))
        return random_model_file("mixture", "Q8_0", tmp_path_factory.mktemp("models"))


@pytest.fixture
def weights(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GGUFWeights:
    """Weights in a mapped file, with a cache of packed weights of their own."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "WORTH_CACHING", 0)
    return GGUFWeights(GGUF(file), CONFIG)


@pytest.fixture
def resident(weights: GGUFWeights) -> Network:
    found = build_network(CONFIG, weights, PRECISION, CPU)
    finish_writing()
    return found


def limited(weights: GGUFWeights, experts: int) -> ExpertOffloadedDecoder:
    """The model with memory for this many experts."""
    found = build_streamed_network(CONFIG, weights, PRECISION, CPU, least(weights) + (experts - 1) * size(weights))
    assert isinstance(found, ExpertOffloadedDecoder)
    return found


def offload(weights: GGUFWeights) -> ExpertOffload:
    kept = packed_file(CONFIG, weights, PRECISION)
    assert kept is not None
    return ExpertOffload(CONFIG, weights, PRECISION, kept)


def least(weights: GGUFWeights) -> int:
    """The least limit."""
    found = offload(weights).build(0)
    assert isinstance(found, int)
    return found


def size(weights: GGUFWeights) -> int:
    return offload(weights).expert_bytes


def passes(network: Network) -> list[torch.Tensor]:
    """Logits of a prompt and of passes of several sizes after it."""
    runner, found = DecoderRunner(network), []
    for tokens, seed in ((20, 0), (1, 1), (1, 2), (6, 3)):
        found.append(runner.forward([0], chain_tree(random_tokens(tokens, CONFIG.vocab, seed))).logits)
        runner.commit(0, range(tokens))
    return found


@pytest.mark.parametrize(("threads", "memory"), [(1, (1, 2, 5, 14, 36, 50)), (2, (3, 20))])
def test_any_memory_gives_the_bits_of_the_model_in_memory(
    threads: int, memory: tuple[int, ...], weights: GGUFWeights, resident: Network
) -> None:
    expected = passes(resident)
    torch.set_num_threads(threads)
    try:
        for experts in memory:
            network = limited(weights, experts)
            for _ in range(2):
                assert all(torch.equal(a, b) for a, b in zip(passes(network), expected, strict=True))
            assert network.peak_bytes <= least(weights) + (experts - 1) * size(weights)
            assert network.cache.slots == min(experts, 36)
            if experts >= 36:
                assert network.reads.bytes <= 36 * size(weights), "what is in memory is not read again"
    finally:
        torch.set_num_threads(1)


def test_a_pass_reads_the_experts_of_its_tokens_and_those_that_are_predicted(weights: GGUFWeights) -> None:
    network = limited(weights, 36)
    runner, reads = DecoderRunner(network), network.reads
    output = runner.forward([0], chain_tree(random_tokens(2, CONFIG.vocab)))
    assert reads.needed == sum(output.experts) < 36
    assert reads.in_memory == 0 and reads.needed - reads.ahead + reads.read_ahead <= 36
    runner.truncate(0, 0)
    runner.forward([0], chain_tree(random_tokens(2, CONFIG.vocab)))
    assert reads.in_memory == reads.needed // 2, "the same tokens again find all their experts"


def test_hidden_states_first_layers_and_answers_are_those_of_the_model_in_memory(
    weights: GGUFWeights, resident: Network
) -> None:
    network, tokens = limited(weights, 9), random_tokens(7, CONFIG.vocab)
    mine, theirs = (
        DecoderRunner(n).forward([0], chain_tree(tokens), hidden_layers=(0, 1, 3)) for n in (network, resident)
    )
    assert all(torch.equal(a, b) for a, b in zip(mine.hidden_states, theirs.hidden_states, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(mine.routes, theirs.routes, strict=True))
    mine, theirs = (DecoderRunner(n.first_layers(2)).forward([0], chain_tree(tokens)) for n in (network, resident))
    assert torch.equal(mine.logits, theirs.logits)
    request = Request(tokens * 3, max_new_tokens=16)
    plain = Engine(DecoderRunner(resident), Method(NoDrafter(), RootOnly(), Match())).complete([request])
    for method in (Method(NoDrafter(), RootOnly(), Match()), Method(PromptLookup(2), Trie(8), Match())):
        assert Engine(DecoderRunner(network), method).complete([request])[0].tokens == plain[0].tokens


def test_routes_of_drafted_tokens_are_read_ahead(weights: GGUFWeights) -> None:
    network = limited(weights, 30)
    runner = DecoderRunner(network)
    for _ in range(2):
        runner.forward([0], chain_tree(random_tokens(4, CONFIG.vocab)))
        runner.truncate(0, 0)
        network.cache.wait()
    assert network.reads.read_ahead > 0
    assert network.reads.ahead > 0


def test_a_limit_that_holds_no_expert_is_refused_with_the_least(
    weights: GGUFWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="what stays in memory and one block alone take"):
        build_streamed_network(CONFIG, weights, PRECISION, CPU, 100_000)
    monkeypatch.setattr(StreamedHead, "supports", lambda reader: False)
    with pytest.raises(ValueError, match=r"limit of .* is too small: what all tokens need and one expert alone take"):
        build_streamed_network(CONFIG, weights, PRECISION, CPU, 100_000)


def test_what_all_tokens_need_does_not_fit_so_blocks_are_read_whole(weights: GGUFWeights, resident: Network) -> None:
    (path,) = packed_cache.cache_folder().glob("*.packed")
    _, norm, *blocks = PackedReader(path).sizes()
    limit = norm + max(blocks)
    assert limit < least(weights)
    found = build_streamed_network(CONFIG, weights, PRECISION, CPU, limit)
    assert isinstance(found, OffloadedDecoder)
    assert torch.equal(passes(found)[-1], passes(resident)[-1])


def test_damage_and_a_file_that_becomes_shorter_end_the_pass_with_a_sentence(
    weights: GGUFWeights, resident: Network
) -> None:
    experts = 4
    network = limited(weights, experts)
    (path,) = packed_cache.cache_folder().glob("*.packed")
    raw = bytearray(path.read_bytes())
    reader = PackedReader(path)
    raw[reader.description(2)["offset"] + reader.sizes()[2] - 2 * PAGE] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"damaged .*checksum of a layer with experts differs"):
        for seed in range(20):
            DecoderRunner(network).forward([0], chain_tree(random_tokens(30, CONFIG.vocab, seed)))
    shorter = limited(weights, experts)
    os.truncate(path, PAGE)
    with pytest.raises(OSError, match="truncated"):
        DecoderRunner(shorter).forward([0], chain_tree([1, 2, 3]))


class Source:
    """Experts of one page each, with the numbers of layer and expert in it."""

    def __init__(self, predicted: dict[int, list[int]]) -> None:
        self.read_keys, self.predicted = list[Key](), predicted

    def read(self, key: Key, target: memoryview) -> None:
        self.read_keys.append(key)

    def predict(self, layer: int, x: object) -> list[int]:
        return self.predicted.get(layer, [])


def run_layer(cache: ExpertCache, layer: int, wanted: list[int]) -> None:
    x = np.zeros((1, 4), np.float32)
    while wanted:
        done = cache._provide(layer, wanted, x)
        wanted = wanted[done:]
    cache.wait()


def cache_of(source: Source, slots: int) -> ExpertCache:
    layers = [[ExpertBytes(0, PAGE, []) for _ in range(8)] for _ in range(2)]
    return ExpertCache(layers, source.read, source.predict, 4, slots)


def test_layers_keep_their_most_used_experts() -> None:
    source = Source({})
    cache = cache_of(source, 6)
    for other in range(2, 8):
        run_layer(cache, 0, [0, other])
        run_layer(cache, 1, [1, other])
    assert source.read_keys.count((0, 0)) == source.read_keys.count((1, 1)) == 1
    assert cache.reads.needed == 24 and cache.reads.in_memory == 10


def test_what_was_read_ahead_counts_where_it_is_needed() -> None:
    source = Source({1: [3, 4]})
    cache = cache_of(source, 8)
    cache.begin_pass([5])
    cache.wait()
    run_layer(cache, 0, [5, 6])
    run_layer(cache, 1, [3, 7])
    assert (cache.reads.needed, cache.reads.in_memory, cache.reads.ahead, cache.reads.read_ahead) == (4, 0, 2, 3)
    assert sorted(source.read_keys) == [(0, 5), (0, 6), (1, 3), (1, 4), (1, 7)]
    assert cache.reads.ahead_share == 0.5


def test_more_experts_than_slots_run_in_rounds() -> None:
    source = Source({})
    cache = cache_of(source, 3)
    run_layer(cache, 0, list(range(8)))
    assert sorted(source.read_keys) == [(0, e) for e in range(8)]
    assert len(cache._slot) == 3
