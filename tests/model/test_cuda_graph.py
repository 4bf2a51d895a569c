"""Captured passes of padded, static shapes equal the decoder's passes."""

from dataclasses import replace

import torch

from foretell.accept import Match
from foretell.draft import TokenRecycling
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.run.cuda_graph import GraphedDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.shape import Trie
from foretell.testing import TINY, tiny_decoder
from helpers import chain_tree

CONFIG = replace(TINY, vocab=23, window=6, window_layers=(1,))


def _generate(network: Network) -> list[list[int]]:
    engine = Engine(DecoderRunner(network), Method(TokenRecycling(CONFIG.vocab), Trie(6), Match()), rows=3)
    numbers = [engine.submit(Request(list(range(1, n)), max_new_tokens=25)) for n in (4, 9, 15, 3)]
    tokens: dict[int, list[int]] = {n: [] for n in numbers}
    for update in engine.run():
        tokens[update.request] += update.tokens
    return list(tokens.values())


def test_static_passes_generate_what_the_decoder_generates() -> None:
    decoder = tiny_decoder(CONFIG)
    assert _generate(GraphedDecoder(decoder)) == _generate(decoder)


def test_few_shapes_serve_all_steps() -> None:
    graphed = GraphedDecoder(tiny_decoder(CONFIG))
    _generate(graphed)
    assert len(graphed._passes) <= 12


def test_a_decoder_of_the_first_layers_is_static_too() -> None:
    decoder = tiny_decoder(CONFIG)
    assert torch.equal(
        torch.tensor(_generate(GraphedDecoder(decoder).first_layers(1))),
        torch.tensor(_generate(decoder.first_layers(1))),
    )


def test_static_passes_return_hidden_states() -> None:
    """Passes of several sizes: no pass returns the tensors of another."""
    decoder = tiny_decoder(CONFIG)
    plain, static = DecoderRunner(decoder), DecoderRunner(GraphedDecoder(decoder))
    for tokens in ([1, 2, 3], [4], [5, 6, 7, 8, 9], [1]):
        for hidden_layers in ((0, 1), (2, 3, 1), ()):
            expected, found = (r.forward([0], chain_tree(tokens), hidden_layers=hidden_layers) for r in (plain, static))
            torch.testing.assert_close(found.logits, expected.logits)
            assert len(found.hidden_states) == len(hidden_layers)
            for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
                torch.testing.assert_close(mine, theirs)
        for runner in (plain, static):
            runner.commit(0, range(len(tokens)))
