"""Passes by spans of layers: bit for bit those of all layers at once, and keys and values filled later."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foretell.bench.replay import ReplayRunner
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.model import kernels
from foretell.model.block.decoder import BlockRange
from foretell.model.cache.layout import Layout
from foretell.model.config.states import ShortConvConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.offload.block_store import BlockStore, OffloadedDecoder, weight_bytes
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.partial_pass import check_spans
from foretell.model.run.runner import RunsLayers, required
from foretell.testing import TINY
from helpers import chain_tree, random_tokens, target, wide_target

LAYERS, PREFIX = 4, 7
TREE = tree_from_lists([[3, 5, 9, 4, 6], [8, 2, 2, 7, 1]], [[-1, 0, 0, 1, 3], [-1, 0, 1, 1, 3]])
native = pytest.param("native", marks=pytest.mark.skipif(not kernels.available(), reason="no compiler"))
networks = pytest.mark.parametrize("kind", ["torch", "offloaded", native])


def network_of(kind: str) -> Network:
    if kind == "native":
        return NativeDecoder(wide_target(layers=LAYERS), "float32")
    decoder = target(layers=LAYERS)
    if kind == "torch":
        return decoder
    shell = decoder.without_blocks(decoder.config, decoder.skip)
    store = BlockStore(LAYERS, decoder.block, lambda: None, 1 << 30, weight_bytes(shell))
    return OffloadedDecoder(shell, store)


def started(network: Network) -> DecoderRunner:
    """A runner that has read a text in two rows."""
    runner = DecoderRunner(network)
    for row in (0, 1):
        runner.forward([row], chain_tree(random_tokens(PREFIX + row, seed=row)))
        runner.commit(row, range(PREFIX + row))
    return runner


def keys(runner: DecoderRunner, row: int, length: int) -> list[torch.Tensor]:
    """Keys and values of a row in all layers."""
    store = runner.cache
    return [part for i in range(LAYERS) for part in store.read(i, torch.tensor([row]), length)]  # type: ignore[attr-defined]


def nodes(tree: TokenTree, *which: tuple[int, int]) -> np.ndarray:
    out = np.zeros(tree.token.shape, bool)
    for place in which:
        out[place] = True
    return out


@networks
def test_a_pass_by_spans_is_the_pass_of_all_layers(kind: str) -> None:
    network = network_of(kind)
    whole, spans = started(network), started(network)
    expected = whole.forward([0, 1], TREE, hidden_layers=[LAYERS, LAYERS + 1])
    begun = spans.begin_pass([0, 1], TREE)
    begun.advance(nodes(TREE, (0, 3)), 1)
    begun.advance(nodes(TREE, (1, 0), (1, 1)), 3)
    assert begun.depth.tolist() == [[1, 1, 0, 1, 0], [3, 3, 0, 0, 0]]
    begun.advance(nodes(TREE, (0, 1)), 2)
    found = spans.forward([0, 1], TREE, hidden_layers=[LAYERS, LAYERS + 1])
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-12)
    assert (found.logit_index == expected.logit_index).all()
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for runner in (whole, spans):
        runner.commit(0, [0, 1, 3, 4])
        runner.commit(1, [0, 1, 2])
    for row, length in ((0, PREFIX + 4), (1, PREFIX + 4)):
        for one, other in zip(keys(spans, row, length), keys(whole, row, length), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@networks
def test_the_layers_that_a_draft_has_run_are_not_run_again(kind: str) -> None:
    runner = started(network_of(kind))
    spans = list[tuple[int, int, int]]()
    inner = runner.network.run

    def run(x: torch.Tensor, layout: Layout, cache: object, blocks: BlockRange) -> object:
        spans.append((len(x), blocks.first, blocks.last))
        return inner(x, layout, cache, blocks)  # type: ignore[arg-type]

    runner.network.run = run  # type: ignore[assignment,method-assign]
    small = tree_from_lists([[3, 5]], [[-1, 0]])
    begun = runner.begin_pass([0], small)
    begun.advance(nodes(small, (0, 1)), 2)
    tree = tree_from_lists([[3, 5, 9]], [[-1, 0, 1]])
    begun.extend(tree)
    begun.advance(nodes(tree, (0, 1)), 2)
    runner.forward([0], tree)
    assert spans == [(2, 0, 2), (1, 0, 2), (3, 2, LAYERS)]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(tree_from_lists([[3, 6, 9]], [[-1, 0, 1]]), id="other token"),
        pytest.param(tree_from_lists([[3, 5, 9]], [[-1, 0, 0]]), id="other parent"),
        pytest.param(tree_from_lists([[4, 5, 9]], [[-1, 0, 1]]), id="other root"),
    ],
)
def test_nodes_that_have_changed_are_run_from_the_first_layer(changed: TokenTree) -> None:
    network, drafted = network_of("torch"), tree_from_lists([[3, 5, 9]], [[-1, 0, 1]])
    whole, spans = started(network), started(network)
    spans.begin_pass([0], drafted).advance(drafted.active, 2)
    expected, found = whole.forward([0], changed), spans.forward([0], changed)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("forget", ["commit", "truncate", "copy"])
def test_what_was_begun_is_forgotten_when_its_row_changes(forget: str) -> None:
    network = network_of("torch")
    runner, root = started(network), tree_from_lists([[3]], [[-1]])
    runner.begin_pass([1], root).advance(root.active, 3)
    if forget == "commit":
        runner.forward([0], root)
        runner.begin_pass([1], root).advance(root.active, LAYERS)
        runner.commit(1, [0])
    elif forget == "truncate":
        runner.truncate(1, PREFIX - 2)
    else:
        runner.copy_row(0, 1, PREFIX)
    fresh = DecoderRunner(network)
    text = random_tokens(PREFIX + 1, seed=1)
    text = [*text, 3] if forget == "commit" else text[: PREFIX - 2]
    text = random_tokens(PREFIX, seed=0) if forget == "copy" else text
    fresh.forward([0], chain_tree(text))
    fresh.commit(0, range(len(text)))
    expected, found = fresh.forward([0], root), runner.forward([1], root)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-10)


@networks
def test_copied_states_give_the_keys_of_all_layers_above(kind: str) -> None:
    """Copied rows equal the projection of the exit state exactly (CALM); the next token attends to them."""
    network = network_of(kind)
    runner, other = started(network), started(network)
    tree = tree_from_lists([[3, 5]], [[-1, 0]])
    begun = runner.begin_pass([0], tree)
    state = begun.advance(nodes(tree, (0, 0)), 2).states
    begun.fill(nodes(tree, (0, 0)))
    first = nodes(tree, (0, 0))
    layout, _ = Layout.from_tree(tree, [0], np.array([PREFIX]), first)
    other.begin_pass([0], tree).advance(first, 2)
    for layer in (2, 3):
        network.run(state, layout, other.cache, BlockRange(layer, layer + 1))
    for one, expected in zip(keys(runner, 0, PREFIX + 1), keys(other, 0, PREFIX + 1), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)
    output = runner.forward([0], tree, scored=nodes(tree, (0, 1)))
    assert output.logit_index.tolist() == [[-1, 0]]
    runner.commit(0, [0, 1])
    assert runner.length(0) == PREFIX + 2
    exact = started(network).forward([0], tree).logits[1:]
    assert not torch.allclose(output.logits, exact, rtol=0, atol=1e-6)


def test_the_logits_of_a_filled_node_are_those_of_all_layers() -> None:
    network, tree = network_of("torch"), tree_from_lists([[3, 5]], [[-1, 0]])
    runner = started(network)
    begun = runner.begin_pass([0], tree)
    begun.advance(nodes(tree, (0, 0)), 2)
    begun.fill(nodes(tree, (0, 0)))
    expected, found = started(network).forward([0], tree), runner.forward([0], tree)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-12)


def test_models_without_keys_of_their_own_per_layer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^early exit needs layers with keys .* has recurrent states; use another"):
        check_spans(replace(TINY, state=ShortConvConfig((0,), channels=16, taps=3)))
    with pytest.raises(ValueError, match=r"^early exit needs a model of the own decoder"):
        required(ReplayRunner(TINY.vocab, 256), RunsLayers, "early exit needs a model of the own decoder")
    check_spans(TINY)
