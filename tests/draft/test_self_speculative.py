"""Draft & Verify (arXiv 2309.08168): the target without some sub-layers drafts for itself."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.accept import Match
from foretell.catalogue import BuildContext, build
from foretell.draft import DraftModel
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Completion, Request
from foretell.model.block.decoder import SkipSet
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain
from helpers import VOCAB, chain_tree, naive, random_tokens, target

LAYERS, LONGEST = 4, 5
REQUESTS = [Request(random_tokens(n, seed=n), max_new_tokens=20) for n in (3, 17, 9)]
ALL = frozenset(range(LAYERS))


def engine_of(skip: SkipSet, shape: Chain, accept: Any, rows: int = 3) -> Engine:
    network = target(layers=LAYERS)
    draft = DraftModel(DecoderRunner(network.without_sublayers(skip)))
    return Engine(DecoderRunner(network), Method(draft, shape, accept), rows=rows)


def complete(skip: SkipSet, shape: Chain, accept: Any, requests: list[Request]) -> list[Completion]:
    return list(engine_of(skip, shape, accept).complete(requests))


@pytest.mark.parametrize("skip", [SkipSet(ALL, ALL), SkipSet(frozenset({1, 2}), frozenset({0, 2}))], ids=str)
def test_answers_are_the_target_s_whatever_is_left_out(skip: SkipSet) -> None:
    """And its cache is that of a full pass over the text: nothing of the skipped network is left in it."""
    found = complete(skip, Chain(LONGEST, draw=False), Match(), REQUESTS)
    assert [list(c.tokens) for c in found] == [naive(target(layers=LAYERS), r) for r in REQUESTS]
    engine = engine_of(skip, Chain(LONGEST, draw=False), Match(), rows=1)
    engine.submit(replace(REQUESTS[1], max_new_tokens=60))
    text = list(REQUESTS[1].prompt)
    for _ in range(6):
        for update in engine.step():
            text += update.tokens
    runner, fresh = engine.runner, DecoderRunner(target(layers=LAYERS))
    assert isinstance(runner, DecoderRunner) and runner.length(0) == len(text) - 1
    fresh.forward([0], chain_tree(text[:-1]))
    for layer in range(LAYERS):
        pairs = (r.cache.read(layer, torch.tensor([0]), len(text) - 1) for r in (runner, fresh))  # type: ignore[attr-defined]
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("confidence", "drafted"), [(1.0, 1), (0.0, LONGEST)])
def test_a_chain_ends_with_its_first_unsure_token(confidence: float, drafted: int) -> None:
    """A threshold that nothing passes leaves one drafted token per pass, none leaves the longest chain."""
    (found,) = complete(SkipSet(ALL, ALL), Chain(LONGEST, draw=False, confidence=confidence), Match(), REQUESTS[:1])
    most = drafted * found.statistics.drafting_passes
    assert most - drafted * LONGEST < found.statistics.drafted <= most


def test_the_method_of_the_catalogue_adapts_and_is_lossless() -> None:
    context = BuildContext(VOCAB, target(layers=LAYERS))
    method = build("self_speculative", context, {"draft_sample_method": "greedy"})
    found = Engine(DecoderRunner(target(layers=LAYERS)), method, rows=3).complete(REQUESTS)
    assert [list(c.tokens) for c in found] == [naive(target(layers=LAYERS), r) for r in REQUESTS]
