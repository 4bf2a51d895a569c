"""Cascades: the same drafts and distributions as the draft model alone, in fewer passes."""

from collections.abc import Callable

import pytest
import torch

from foretell.accept import Acceptor, Match, Rejection
from foretell.core.sampling import SamplingParams
from foretell.draft import CascadeDrafter, DraftModel, Predictor, PromptLookup, SuffixRetriever, TokenRecycling
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.cache.kv_cache import KVCache
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import BranchingTree, Chain, DynamicTree, Shape, Trie
from helpers import VOCAB, chain_tree, generate, good_model, random_tokens, sibling, target

REQUESTS = [
    Request(random_tokens(n, seed=n), SamplingParams(temperature=t, seed=n, repetition_penalty=1.1), 14 + n)
    for n, t in ((3, 0.0), (17, 1.0), (9, 0.0), (1, 0.7))
]
SHAPES = [
    (Chain(5), Rejection()),
    (Chain(5, confidence=0.4), Rejection()),
    (BranchingTree((2, 2, 1)), Rejection()),
    (BranchingTree((2, 1), distinct=False), Rejection()),
    (DynamicTree(3, 2, 6), Match()),
]
AHEAD: dict[str, Callable[[], AnyMethod]] = {
    "copies": lambda: Method(SuffixRetriever(), Trie(8), Match()),
    "recycled": lambda: Method(TokenRecycling(VOCAB), Trie(10), Match()),
    "a smaller model": lambda: Method(good_model(VOCAB), Chain(4), Match()),
    "a cascade": lambda: Method(
        CascadeDrafter(DecoderRunner(sibling()), AHEAD["copies"]()),
        Chain(4, draw=False),
        Match(),
    ),
}


def small() -> DecoderRunner:
    """A draft model: the target's first layer."""
    return DecoderRunner(target().first_layers(1))


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("shape", "accept"), SHAPES, ids=lambda x: repr(x) if isinstance(x, Shape) else type(x).__name__
)
@pytest.mark.parametrize("ahead", AHEAD)
def test_answers_are_those_of_the_draft_model_alone(ahead: str, shape: Shape[Predictor], accept: Acceptor) -> None:
    alone = generate(Method(DraftModel(small()), shape, accept), REQUESTS)
    cascade: AnyMethod = Method(CascadeDrafter(small(), AHEAD[ahead](), chunk=8), shape, accept)
    assert generate(cascade, REQUESTS) == alone


def test_reading_ahead_saves_passes() -> None:
    """With a perfect guesser ahead, a chain of four costs one pass of the draft model instead of four."""

    def passes(ahead: AnyMethod) -> tuple[int, int]:
        cascade = CascadeDrafter(small(), ahead)
        engine = Engine(DecoderRunner(target()), Method(cascade, Chain(4), Match()))
        (done,) = engine.complete([Request(random_tokens(9), max_new_tokens=20)])
        return cascade.passes, done.statistics.target_passes

    perfect, steps = passes(Method(DraftModel(small()), Chain(4), Match()))
    nothing, _ = passes(Method(PromptLookup(), Trie(0), Match()))
    assert perfect <= steps
    assert nothing > 2 * perfect


def test_the_draft_models_cache_holds_the_sequence() -> None:
    draft = small()
    cascade = CascadeDrafter(draft, AHEAD["recycled"]())
    engine = Engine(DecoderRunner(target()), Method(cascade, Chain(4), Rejection()), rows=2)
    for r in REQUESTS[:2]:
        engine.submit(r)
    for _ in range(4):
        engine.step()
    for running in engine._scheduler.running:
        have = draft.length(running.row)
        tokens = running.sequence.tokens[:have].tolist()
        kept = keys(draft, running.row, have)
        assert have >= running.sequence.length - 2
        assert (kept - fresh_keys(tokens)).abs().max() < 1e-9


def keys(runner: DecoderRunner, row: int, count: int) -> torch.Tensor:
    """Cached keys of the first tokens of a row in all layers."""
    assert isinstance(runner.cache, KVCache)
    return torch.stack([runner.cache.read(i, torch.tensor([row]), count)[0] for i in range(len(runner.cache.k))])


def fresh_keys(tokens: list[int]) -> torch.Tensor:
    """Keys of a text read in one pass."""
    runner = small()
    runner.forward([0], chain_tree(tokens))
    return keys(runner, 0, len(tokens))
