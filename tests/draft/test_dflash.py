"""DFlash: blocks see the features before their anchor and themselves, drafting is the forward pass of training, and the
kernels grow the same trees.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from foretell.accept import Match, Rejection
from foretell.catalogue.one_pass import dflash_method
from foretell.catalogue.options.feature_level import DFlashOptions
from foretell.core.sampling import SamplingParams
from foretell.core.tree import tree_from_lists
from foretell.draft import DFlashDrafter
from foretell.draft.base import Predictor
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model import kernels as native
from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, DynamicTree, FixedTree, Shape
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.block_layer import TwoTapConvolution
from foretell.speculator.network.correction_base import Nodes
from foretell.speculator.network.dflash import BlockPredictions, DFlash, DFlashConfig, even_layers
from foretell.speculator.network.pack import DraftPrecision, pack_network
from foretell.testing import TINY, tiny_decoder
from helpers import (
    VOCAB,
    after_prompt,
    chain_tree,
    context_of,
    drafted_paths,
    exact_distribution,
    generate,
    p_value,
    random_tokens,
    target,
    unchecked,
)

HEADS: dict[str, dict[str, Any]]
HEADS = {"plain": {}, "markov": {"markov_rank": 3}, "all": {"markov_rank": 3, "confidence": True, "fc_norm": True}}
HEADS |= {"convolution": {"markov_rank": 3, "convolution": True}}
HEADS |= {
    "from anchor": {"window": 3, "window_layers": (1,), "window_from_anchor": True, "window_causal": True},
    "from slot": {"window": 3, "window_layers": (0, 1), "sink_layers": (0,)},
    "causal": {"window": 6, "window_layers": (0,), "window_causal": True, "sink_layers": (0, 1)},
}
HEADS |= {
    "selector": {"correction": {"kind": "selector", "rank": 4, "candidates": 5}, "convolution": True},
    "domino": {"correction": {"kind": "domino", "inner": 6, "rank": 4}},
    "refiner": {"correction": {"kind": "refiner", "rank": 4}, "draft_vocab": 20},
    "lattice": {
        "correction": {"kind": "lattice", "candidates": 4, "width": 12, "heads": 2, "factors": 5, "mlp_ratio": 1.5}
    },
}
HEADS = {name: {"draft_vocab": None, **heads} if "correction" in heads else heads for name, heads in HEADS.items()}
every_network = pytest.mark.parametrize("heads", HEADS)


@cache
def network_of(heads: str = "all", vocab: int = VOCAB, subset: int | None = 20, from_anchor: bool = False) -> DFlash:
    """Random weights in float64."""
    card = TargetInfo(name="tiny", hidden=TINY.hidden, vocab=vocab, layers=2)
    config = DFlashConfig.model_validate(
        {"target": card, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 24, "context": 256, "block_size": 5}
        | {"draft_vocab": subset, "hidden_layers": (0, 1, 3), "predicts_from_anchor": from_anchor, **HEADS[heads]}
    )
    return drawn(
        config, EmbeddingAndHead(target(vocab).embedding.detach(), target(vocab).head.weight.detach())
    ).double()


def drawn(config: DFlashConfig, embedding_and_head: EmbeddingAndHead) -> DFlash:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = DFlash(config, embedding_and_head)
        for parameter in network.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    if config.draft_vocab is not None:
        network.set_draft_vocab(torch.arange(config.target.vocab)[1 : 1 + config.draft_vocab])
    return network


def features_of(network: DFlash, text: Sequence[int], vocab: int = VOCAB) -> list[torch.Tensor]:
    output = DecoderRunner(target(vocab)).forward([0], chain_tree(text), hidden_layers=network.hidden_layers)
    return [f[None].clone() for f in output.hidden_states]


def predictions(
    network: DFlash, text: Sequence[int], anchors: Sequence[int], features: list[torch.Tensor] | None = None
) -> BlockPredictions:
    """The forward pass of training, all places of all blocks."""
    wanted = torch.ones(1, len(anchors), network.depth, dtype=torch.bool)
    states = features_of(network, text) if features is None else features
    found: BlockPredictions = network(torch.tensor([text]), states, torch.tensor([anchors]), wanted)
    return found


@pytest.mark.parametrize("heads", ["all", "convolution"])
def test_a_block_sees_the_features_before_its_anchor_and_all_of_itself(heads: str) -> None:
    network, text, anchors = network_of(heads), random_tokens(15, seed=1), [4, 9]
    features = features_of(network, text)
    logits = predictions(network, text, anchors, features).logits
    for position, changed in ((3, [True, True]), (4, [False, True]), (8, [False, True]), (9, [False, False])):
        other = [f.clone() for f in features]
        other[0][0, position] += 1
        same = torch.isclose(predictions(network, text, anchors, other).logits, logits).all(-1).view(2, -1).all(-1)
        assert same.tolist() == [not c for c in changed], position
    alone = torch.cat([predictions(network, text, [a], features).logits for a in anchors])
    torch.testing.assert_close(alone, logits)
    # The last slot acts on the first prediction: attention in a block is not causal.
    inputs = network.block_inputs

    def disturbed(anchor: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = inputs(anchor).clone()
        x[..., -1, :] += 1
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "block_inputs", disturbed)
        assert not torch.isclose(predictions(network, text, [9], features).logits[0], logits[network.depth]).all()


class Recording(DFlashDrafter):
    """Notes the scores after every path of drafts, by the text before."""

    def __init__(self, network: DFlash) -> None:
        super().__init__(network)
        self.found: dict[tuple[int, ...], dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor | None]]] = {}

    def _scores(self, tree, frontier, context):  # type: ignore[no-untyped-def]
        logits, confidence, at = super()._scores(tree, frontier, context)
        for i in range(len(context.rows)):
            of_text = self.found.setdefault(tuple(context.sequences[i].tokens.tolist()), {})
            for node in frontier[i].tolist():
                if at[i, node] >= 0:
                    path = tree.token[i, tree.ancestors(i, node)[1:]].tolist()
                    own = None if confidence is None else confidence[at[i, node]].clone()
                    of_text[tuple(path)] = logits[at[i, node]].clone(), own
        return logits, confidence, at


@pytest.mark.covering(1)
@pytest.mark.parametrize("from_anchor", [False, True])
@every_network
def test_drafting_is_the_forward_pass_of_training(heads: str, from_anchor: bool) -> None:
    """In every step of requests that end, begin and accept paths of all lengths: the same scores after every node."""
    if heads == "lattice" and from_anchor:
        with pytest.raises(ValidationError, match="the slots of a lattice are those after the anchor's"):
            network_of(heads, from_anchor=from_anchor)
        return
    network = network_of(heads, from_anchor=from_anchor)
    drafter = Recording(network)
    requests = [
        Request(random_tokens(n, seed=n), max_new_tokens=8, sampling_params=SamplingParams(1.0)) for n in (2, 21, 9, 1)
    ]
    with unchecked():
        texts = generate(Method(drafter, DynamicTree(9, 2, 12), Match()), requests, rows=3, chunk=8)
    assert [len(t) for t in texts] == [8] * 4
    checked, depths = 0, set[int]()
    for text, nodes in list(drafter.found.items())[::4]:
        for path, (logits, confidence) in nodes.items():
            whole = [*text, *path]
            # Features of drafted tokens exist in this pass; the block does not see them.
            expected = predictions(network, whole, [len(text) - 1])
            torch.testing.assert_close(logits, expected.logits[len(path)], atol=1e-5, rtol=0)
            assert (confidence is None) == (expected.confidence is None)
            if confidence is not None and expected.confidence is not None:
                torch.testing.assert_close(confidence, expected.confidence[len(path)], atol=1e-5, rtol=0)
            checked += 1
            depths.add(len(path))
    assert checked > 20 and depths == set(range(network.depth))


def test_a_chain_is_a_tree_of_width_one() -> None:
    network, text = network_of("markov"), random_tokens(12, seed=5)
    step = after_prompt(target(), context_of(text), network.hidden_layers)
    with unchecked():
        chain = drafted_paths(Chain(4, draw=False), DFlashDrafter(network), step)
        tree = drafted_paths(DynamicTree(4, 1, 4), DFlashDrafter(network), step)
    assert chain == tree
    assert max(map(len, chain[0])) == 5  # with the root


def test_confidence_weights_the_nodes_and_leaves_their_order_per_parent() -> None:
    network, text = network_of("all"), random_tokens(12, seed=5)
    step = after_prompt(target(), context_of(text), network.hidden_layers)
    drafter = DFlashDrafter(network)
    drafter.observe(step)
    root = tree_from_lists([[text[-1]]], [[-1]]), np.zeros((1, 1), np.int64), step.context
    found = drafter.top_tokens(*root, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "confidence_logits", lambda state, before: None)
        plain = drafter.top_tokens(*root, 5)
    assert plain.token.tolist() == found.token.tolist()
    confidence = predictions(network, text, [len(text) - 1]).confidence
    assert confidence is not None
    assert found.probability == pytest.approx(plain.probability * float(confidence[0].detach().sigmoid()), rel=1e-5)


def test_a_new_convolution_changes_nothing_and_then_mixes_neighbouring_slots() -> None:
    around = TwoTapConvolution(20, 3)
    x = torch.randn(2, 6, 20)
    before, after = around.taps(x)
    torch.testing.assert_close(around.mix(x, before), x)
    torch.testing.assert_close(around.mix(x, after), x)
    around.base.data[0, 1] = 2.0
    nn.init.normal_(around.dynamic.weight)
    before, _ = around.taps(x)
    # Channels 0 to 15 share what depends on the input, and so do 16 to 19.
    offset = around.dynamic(x).view(2, 6, 2, 2, 2)[:, :, 0]
    for slot in range(6):
        for channel in (0, 15, 19):
            own, earlier = (offset[:, slot, tap, channel // 16] for tap in range(2))
            expected = (1 + own) * x[:, slot, channel]
            if slot not in (0, 3):
                expected = expected + (2 + earlier) * x[:, slot - 1, channel]
            torch.testing.assert_close(around.mix(x, before)[:, slot, channel], expected)


SILENT = {
    "selector": ("predecessor_codebook", "successor_codebook", "hidden_projection.weight"),
    "domino": ("embed_proj.2.weight",),
    "refiner": ("readout.weight",),
}


@pytest.mark.parametrize(("heads", "part"), [(heads, part) for heads, parts in SILENT.items() for part in parts])
def test_a_head_that_adds_nothing_drafts_what_the_block_predicts(heads: str, part: str) -> None:
    network, text = copy.deepcopy(network_of(heads)), random_tokens(12, seed=5)
    assert network.correction is not None
    step = after_prompt(target(), context_of(text), network.hidden_layers)
    network.correction.get_parameter(part).data *= 30
    with unchecked(), pytest.MonkeyPatch.context() as patch:
        drafted = [drafted_paths(DynamicTree(4, 1, 4), DFlashDrafter(network), step)]
        network.correction.get_parameter(part).data.zero_()
        drafted.append(drafted_paths(DynamicTree(4, 1, 4), DFlashDrafter(network), step))
        patch.setattr(network, "correction", None)
        drafted.append(drafted_paths(DynamicTree(4, 1, 4), DFlashDrafter(network), step))
    assert drafted[0] != drafted[1] == drafted[2]


def test_a_lattice_of_one_candidate_drafts_what_the_block_predicts() -> None:
    with unchecked(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(HEADS["lattice"]["correction"], "candidates", 1)
        network, text = network_of.__wrapped__("lattice"), random_tokens(12, seed=5)
        step = after_prompt(target(), context_of(text), network.hidden_layers)
        found = drafted_paths(DynamicTree(4, 1, 4), DFlashDrafter(network), step)
        patch.setattr(network, "correction", None)
        assert found == drafted_paths(DynamicTree(4, 1, 4), DFlashDrafter(network), step)


@pytest.mark.parametrize("heads", ["selector", "domino", "refiner", "lattice", "markov"])
@torch.inference_mode()
def test_sweeps_over_a_block_end_at_its_greedy_chain(heads: str) -> None:
    """All slots are refined at once by the guesses before them, as other engines do; later guesses change nothing."""
    network, text = network_of(heads), random_tokens(12, seed=5)
    step = after_prompt(target(), context_of(text), network.hidden_layers)
    drafter, depth = DFlashDrafter(network), network.depth
    with unchecked():
        (chain,) = drafted_paths(DynamicTree(depth, 1, depth), drafter, step)
    longest: tuple[int, ...] = max(chain, key=len)
    guesses, slot = torch.zeros(depth, dtype=torch.int64), torch.arange(depth)
    for _ in range(depth):
        path = torch.cat([torch.tensor(text[-2:]), guesses]).expand(depth, -1)
        best = network.logits_after(drafter._blocks, Nodes(torch.zeros_like(slot), slot, path)).argmax(-1)
        guesses = best if network.token_of is None else network.token_of[best]
    assert guesses.tolist() == list(longest[1:])


SHAPES: dict[str, Shape[Predictor]] = {
    "chain": Chain(3, draw=True),
    "tree": FixedTree(((0,), (1,), (0, 0), (0, 1), (1, 0)), draw=True),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "heads",
    ["selector", "refiner", *(pytest.param(h, marks=pytest.mark.exhaustive) for h in ("markov", "domino", "lattice"))],
)
def test_sampled_drafts_keep_the_distribution(name: str, heads: str) -> None:
    """Also where a selector or a lattice leaves most tokens out, and a refiner reads the drafted path."""
    with pytest.MonkeyPatch.context() as patch:
        if heads in ("selector", "lattice"):
            patch.setitem(HEADS[heads]["correction"], "candidates", 2)
        patch.setitem(HEADS[heads], "draft_vocab", 3 if heads in ("markov", "refiner") else None)
        network, start = network_of(heads, 4, subset=3), [1, 0, 2]
    sampling = SamplingParams(temperature=2.5)
    requests = [Request(start, replace(sampling, seed=i), max_new_tokens=3) for i in range(400)]
    with unchecked():
        method = Method(DFlashDrafter(network), SHAPES[name], Rejection())
        texts = generate(method, requests, rows=400, chunk=1 << 14, vocab=4)
    where = np.ravel_multi_index(np.array(texts).T, (4,) * 3)
    assert p_value(np.bincount(where, minlength=64), exact_distribution(target(4), start, 3, sampling)) > 1e-3


def test_more_levels_than_a_block_predicts_are_refused_in_a_sentence() -> None:
    for options in (
        DFlashOptions(num_steps=5),
        DFlashOptions(eagle_topk=1, num_draft_tokens=5),
        DFlashOptions(speculative_tree=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0]]),
    ):
        with pytest.raises(ValueError, match=r"has 4 predicted tokens in a block of 5, .* and 5 levels were asked for"):
            dflash_method(network_of(), options)


def test_a_mask_token_outside_the_vocabulary_is_refused_in_a_sentence() -> None:
    config = network_of().config
    with pytest.raises(ValueError, match=f"mask_token {VOCAB} is not among the target's {VOCAB} tokens"):
        DFlashConfig.model_validate(config.model_dump() | {"mask_token": VOCAB})


def test_the_layers_that_are_read_are_the_published_ones() -> None:
    assert even_layers(36) == (2, 10, 18, 26, 34)
    assert even_layers(30) == (2, 9, 15, 21, 28)
    assert even_layers(4) == (3,)
    for layers in range(1, 70):
        assert all(0 <= a < b <= layers for a, b in zip((0, *even_layers(layers)), even_layers(layers), strict=False))


class Stepwise(DFlashDrafter):
    """Has its trees grown level by level."""

    def grow_dynamic_tree(self, context, sizes, bounds):  # type: ignore[no-untyped-def]
        return None


@cache
def kernel_network(
    precision: DraftPrecision, dtype: torch.dtype, subset: int | None, heads: str, mask: int | None
) -> tuple[Decoder, DFlash, DFlash]:
    """A target, a random DFlash, and the same on the CPU kernels."""
    decoder = tiny_decoder(replace(TINY, hidden=64, vocab=VOCAB), dtype=dtype)
    card = TargetInfo(name="tiny", hidden=64, vocab=VOCAB, layers=2)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 40, "context": 99, "block_size": 6}
    config = DFlashConfig.model_validate(
        {"target": card, "draft_vocab": subset, "hidden_layers": (0, 1, 3), "mask_token": mask, "qk_norm": True}
        | (sizes | HEADS[heads])
    )
    network = drawn(config, EmbeddingAndHead(decoder.embedding.detach(), 3 * decoder.head.weight.detach()))
    return decoder, network, pack_network(network, precision)


@pytest.mark.covering(1)
@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
@pytest.mark.parametrize(
    ("precision", "dtype"), [("float32", torch.float32), ("int8", torch.bfloat16), ("int4", torch.bfloat16)]
)
@pytest.mark.parametrize("shape", [DynamicTree(1, 3, 9), DynamicTree(5, 3, 60, 1e-4), DynamicTree(9, 4, 7)], ids=str)
@pytest.mark.parametrize(
    ("heads", "subset"),
    [("all", 20), ("markov", None), ("plain", 20), ("from anchor", 20), ("from slot", 20), ("causal", 20)],
)
def test_the_kernels_grow_the_trees_that_grow_level_by_level(
    precision: DraftPrecision, dtype: torch.dtype, shape: DynamicTree, heads: str, subset: int | None
) -> None:
    """Texts of unequal length, one of them with room for two more tokens, one with none."""
    decoder, _, network = kernel_network(precision, dtype, subset, heads, 3 if heads == "plain" else None)
    assert network.native is not None
    texts = [random_tokens(n, seed=n) for n in (9, 3, 17, 5)]
    context = replace(context_of(*texts), max_depth=np.array([5, 2, 5, 0]))
    step = after_prompt(decoder, context, network.hidden_layers)
    found = [drafted_paths(shape, drafter, step) for drafter in (DFlashDrafter(network), Stepwise(network))]
    assert found[0] == found[1]
    assert [bool(part) for part in found[0]] == [True, True, True, False]
    assert all(len(path) <= 3 for path in found[0][1])


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
@pytest.mark.parametrize("heads", ["all", "convolution", "selector", "domino", "refiner", "lattice"])
def test_the_kernels_draft_what_torch_drafts(heads: str) -> None:
    """Layers with a convolution and corrections run in torch, and their matrices on the kernels."""
    decoder, plain, fast = kernel_network("float32", torch.float32, 20, heads, None)
    text = random_tokens(12, seed=9)
    step = after_prompt(decoder, context_of(text), plain.hidden_layers)
    found = []
    for network in (plain, fast):
        drafter = Recording(network)
        drafter.observe(step)
        FixedTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0))).grow(drafter, context_of(text))
        found.append(drafter.found[tuple(text)])
    shared = found[0].keys() & found[1].keys()
    assert len(shared) > 3
    for path in shared:
        for one, other in zip(found[0][path], found[1][path], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
def test_the_kernels_refuse_tokens_and_places_that_are_not_there() -> None:
    _, _, network = kernel_network("float32", torch.float32, None, "markov", None)
    kernels = network.native
    assert kernels is not None
    cache_, states = network.new_cache(torch.device("cpu")), [torch.zeros(2, 64)] * 3
    cache_.reserve([0], [9])

    def grow(root: int, place: int, count: int = 1) -> None:
        trees = native.DynamicTrees(np.array([2]), (2, 2, 4), (0.0, 0.0), [0], [1])
        kernels.grow_dynamic_trees(np.array([root]), states, np.array([place]), [count], trees, cache_)

    grow(3, 1)
    for root, place in ((VOCAB, 1), (-1, 1), (3, 2), (3, -1)):
        with pytest.raises(ValueError, match="is not among"):
            grow(root, place)
    with pytest.raises(ValueError, match="3 states at 2 places are read, found 3 at 1"):
        grow(3, 1, 2)
