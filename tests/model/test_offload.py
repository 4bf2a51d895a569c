"""Targets under a memory limit: the budget holds, and the text stays the same."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foretell.accept import Match
from foretell.draft import DraftModel
from foretell.engine.engine import Engine, Request
from foretell.engine.method import Method
from foretell.model.decoder import Decoder, DecoderBlock, SkipSet
from foretell.model.load.weights import SafetensorsWeights, build_block, build_without_blocks
from foretell.model.offload import BlockStore, OffloadedDecoder, weight_bytes
from foretell.model.runner import DecoderRunner, Network
from foretell.shape import Chain, LLMCadTree
from foretell.testing import TINY, RandomWeights
from helpers import VOCAB, all_logits, chain_tree, random_tokens, run, tokens_of

DEEP = replace(TINY, vocab=VOCAB, layers=6)
CPU = torch.device("cpu")


class Shelf:
    """Random blocks, and how many of those handed out are still held by someone."""

    def __init__(self) -> None:
        self.weights = RandomWeights(0, 1.0)
        self.handed = list[weakref.ref[DecoderBlock]]()
        self.most = 0

    def fetch(self, i: int) -> DecoderBlock:
        block = build_block(DEEP, i, self.weights, torch.float64, CPU)
        self.handed.append(weakref.ref(block))
        self.most = max(self.most, self.held)
        return block

    @property
    def held(self) -> int:
        return sum(ref() is not None for ref in self.handed)

    def release(self) -> None:
        """Nothing to give back."""


def shell() -> Decoder:
    return build_without_blocks(DEEP, RandomWeights(0, 1.0), torch.float64, CPU)


def streamed(blocks: int, shelf: Shelf | None = None) -> OffloadedDecoder[DecoderBlock]:
    """The deep model with room for this many blocks."""
    shelf, outer = shelf or Shelf(), shell()
    budget = weight_bytes(outer) + blocks * weight_bytes(Shelf().fetch(0))
    return OffloadedDecoder(outer, BlockStore(DEEP.layers, shelf.fetch, shelf.release, budget, weight_bytes(outer)))


def whole() -> Decoder:
    outer = shell()
    return Decoder(DEEP, outer.embedding.data, [Shelf().fetch(i) for i in range(6)], outer.norm, outer.head)


def answers(network: Network, draft: bool) -> list[list[int]]:
    shape = LLMCadTree(6, 0.2) if draft else Chain(0)
    method = Method(DraftModel(DecoderRunner(whole().first_layers(3))), shape, Match())
    engine = Engine(DecoderRunner(network), method, rows=2)
    return [
        tokens_of(u) for u in run(engine, [Request(random_tokens(n, seed=n), max_new_tokens=12) for n in (3, 9, 5)])
    ]


@pytest.mark.parametrize("blocks", [1, 3, 9])
def test_the_budget_holds_and_the_text_is_that_of_the_whole_model(blocks: int) -> None:
    network = streamed(blocks)
    expected = answers(whole(), draft=False)
    assert answers(network, draft=False) == expected
    assert answers(network, draft=True) == expected
    store = network.store
    assert store.peak_bytes <= store.block_bytes * min(blocks, 6) + weight_bytes(shell())
    assert store.resident_blocks == (6 if blocks >= 6 else blocks - 1)


@pytest.mark.parametrize("blocks", [1, 2, 4, 6])
def test_passing_blocks_are_let_go(blocks: int) -> None:
    shelf = Shelf()
    network = streamed(blocks, shelf)
    all_logits(network, [1, 2, 3])
    all_logits(network, [1, 2, 3])
    gc.collect()
    assert shelf.most <= blocks
    assert shelf.held == (6 if blocks == 6 else blocks - 1)
    assert network.store.resident_bytes == weight_bytes(shell()) + shelf.held * network.store.block_bytes


def test_fewer_passes_fetch_fewer_blocks() -> None:
    plain, fast = streamed(1), streamed(1)
    answers(plain, draft=False)
    answers(fast, draft=True)
    assert fast.store.fetch_count < plain.store.fetch_count


def test_taps_are_those_of_the_whole_model() -> None:
    text, hidden_layers = random_tokens(7), (0, 2, 5, 6, 7)
    mine, theirs = (
        DecoderRunner(n).forward([0], chain_tree(text), hidden_layers=hidden_layers) for n in (streamed(2), whole())
    )
    assert all(torch.equal(a, b) for a, b in zip(mine.hidden_states, theirs.hidden_states, strict=True))


def test_cut_and_skipping_use_the_same_store() -> None:
    network, text = streamed(2), random_tokens(7)
    skip = SkipSet(frozenset({1}), frozenset({2, 3}))
    for mine, theirs in (
        (network.first_layers(2), whole().first_layers(2)),
        (network.without_sublayers(skip), whole().without_sublayers(skip)),
    ):
        assert (all_logits(mine, text) == all_logits(theirs, text)).all()
        assert mine.store is network.store
    with pytest.raises(ValueError, match="cannot cut after 7"):
        network.first_layers(7)


def test_a_budget_without_room_for_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory limit of .* is too small: embedding, head and one block"):
        streamed(0)


def test_safetensors_can_be_released_and_read_again(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.arange(4.0)}, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(tmp_path)
    before = weights.require("model.norm.weight", 4).clone()
    weights.release_pages()
    assert torch.equal(weights.require("model.norm.weight", 4), before)
