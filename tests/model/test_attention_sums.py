"""Sums of attention weights: against whole matrices, with rejected drafts, copied rows and forgotten tokens."""

import numpy as np
import pytest
import torch

from foretell.core.tree import tree_from_lists
from foretell.model import kernels
from foretell.model.cache.attention_sums import AttentionSums
from foretell.model.cache.kv_cache import KVCache
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.compact_runner import observe_queries
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from helpers import chain_tree, random_tokens, wide_target

native = pytest.param("native", marks=pytest.mark.skipif(not kernels.available(), reason="no compiler"))
TEXT = random_tokens(150, seed=8)


def matrix_sums(network: Network, tokens: list[int]) -> torch.Tensor:
    """Sums of the columns of the whole attention matrices, from one pass over the text and plain loops."""
    runner, n, c = DecoderRunner(network), len(tokens), network.config
    runner.forward([0], chain_tree(tokens))
    runner.commit(0, range(n))
    queries = observe_queries(runner, 0, tokens, n)
    assert isinstance(runner.cache, KVCache)
    out = torch.zeros(c.layers, c.kv_heads, n)
    for layer in range(c.layers):
        keys = runner.cache.read_keys(layer, torch.tensor([0]), n)[0]
        for t in range(n):
            for g in range(c.kv_heads):
                for query in queries[layer, t, g]:
                    out[layer, g, : t + 1] += (keys[g, : t + 1] @ query).softmax(0)
    return out


def recording(network: Network) -> tuple[DecoderRunner, AttentionSums]:
    runner = DecoderRunner(network)
    runner.record_attention()
    assert runner.attention_sums is not None
    return runner, runner.attention_sums


def network_of(kind: str) -> Network:
    return NativeDecoder(wide_target(), "float32") if kind == "native" else wide_target()


@pytest.mark.parametrize("kind", ["torch", native])
def test_sums_are_those_of_the_attention_matrix_whatever_the_passes(kind: str) -> None:
    network = network_of(kind)
    runner, sums = recording(network)
    expected = matrix_sums(network, TEXT)
    for at in range(0, 90, 30):
        runner.forward([0], chain_tree(TEXT[at : at + 30]))
        runner.commit(0, range(30))
    for at in range(90, len(TEXT), 2):  # the second branch of a tree is the text
        tree = tree_from_lists([[TEXT[at], 3, 4, TEXT[at + 1]]], [[-1, 0, 1, 0]])
        runner.forward([0], tree)
        runner.commit(0, [0, 3])
    assert runner.length(0) == len(TEXT)
    torch.testing.assert_close(sums.of(0, len(TEXT)), expected, rtol=1e-4, atol=1e-4)
    # Every query gives each head a weight of 1 in all.
    assert sums.of(0, len(TEXT)).sum(2).numpy() == pytest.approx(2 * len(TEXT), rel=1e-5)


def test_rows_are_copied_and_cut_with_their_sums() -> None:
    runner, sums = recording(wide_target())
    for start, count in ((0, 40), (40, 10)):
        runner.forward([0], chain_tree(TEXT[start : start + count]))
        runner.commit(0, range(count))
    whole = sums.of(0, 50)
    assert runner.copy_row(0, 1, 30)
    torch.testing.assert_close(sums.of(1, 30), whole[:, :, :30], rtol=0, atol=0)
    runner.truncate(0, 45)
    runner.forward([0], chain_tree(TEXT[45:60]))
    runner.truncate(0, 42)  # forgets the pass, too
    runner.forward([0], chain_tree(TEXT[42:44]))
    runner.commit(0, range(2))
    assert torch.equal(sums.of(0, 44)[:, :, 44:], torch.zeros(2, 2, 0))
    assert float(sums.of(0, 44)[:, :, :42].sum()) > float(whole[:, :, :42].sum()), "later tokens add to earlier keys"
    assert np.all(sums.of(0, 60)[:, :, 44:].numpy() == 0)
