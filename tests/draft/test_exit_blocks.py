"""Exits with decoder blocks of their own: their keys lie in the target's cache, and drafts never change an answer."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from foretell.accept import AcceptExits, Match, Rejection
from foretell.bench.tracing import TracingRunner
from foretell.catalogue.exits import packed_exits
from foretell.core.sampling import SamplingParams
from foretell.draft import NoDrafter
from foretell.draft.early_exit import EarlyExitDrafter
from foretell.draft.exit_heads import ExitRule
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model import kernels as native
from foretell.model.block.decoder import Decoder
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.load.checkpoint import embedding_and_head_of
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, DynamicTree, RootOnly
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.exits import Exits, ExitsConfig, block_config
from helpers import VOCAB, naive, random_tokens, target, wide_target

LAYERS, EXIT = 4, 2
REQUESTS = [
    Request(random_tokens(n, seed=n), SamplingParams(temperature=n % 2, seed=n), max_new_tokens=18)
    for n in (3, 18, 9, 70)
]


def exits_of(network: Decoder, blocks: int = 2, noise: float = 0.0) -> Exits:
    """An exit with the target's own further blocks, and its norm and head: with all of them, and without noise on the
    map, it drafts what the target gives.
    """
    info = TargetInfo(name="tiny", hidden=network.config.hidden, vocab=VOCAB, layers=LAYERS)
    config = ExitsConfig(
        target=info, layers=(EXIT,), maps=True, norm_eps=network.config.norm_eps,
        blocks=block_config(network.config, EXIT, blocks),
    )  # fmt: skip
    made = Exits(config, embedding_and_head_of(network)).to(network.embedding.dtype)
    made.init_from_target(_tail(network, blocks))
    made.norms[0].load_state_dict(network.norm.state_dict())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made.maps[0].get_parameter("weight").data += noise * torch.randn(network.config.hidden, network.config.hidden)
    return made.requires_grad_(False)


def _tail(network: Decoder, blocks: int) -> Decoder:
    own = [network.block(i) for i in range(EXIT, EXIT + blocks)]
    return Decoder(replace(network.config, layers=blocks), network.embedding, own, network.norm, network.head)


@cache
def decoder() -> NativeDecoder:
    return NativeDecoder(wide_target(layers=LAYERS), "float32")


def drafter(kernels: bool, noise: float = 0.0, blocks: int = 2, **options: Any) -> EarlyExitDrafter:
    network = wide_target(layers=LAYERS) if kernels else target(layers=LAYERS)
    return EarlyExitDrafter(
        packed_exits(exits_of(network, blocks, noise), (), decoder() if kernels else network), **options
    )


def engine_of(method: Method[Any], kernels: bool, rows: int = 4, **options: Any) -> Engine:
    return Engine(DecoderRunner(decoder() if kernels else target(layers=LAYERS)), method, rows=rows, **options)


def answers(
    draft: EarlyExitDrafter, kernels: bool, shape: Any = None, rows: int = 4, requests: Sequence[Request] = REQUESTS
) -> tuple[list[list[int]], list[int], list[int]]:
    """Answers, and per request the drafted and the accepted tokens."""
    engine = engine_of(Method(draft, shape or Chain(4, draw=False), Match()), kernels, rows)
    found = engine.complete(requests)
    counts = [(c.statistics.drafted, sum(c.statistics.accepted_per_position)) for c in found]
    return [[int(t) for t in c.tokens] for c in found], [d for d, _ in counts], [a for _, a in counts]


def plain(kernels: bool) -> list[list[int]]:
    if not kernels:
        return [naive(target(layers=LAYERS), r) for r in REQUESTS]
    engine = engine_of(Method(NoDrafter(), RootOnly(), Match()), True, 1)
    return [[int(t) for t in c.tokens] for c in engine.complete(REQUESTS)]


both = pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=pytest.mark.skipif(not native.available(), reason="no CPU kernels"))]
)


@both
@pytest.mark.parametrize("rows", [1, 4])
def test_an_exit_with_all_further_blocks_drafts_the_target_s_tokens(kernels: bool, rows: int) -> None:
    """So its keys of prompts, of accepted tokens and of drafts lie where the target's do."""
    found, drafted, accepted = answers(drafter(kernels), kernels, rows=rows)
    assert found == plain(kernels)
    # The exit is packed in int8, and of sampled tokens few candidates are compared.
    assert sum(accepted) >= 0.95 * sum(drafted) > 30


@pytest.mark.covering(2)
@both
@pytest.mark.parametrize("shape", [Chain(4, draw=False), DynamicTree(3, 2, 6)], ids=["chain", "tree"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_answers_are_those_of_plain_decoding_whatever_the_blocks_draft(kernels: bool, shape: Any, blocks: int) -> None:
    found, drafted, accepted = answers(drafter(kernels, 0.3, blocks), kernels, shape)
    assert found == plain(kernels) and sum(drafted) > sum(accepted)


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
def test_chains_in_one_call_are_those_grown_token_by_token() -> None:
    fast, slow = drafter(True, 0.05), drafter(True, 0.05)
    engines = [engine_of(Method(d, Chain(4, draw=False, fallback=0.1), Match()), True) for d in (fast, slow)]
    assert fast._chain is not None
    slow._chain = None
    found = [[(c.tokens, c.statistics.drafted) for c in e.complete(REQUESTS)] for e in engines]
    assert found[0] == found[1] and sum(d for _, d in found[0]) > 20


def test_sampled_drafts_do_not_depend_on_the_batch() -> None:
    requests = [replace(r, sampling_params=SamplingParams(temperature=1.5, seed=7)) for r in REQUESTS]
    found = [
        [
            list(c.tokens)
            for c in engine_of(Method(drafter(False, 0.2), Chain(3), Rejection()), False, n).complete(requests)
        ]
        for n in (1, 4)
    ]
    assert found[0] == found[1]


def test_a_shared_prefix_keeps_the_keys_of_the_blocks() -> None:
    draft = drafter(False)
    engine = engine_of(Method(draft, Chain(4, draw=False), Match()), False, 2, prefix_caching=True)
    first = engine.complete([REQUESTS[3]])[0]
    longer = Request([*REQUESTS[3].prompt, *map(int, first.tokens)], max_new_tokens=12)
    again = engine.complete([longer])[0]
    assert list(again.tokens) == naive(target(layers=LAYERS), longer)
    assert (
        again.statistics.cached_tokens > 60
        and sum(again.statistics.accepted_per_position) == again.statistics.drafted > 6
    )


def test_tokens_that_leave_after_the_blocks_are_answers() -> None:
    draft = drafter(False, 0.2, rule=ExitRule("softmax", (0.02,)), only_confident=True)
    engine = engine_of(Method(draft, Chain(4), AcceptExits()), False)
    found = engine.complete([replace(REQUESTS[1], sampling_params=SamplingParams())])[0]
    assert len(found.tokens) == 18 > found.statistics.target_passes
    assert found.statistics.fidelity.tokens == 18


def test_what_blocks_cannot_do_is_said() -> None:
    with pytest.raises(ValueError, match="need missing_keys recompute and no exit_confidence state"):
        drafter(False, missing_keys="copy")
    with pytest.raises(ValueError, match=r"--blocks 3: an exit has the blocks that follow it in the target \(2 here\)"):
        block_config(target(layers=LAYERS).config, EXIT, 3)
    with pytest.raises(ValueError, match="one exit may have decoder blocks"):
        exits = exits_of(target(layers=LAYERS)).config
        ExitsConfig.model_validate({**exits.model_dump(), "layers": (1, 2)})


def test_layers_that_are_added_to_a_cache_keep_what_it_holds() -> None:
    runner = DecoderRunner(target(layers=LAYERS))
    engine = Engine(runner, Method(NoDrafter(), RootOnly(), Match()), rows=2)
    engine.submit(REQUESTS[1])
    engine.step()
    before = runner.cache.read(1, torch.tensor([0]), 10)  # type: ignore[attr-defined]
    assert runner.cache.add_layers(2) == LAYERS  # type: ignore[attr-defined]
    after = runner.cache.read(1, torch.tensor([0]), 10)  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not runner.cache.read(LAYERS + 1, torch.tensor([0]), 10)[0].any()  # type: ignore[attr-defined]


def test_blocks_draft_behind_a_runner_that_passes_calls_on() -> None:
    """As `foretell bench run` measures them."""
    expected, drafted, accepted = answers(drafter(kernels=True), kernels=True)
    draft = drafter(kernels=True)
    engine = Engine(TracingRunner(DecoderRunner(decoder())), Method(draft, Chain(4, draw=False), Match()), rows=4)
    completed = engine.complete(REQUESTS)
    assert draft._chain is not None, "the kernels grow its chains"
    assert [list(map(int, c.tokens)) for c in completed] == expected
    assert [c.statistics.drafted for c in completed] == drafted and sum(accepted) > 0
