"""Draft models on the CPU kernels: trees grown in one call equal those grown level by level."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from foretell.accept import Match
from foretell.core.context import Context
from foretell.core.sampling import SamplingParams
from foretell.core.tree import TokenTree
from foretell.draft import DraftModel
from foretell.draft.base import Predictor
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model import kernels as native
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import Precision
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.vocabulary import ReducedVocabulary
from foretell.shape import Chain, DynamicTree
from foretell.shape.base import Shape
from foretell.testing import TINY, tiny_decoder
from helpers import VOCAB, context_of, random_tokens

pytestmark = pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")

SIZES = replace(TINY, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=VOCAB)
SHAPES = (
    Chain(4, draw=False),
    Chain(3),
    Chain(4, confidence=0.3),
    Chain(4, fallback=0.3),
    Chain(4, False, 0.4, 0.2),
    DynamicTree(1, 3, 9),
    DynamicTree(5, 3, 60, 1e-4),
    DynamicTree(4, 2, 5, 0.02),
)
Path = tuple[int, ...]


class Stepwise(DraftModel):
    """Has its trees grown level by level."""

    def grow_dynamic_tree(self, context, sizes, bounds):  # type: ignore[no-untyped-def]
        return None

    def grow_chain(self, context, length, limits):  # type: ignore[no-untyped-def]
        return None


class Watched(Shape[Predictor]):
    """Remembers the trees of a shape: the tokens on the way to every node."""

    drafter_type = Predictor

    def __init__(self, shape: Shape[Any]) -> None:
        self.shape, self.found = shape, list[list[set[Path]]]()

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        tree = self.shape.grow(draft, context)
        self.found.append(
            [
                {tuple(tree.token[i, tree.ancestors(i, n)].tolist()) for n in np.flatnonzero(tree.valid[i]).tolist()}
                for i in range(tree.rows)
            ]
        )
        return tree


def small(precision: Precision, subset: bool, layers: int = 1) -> Network:
    """The first layers of the target, which agree with it now and then."""
    decoder = tiny_decoder(SIZES, dtype=torch.float32 if precision == "float32" else torch.bfloat16)
    network = NativeDecoder(decoder, precision).first_layers(layers)
    if not subset:
        return network
    decoder.head.weight.data = decoder.head.weight[5:].clone()
    return ReducedVocabulary(NativeDecoder(decoder, precision).first_layers(layers), torch.arange(5, VOCAB))


def watched(made: type[DraftModel], precision: Precision, subset: bool, shape: Shape[Any]) -> list[list[set[Path]]]:
    """The trees for three texts, of which one joins late and ends early."""
    target = NativeDecoder(tiny_decoder(SIZES, dtype=torch.float32), "float32")
    trees = Watched(shape)
    engine = Engine(
        DecoderRunner(target), Method(made(DecoderRunner(small(precision, subset)), chunk=8), trees, Match())
    )
    for length, wanted in ((21, 17), (3, 20), (9, 6)):
        engine.submit(Request(random_tokens(length, VOCAB, seed=length), max_new_tokens=wanted))
        engine.step()
    for _ in engine.run():
        pass
    return trees.found


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_trees_are_those_of_levels(precision: Precision, subset: bool, shape: Shape[Any]) -> None:
    whole, stepwise = (watched(made, precision, subset, shape) for made in (DraftModel, Stepwise))
    assert whole == stepwise
    assert any(len(part) > 2 for trees in whole for part in trees), "nothing was drafted"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_have_the_maximum_depth_of_their_request(shape: Shape[Any]) -> None:
    context = replace(context_of([1, 2, 3], [4, 5], [6]), max_depth=np.array([99, 0, 2]))
    found = []
    for made in (DraftModel, Stepwise):
        trees = Watched(shape)
        trees.grow(made(DecoderRunner(small("float32", subset=False))), context)
        found.append(trees.found[0])
    assert found[0] == found[1]
    assert len(found[0][0]) > 1 and len(found[0][1]) == 1 and 1 < max(map(len, found[0][2])) <= 3


def test_a_chain_stays_in_the_cache_as_far_as_it_stood() -> None:
    """Of the texts' new tokens nothing is read twice but by the next root."""
    runner = DecoderRunner(small("float32", subset=False, layers=SIZES.layers))
    target = NativeDecoder(tiny_decoder(SIZES, dtype=torch.float32), "float32")
    engine = Engine(DecoderRunner(target), Method(DraftModel(runner), Chain(3, draw=False), Match()))
    engine.submit(Request(random_tokens(6, VOCAB, seed=1), max_new_tokens=40))
    engine.step()
    for _ in range(4):
        (update,) = engine.step()
        # Its last token, which nobody read, and the target's own stay to be read.
        assert update.accepted == 3 and runner.length(0) == engine._scheduler.running[0].sequence.length - 2


def test_a_network_that_bounds_its_logits_grows_level_by_level() -> None:
    decoder = tiny_decoder(replace(SIZES, logit_softcap=3.0), dtype=torch.float32)
    draft = DraftModel(DecoderRunner(NativeDecoder(decoder, "float32")))
    assert draft.grow_dynamic_tree(context_of([1, 2, 3]), (2, 2, 4), (0.0, 0.0)) is None
    assert DynamicTree(2, 2, 4).grow(draft, context_of([1, 2, 3])).nodes == 5


def test_trees_deeper_than_the_cache_and_the_positions_are_refused() -> None:
    network = NativeDecoder(tiny_decoder(replace(SIZES, context=16), dtype=torch.float32), "float32")
    runner = DecoderRunner(network)
    trees = native.DynamicTrees(np.array([9]), (9, 1, 9), (0.0, 0.0), np.array([0]), np.array([12]))
    cache = network.new_cache()
    cache.reserve([0], [64])
    with pytest.raises(
        ValueError, match="a tree of 9 levels does not fit in the blocks of its row, or in 16 positions"
    ):
        network.grow_dynamic_trees(torch.zeros(1, 64), trees, cache)
    assert runner.context == 16


def test_penalties_and_temperature_take_the_long_way() -> None:
    draft = DraftModel(DecoderRunner(small("float32", subset=False)))
    drawn = Chain(3).grow(draft, context_of([1, 2, 3], sampling=SamplingParams(temperature=1.0, seed=4)))
    assert drawn.q is not None and drawn.q_index.max() >= 0
