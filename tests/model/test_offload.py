"""Targets under a memory limit: the budget holds, and the outputs stay the same."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foretell.accept import Match
from foretell.draft import DraftModel
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder, SkipSet
from foretell.model.block.layer import DecoderBlock
from foretell.model.load.build import build_block, build_without_blocks
from foretell.model.load.weights import SafetensorsWeights
from foretell.model.offload.block_store import BlockStore, OffloadedDecoder, weight_bytes
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.shape import Chain, LLMCadTree
from foretell.testing import TINY, RandomWeights
from helpers import VOCAB, all_logits, chain_tree, random_tokens, run, tokens_of

DEEP = replace(TINY, vocab=VOCAB, layers=6)
CPU = torch.device("cpu")


class BlockSource:
    """Random blocks; counts those fetched that are still referenced."""

    def __init__(self) -> None:
        self.weights = RandomWeights(0, 1.0)
        self.references = list[weakref.ref[DecoderBlock]]()
        self.peak = 0

    def fetch(self, i: int) -> DecoderBlock:
        block = build_block(DEEP, i, self.weights, torch.float64, CPU)
        self.references.append(weakref.ref(block))
        self.peak = max(self.peak, self.live)
        return block

    @property
    def live(self) -> int:
        return sum(ref() is not None for ref in self.references)

    def release(self) -> None:
        """Nothing to release."""


def outer_decoder() -> Decoder:
    return build_without_blocks(DEEP, RandomWeights(0, 1.0), torch.float64, CPU)


def offloaded(blocks: int, source: BlockSource | None = None) -> OffloadedDecoder[DecoderBlock]:
    """The deep model with a budget for this many blocks."""
    source, outer = source or BlockSource(), outer_decoder()
    budget = weight_bytes(outer) + blocks * weight_bytes(BlockSource().fetch(0))
    return OffloadedDecoder(outer, BlockStore(DEEP.layers, source.fetch, source.release, budget, weight_bytes(outer)))


def in_memory() -> Decoder:
    outer = outer_decoder()
    return Decoder(DEEP, outer.embedding.data, [BlockSource().fetch(i) for i in range(6)], outer.norm, outer.head)


def answers(network: Network, draft: bool) -> list[list[int]]:
    shape = LLMCadTree(6, 0.2) if draft else Chain(0)
    method = Method(DraftModel(DecoderRunner(in_memory().first_layers(3))), shape, Match())
    engine = Engine(DecoderRunner(network), method, rows=2)
    return [
        tokens_of(u) for u in run(engine, [Request(random_tokens(n, seed=n), max_new_tokens=12) for n in (3, 9, 5)])
    ]


@pytest.mark.parametrize("blocks", [1, pytest.param(3, marks=pytest.mark.exhaustive), 9])
def test_the_budget_holds_and_the_outputs_are_those_of_the_model_in_memory(blocks: int) -> None:
    network = offloaded(blocks)
    expected = answers(in_memory(), draft=False)
    assert answers(network, draft=False) == expected
    assert answers(network, draft=True) == expected
    store = network.store
    assert store.peak_bytes <= store.block_bytes * min(blocks, 6) + weight_bytes(outer_decoder())
    assert store.resident_blocks == (6 if blocks >= 6 else max(0, blocks - 3))


@pytest.mark.parametrize("blocks", [1, pytest.param(2, marks=pytest.mark.exhaustive), 4, 6])
def test_blocks_that_are_not_resident_are_dropped(blocks: int) -> None:
    source = BlockSource()
    network = offloaded(blocks, source)
    all_logits(network, [1, 2, 3])
    all_logits(network, [1, 2, 3])
    network.store.wait()
    gc.collect()
    assert source.peak <= blocks
    assert source.live == (6 if blocks == 6 else blocks - 1), "the next ones are there before they are asked for"
    kept = network.store.resident_blocks
    assert network.store.resident_bytes == weight_bytes(outer_decoder()) + kept * network.store.block_bytes


def test_fewer_passes_fetch_fewer_blocks() -> None:
    plain, fast = offloaded(1), offloaded(1)
    answers(plain, draft=False)
    answers(fast, draft=True)
    assert fast.store.fetch_count < plain.store.fetch_count


def test_hidden_states_are_those_of_the_model_in_memory() -> None:
    tokens, hidden_layers = random_tokens(7), (0, 2, 5, 6, 7)
    mine, theirs = (
        DecoderRunner(n).forward([0], chain_tree(tokens), hidden_layers=hidden_layers)
        for n in (offloaded(2), in_memory())
    )
    assert all(torch.equal(a, b) for a, b in zip(mine.hidden_states, theirs.hidden_states, strict=True))


def test_first_layers_and_skips_use_the_same_store() -> None:
    network, tokens = offloaded(2), random_tokens(7)
    skip = SkipSet(frozenset({1}), frozenset({2, 3}))
    for mine, theirs in (
        (network.first_layers(2), in_memory().first_layers(2)),
        (network.without_sublayers(skip), in_memory().without_sublayers(skip)),
    ):
        assert (all_logits(mine, tokens) == all_logits(theirs, tokens)).all()
        assert mine.store is network.store
    with pytest.raises(ValueError, match="cannot cut after 7"):
        network.first_layers(7)


def test_a_budget_without_room_for_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory limit of .* is too small: what stays in memory and one block"):
        offloaded(0)


def test_safetensors_can_be_released_and_read_again(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.arange(4.0)}, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(tmp_path)
    before = weights.require("model.norm.weight", 4).clone()
    weights.release_pages()
    assert torch.equal(weights.require("model.norm.weight", 4), before)
