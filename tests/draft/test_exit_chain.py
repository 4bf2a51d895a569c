"""Chains of an exit on the CPU kernels: one call gives what token by token gives, and the target goes on from there."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from foretell.accept import AcceptExits, Match
from foretell.accept.base import Acceptor
from foretell.catalogue.exits import packed_exits
from foretell.core.sampling import SamplingParams
from foretell.draft import NoDrafter
from foretell.draft.beta_mixture import AdaptiveThresholds, BetaMixtureThreshold
from foretell.draft.early_exit import EarlyExitDrafter
from foretell.draft.exit_heads import ExitHeads, ExitRule, SharedHead, TrainedExits
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model import kernels as native
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.load.checkpoint import embedding_and_head_of
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, RootOnly
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.exits import Exits, ExitsConfig
from foretell.train.data.dataset import Document
from foretell.train.exits.calibrate import CalibrationSettings, run_exits
from helpers import VOCAB, chain_tree, random_tokens, wide_target

pytestmark = pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")

LAYERS = 4
REQUESTS = [Request(random_tokens(n, seed=n), max_new_tokens=14) for n in (3, 17, 9)]


@cache
def decoder() -> NativeDecoder:
    return NativeDecoder(wide_target(layers=LAYERS), "float32")


@cache
def heads() -> ExitHeads:
    """An exit of random weights after two layers, packed with its map in the head."""
    whole = wide_target(layers=LAYERS)
    info = TargetInfo(name="tiny", hidden=whole.config.hidden, vocab=VOCAB, layers=LAYERS)
    config = ExitsConfig(target=info, layers=(2,), draft_vocab=24, norm_eps=whole.config.norm_eps)
    made = Exits(config, embedding_and_head_of(whole)).requires_grad_(False)
    made.set_draft_vocab(torch.arange(4, 28))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made.maps[0].get_parameter("weight").data += 0.02 * torch.randn(64, 64)
    return packed_exits(made, (), decoder())


def answer(
    draft: EarlyExitDrafter, accept: Acceptor, in_one_call: bool, chain: Chain | None = None, rows: int = 3
) -> tuple[list[tuple[int, ...]], list[int], int]:
    """Answers, how much was drafted for each, and the tokens that left."""
    engine = Engine(DecoderRunner(decoder()), Method(draft, chain or Chain(4, draw=False), accept), rows=rows)
    assert draft._chain is not None
    if not in_one_call:
        draft._chain = None
    completed = engine.complete(REQUESTS)
    drafted = [c.statistics.drafted for c in completed]
    return [tuple(map(int, c.tokens)) for c in completed], drafted, int(draft.exit_counts.sum())


def plain_decoding() -> Method[Any]:
    return Method(NoDrafter(), RootOnly(), Match())


def plain() -> list[tuple[int, ...]]:
    engine = Engine(DecoderRunner(decoder()), plain_decoding(), rows=1)
    return [tuple(map(int, c.tokens)) for c in engine.complete(REQUESTS)]


@pytest.mark.parametrize("limits", [(0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.3, 0.1)], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_chains_in_one_call_are_those_grown_token_by_token(limits: tuple[float, float], rows: int) -> None:
    chain = Chain(4, draw=False, confidence=limits[0], fallback=limits[1])
    found = [answer(EarlyExitDrafter(heads()), Match(), one, chain, rows) for one in (True, False)]
    assert found[0][:2] == found[1][:2] and sum(found[0][1]) > 0
    assert found[0][0] == plain(), "drafts never change an answer"


def test_the_target_s_own_head_drafts_in_one_call_too() -> None:
    found = [answer(EarlyExitDrafter(SharedHead(decoder(), 2)), Match(), one) for one in (True, False)]
    assert found[0][:2] == found[1][:2] and found[0][0] == plain()


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("confidence", ["softmax", "probability"])
@pytest.mark.parametrize("missing", ["recompute", "copy"])
def test_answers_of_exits_in_one_call_are_those_token_by_token(confidence: str, missing: str, rows: int) -> None:
    rule = ExitRule(confidence, (0.15,))  # type: ignore[arg-type]
    accept = AcceptExits(exact_keys=missing == "recompute")
    found = [
        answer(EarlyExitDrafter(heads(), rule, True, missing), accept, one, Chain(4), rows)  # type: ignore[arg-type]
        for one in (True, False)
    ]
    assert found[0] == found[1] and 0 < found[0][2] < 42


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("in_one_call", [True, False])
@pytest.mark.parametrize("confidence", ["softmax", "probability"])
def test_the_threshold_refuses_what_it_says(confidence: str, in_one_call: bool, rows: int) -> None:
    """The text of every threshold is that of an oracle: decoding with all layers, and the exit where it is sure."""
    for level in (1.0, 0.3, 0.15, 0.1, 0.0):
        draft = EarlyExitDrafter(heads(), ExitRule(confidence, (level,)), True)  # type: ignore[arg-type]
        found = answer(draft, AcceptExits(), in_one_call, Chain(4), rows)
        assert found[0] == exit_oracle(confidence, level)
        assert level < 1 or (found[0] == plain() and found[1:] == ([0, 0, 0], 0))


@cache
def exit_oracle(confidence: str, level: float) -> list[tuple[int, ...]]:
    """Greedy texts in which a token leaves after two layers if it is sure, at most four in a row; in torch, without a
    cache. Not before the second token of an answer.
    """
    network, exits, texts = wide_target(layers=LAYERS), heads(), list[tuple[int, ...]]()
    assert exits.token_of is not None
    for request in REQUESTS:
        text, waiting = list(request.prompt), 0
        while len(text) < len(request.prompt) + 14:
            output = DecoderRunner(network).forward([0], chain_tree(text), hidden_layers=(2,))
            last = output.hidden_states[0][output.hidden_index[0, len(text) - 1]]
            sure, best = exits.logits(0, last[None])[0].double().softmax(-1).topk(2)
            measured = float(sure[0] - sure[1] if confidence == "softmax" else sure[0])
            leaves = measured > level and waiting < 4 and len(text) > len(request.prompt)
            # The token of all layers ends a block; at the end of an answer it is the last one in any case.
            leaves = leaves and len(text) + 1 < len(request.prompt) + 14
            waiting = waiting + 1 if leaves else 0
            text.append(int(exits.token_of[best[0]]) if leaves else int(output.logits[-1].argmax()))
        texts.append(tuple(text[len(request.prompt) :]))
    return texts


def test_adaptive_thresholds_learn_the_same_from_both() -> None:
    mixtures = [BetaMixtureThreshold(0.15) for _ in range(2)]
    for mixture, one in zip(mixtures, (True, False), strict=True):
        draft = EarlyExitDrafter(heads(), ExitRule("softmax", (0.15,)), True, adaptive=AdaptiveThresholds(mixture))
        answer(draft, AcceptExits(), one, Chain(4), rows=1)
    a, b = mixtures
    assert a._agrees == b._agrees and a._confidence == b._confidence, "the same bits, so that no threshold divides them"
    assert a.threshold == b.threshold and a.updates > 1


@pytest.mark.parametrize("in_one_call", [True, False])
@pytest.mark.parametrize("confidence", ["softmax", "probability"])
def test_calibration_measures_what_decoding_measures(confidence: str, in_one_call: bool) -> None:
    """The same bits, token by token, whoever drafts."""
    mixture = BetaMixtureThreshold(1.0)
    draft = EarlyExitDrafter(heads(), ExitRule(confidence, (1.0,)), True, adaptive=AdaptiveThresholds(mixture))  # type: ignore[arg-type]
    engine = Engine(DecoderRunner(decoder()), Method(draft, Chain(4), AcceptExits()), rows=1)
    if not in_one_call:
        draft._chain = None
    request = REQUESTS[1]
    (done,) = engine.complete([request])
    text, exits = np.array([*request.prompt, *done.tokens]), heads()
    assert isinstance(exits, TrainedExits)
    measured = run_exits(
        decoder(),
        exits,
        Document(text, len(request.prompt), True),
        CalibrationSettings(0.1, 0.9, confidence),  # type: ignore[arg-type]
    )
    # The first token of an answer is never drafted, nor is the last one.
    count = request.max_new_tokens - 2
    assert mixture._confidence == measured.confidence[0, 1 : 1 + count].tolist() and len(set(mixture._confidence)) > 2
    assert mixture._agrees == measured.agrees[0, 1 : 1 + count].tolist()


def test_sampled_requests_draft_with_the_target_s_noise() -> None:
    requests = [replace(r, sampling_params=SamplingParams(temperature=1.0, seed=5)) for r in REQUESTS]
    engine = Engine(DecoderRunner(decoder()), Method(EarlyExitDrafter(heads()), Chain(4, draw=False), Match()), rows=3)
    expected = Engine(DecoderRunner(decoder()), plain_decoding(), rows=1).complete(requests)
    assert [c.tokens for c in engine.complete(requests)] == [c.tokens for c in expected]
