"""Exits as draft models with a cache of their own: trees in one call, weights of fewer bits, the target's answers."""

from functools import cache
from typing import Any

import pytest

from foretell.accept import Match
from foretell.catalogue import BuildContext, build
from foretell.catalogue.exit_copies import ExitWeights, exit_draft
from foretell.catalogue.exits import packed_exits
from foretell.draft import DraftModel, NoDrafter
from foretell.draft.early_exit import EarlyExitDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model import kernels as native
from foretell.model.block.decoder import Decoder
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.load.checkpoint import embedding_and_head_of
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.shape import Chain, DynamicTree, RootOnly
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.exits import Exits, ExitsConfig, block_config
from helpers import VOCAB, random_tokens, wide_target

pytestmark = pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")

LAYERS, EXIT = 4, 2
REQUESTS = [Request(random_tokens(n, seed=n), max_new_tokens=18) for n in (3, 18, 70)]


@cache
def decoder() -> Decoder:
    return wide_target(layers=LAYERS)


@cache
def kernels() -> NativeDecoder:
    return NativeDecoder(decoder(), "float32")


def exits(blocks: int, inner: int = 0) -> Exits:
    """An exit with the target's further blocks, norm and head: with all of them it drafts what the target gives."""
    info = TargetInfo(name="tiny", hidden=decoder().config.hidden, vocab=VOCAB, layers=LAYERS)
    config = ExitsConfig(
        target=info, layers=(EXIT,), norm_eps=decoder().config.norm_eps, inner=inner,
        blocks=block_config(decoder().config, EXIT, blocks) if blocks else None,
    )  # fmt: skip
    made = Exits(config, embedding_and_head_of(decoder()))
    for mine, i in zip(made.blocks, range(EXIT, EXIT + blocks), strict=True):
        mine.load_state_dict(decoder().block(i).state_dict())
    made.norms[0].load_state_dict(decoder().norm.state_dict())
    return made.requires_grad_(False)


def answers(network: Network, method: AnyMethod) -> tuple[list[list[int]], int, int]:
    """Answers, and the drafted and the accepted tokens of all."""
    completed = Engine(DecoderRunner(network), method, rows=2).complete(REQUESTS)
    drafted = sum(c.statistics.drafted for c in completed)
    accepted = sum(sum(c.statistics.accepted_per_position) for c in completed)
    return [list(map(int, c.tokens)) for c in completed], drafted, accepted


def plain(network: Network) -> list[list[int]]:
    return answers(network, Method(NoDrafter(), RootOnly(), Match()))[0]


@pytest.mark.parametrize("weights", ["target", "int8", "int4"])
@pytest.mark.parametrize("shape", [Chain(3, draw=False), DynamicTree(3, 3, 8)], ids=str)
def test_an_exit_with_all_blocks_drafts_what_the_target_gives(weights: ExitWeights, shape: Any) -> None:
    context = BuildContext(VOCAB, kernels() if weights == "target" else decoder())
    assert context.network is not None
    draft = exit_draft(context, packed_exits(exits(LAYERS - EXIT), (), context.network), weights)
    assert isinstance(draft, DraftModel)
    found, drafted, accepted = answers(context.network, Method(draft, shape, Match()))
    assert found == plain(context.network) and drafted > 0
    # Copies in fewer bits are nearly right; the weights themselves always.
    share = accepted / sum(len(tokens) for tokens in found)
    assert share > (0.7 if weights == "target" else 0.4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [{"eagle_topk": 2}, {"eagle_topk": 3, "num_draft_tokens": 6}, {}], ids=str)
@pytest.mark.parametrize("weights", ["target", "int8", "int4"])
def test_the_catalogue_builds_trees_and_copies(weights: ExitWeights, options: dict[str, Any]) -> None:
    """Without fitted exits: the target's own head."""
    context = BuildContext(VOCAB, decoder())
    method = build("layer_skip", context, {"exit_layer": 3, "exit_weights": weights, **options})
    found, drafted, _ = answers(decoder(), method)
    assert found == plain(decoder()) and drafted > 0
    # In torch an exit with the target's weights drafts in the target's cache.
    assert isinstance(method.draft, EarlyExitDrafter if weights == "target" else DraftModel)


def test_an_exit_that_is_not_linear_has_no_copies() -> None:
    context = BuildContext(VOCAB, decoder())
    with pytest.raises(ValueError, match="exit_weights int4 needs exits that are linear after their norm"):
        exit_draft(context, packed_exits(exits(0, inner=8), (), decoder()), "int4")
    with pytest.raises(ValueError, match="cannot be read again here"):
        exit_draft(BuildContext(VOCAB, kernels()), packed_exits(exits(0), (), kernels()), "int8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 8}, "without eagle_topk the drafts are a chain"),
        ({"eagle_topk": 2, "exit_threshold": 0.5}, "eagle_topk and exit_weights need one"),
        ({"exit_weights": "int4", "exit_threshold": 0.5}, "eagle_topk and exit_weights need one"),
        ({"eagle_topk": 2, "fallback_threshold": 0.5}, "fallback_threshold would not be read"),
        ({"exit_weights": "int3"}, "exit_weights"),
        ({"eagle_topk": 0}, "eagle_topk"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("layer_skip", BuildContext(VOCAB, decoder()), options)
