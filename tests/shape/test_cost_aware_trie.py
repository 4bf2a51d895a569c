"""Drafting is controlled by its cost, and never changes the tokens of an answer."""

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import pytest
import torch

from foretell.accept import Match
from foretell.core.context import Context
from foretell.core.sampling import SamplingParams
from foretell.core.tree import TokenTree
from foretell.draft import (
    CombinedRetriever,
    Continuation,
    DraftModel,
    HybridDrafter,
    NoDrafter,
    Predictor,
    PromptLookup,
    Retriever,
    SuffixRetriever,
    TokenRecycling,
)
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.engine.statistics import RequestStatistics
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, CostAwareTrie, PassCost, RetrievalOrModel, RootOnly
from foretell.shape.cost_aware_trie import Candidates, DraftController
from helpers import VOCAB, generate, good_model, random_tokens, small_model, target

REQUESTS = [
    Request(random_tokens(n, seed=n), SamplingParams(temperature=t, seed=n), 20 + n)
    for n, t in ((3, 0.0), (17, 1.0), (9, 0.0), (1, 0.7))
]
CHEAP = PassCost({1: 1.0, 64: 1.3})
EXPENSIVE = PassCost({1: 1.0, 2: 2.0, 64: 64.0})
"""A further token costs as much as a pass: nothing ever pays."""


class Clock:
    """A clock that a test sets; it also advances by `tick` at every call."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self._tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self._tick
        return self.now


class Oracle(Retriever):
    """Retrieves the target's own tokens, or wrong ones, with the same probabilities."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong: bool = False, acceptance: float = 0.9) -> None:
        self._texts, self._wrong, self._acceptance = texts, wrong, acceptance
        self.calls = 0

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        out = []
        for text in context.sequences:
            self.calls += 1
            known = next(
                t for t in self._texts if list(t[: text.prompt_length]) == text.tokens[: text.prompt_length].tolist()
            )
            copy = [(t + self._wrong) % VOCAB for t in known[text.length : text.length + 6]]
            out.append([Continuation(tuple(copy), tuple(self._acceptance ** (i + 1) for i in range(len(copy))))])
        return out


GREEDY = [Request(random_tokens(n, seed=n), max_new_tokens=60) for n in (3, 9)]


def plain_sequences() -> list[list[int]]:
    plain: AnyMethod = Method(NoDrafter(), RootOnly(), Match())
    return [[*r.prompt, *t] for r, t in zip(GREEDY, generate(plain, GREEDY), strict=True)]


def statistics(
    method: AnyMethod, requests: Sequence[Request], clock: Callable[[], float] = perf_counter
) -> list[RequestStatistics]:
    engine = Engine(DecoderRunner(target()), method, rows=1, clock=clock)
    return [done.statistics for done in engine.complete(requests)]


class Slow(DraftModel):
    """Takes some seconds of a clock for every draft."""

    def __init__(self, model: DraftModel, clock: Clock, seconds: float) -> None:
        super().__init__(model.runner)
        self._clock, self._seconds = clock, seconds

    def expand(self, tree: TokenTree, frontier: np.ndarray, context: Context) -> tuple[torch.Tensor, np.ndarray]:
        if tree.nodes == 1:
            self._clock.now += self._seconds
        return super().expand(tree, frontier, context)


def drafts_per_pass(model: DraftModel, clock: Clock, requests: Sequence[Request] = GREEDY[:1]) -> list[float]:
    """Drafted tokens per pass of each request where retrieval finds nothing and a pass takes a second."""
    shape = RetrievalOrModel(CostAwareTrie(0, CHEAP), Chain(4, draw=False), retry_interval=1000)
    found = statistics(Method(HybridDrafter(PromptLookup(), model), shape, Match()), requests, clock)
    return [s.drafted / s.target_passes for s in found]


def retriever() -> CombinedRetriever:
    return CombinedRetriever([SuffixRetriever(), TokenRecycling(VOCAB)])


def hybrid(model: Predictor, cost: PassCost | None = None) -> AnyMethod:
    shape = RetrievalOrModel(CostAwareTrie(12, cost), Chain(4, draw=False, confidence=0.3), retry_interval=8)
    return Method(HybridDrafter(retriever(), model), shape, Match())


METHODS: dict[str, Callable[[], AnyMethod]] = {
    "cheap": lambda: Method(retriever(), CostAwareTrie(12, CHEAP), Match()),
    "expensive": lambda: Method(retriever(), CostAwareTrie(12, EXPENSIVE), Match()),
    "learned": lambda: Method(retriever(), CostAwareTrie(12), Match()),
    "hybrid, good model": lambda: hybrid(good_model(VOCAB), CHEAP),
    "hybrid, bad model": lambda: hybrid(small_model(VOCAB), CHEAP),
    "hybrid, learned": lambda: hybrid(good_model(VOCAB)),
}


@pytest.mark.exhaustive_types
@pytest.mark.parametrize("name", METHODS)
def test_tokens_are_those_of_plain_decoding(name: str) -> None:
    plain = generate(Method(NoDrafter(), RootOnly(), Match()), REQUESTS)
    assert generate(METHODS[name](), REQUESTS, rows=3, chunk=16) == plain
    assert generate(METHODS[name](), REQUESTS, rows=1, chunk=512) == plain


def test_nothing_is_drafted_where_nothing_pays() -> None:
    assert statistics(Method(retriever(), CostAwareTrie(12, EXPENSIVE), Match()), GREEDY[:1])[0].drafted == 0


def test_trees_are_as_large_as_pays() -> None:
    shape = CostAwareTrie(12, PassCost({1: 1.0, 101: 11.0}))
    candidates: list[Candidates] = [[((1,), 0.9), ((1, 2), 0.5), ((1, 2, 3), 0.05)], [((4,), 0.3)]]
    assert shape._choose_sizes(candidates, 2) == [2, 1]
    assert CostAwareTrie(12, EXPENSIVE)._choose_sizes(candidates, 2) == [0, 0]
    assert CostAwareTrie(12, CHEAP)._choose_sizes(candidates, 2) == [3, 1]


@pytest.mark.exhaustive_types
def test_an_oracle_is_used_and_wrong_probabilities_are_calibrated() -> None:
    texts = plain_sequences()
    cost = PassCost({1: 1.0, 2: 1.4, 64: 8.0})
    (right,) = statistics(Method(Oracle(texts), CostAwareTrie(12, cost), Match()), GREEDY[:1], Clock())
    assert right.tokens_per_pass > 4
    (wrong,) = statistics(Method(Oracle(texts, wrong=True), CostAwareTrie(12, cost), Match()), GREEDY[:1], Clock())
    assert wrong.drafted / wrong.target_passes < 0.5 * right.drafted / right.target_passes


@pytest.mark.exhaustive_types
def test_a_request_whose_drafts_do_not_pay_drafts_less_often() -> None:
    oracle = Oracle(plain_sequences(), wrong=True)
    (s,) = statistics(Method(oracle, CostAwareTrie(12, CHEAP), Match()), GREEDY[:1], Clock(tick=0.02))
    assert oracle.calls < s.target_passes


def test_the_controller_pauses_and_resumes() -> None:
    controller = DraftController()
    steps = 0
    for _ in range(100):
        if controller.should_draft():
            steps += 1
            controller.update(0.0, 0, -1.0)
    assert 24 < steps < 60
    for _ in range(40):
        if controller.should_draft():
            controller.update(1.0, 1, 1.0)
    assert all(controller.should_draft() for _ in range(5))


def test_costs_are_learned() -> None:
    cost = PassCost()

    def truth(n: int) -> float:
        return 0.01 * (1 + 0.2 * (n - 1))

    assert not cost.needs_measurement(1)
    for i in range(200):
        cost.update((1, 4, 8, 12)[i % 4], truth((1, 4, 8, 12)[i % 4]))
    found = cost.seconds_of(range(1, 13))
    for n in (1, 4, 8, 12):
        assert found[n - 1] == pytest.approx(truth(n), rel=0.1)
    assert (np.diff(found) >= 0).all()


def test_one_outlier_hardly_counts() -> None:
    cost = PassCost()
    for _ in range(10):
        cost.update(1, 0.01)
    cost.update(1, 10.0)
    assert cost.seconds_of([1])[0] < 0.0115


def test_a_size_not_seen_for_long_is_measured() -> None:
    cost = PassCost()
    for _ in range(8):
        cost.update(5, 0.02)
    assert cost.needs_measurement(1)
    cost.update(1, 0.01)
    assert not cost.needs_measurement(1)
    for _ in range(128):
        cost.update(5, 0.02)
    assert cost.needs_measurement(1)
    assert not CHEAP.needs_measurement(1), "a given table is not measured"


def test_a_large_pass_costs_in_proportion() -> None:
    cost = PassCost({1: 1.0, 128: 2.0})
    assert cost.seconds_of([256])[0] == pytest.approx(4.0)


def test_the_model_drafts_where_retrieval_finds_nothing() -> None:
    """With empty retrieval, a model without cost drafts; a slow one soon stops."""

    def drafted(seconds: float) -> float:
        clock = Clock()
        return drafts_per_pass(Slow(good_model(VOCAB), clock, seconds), clock)[0]

    assert drafted(0.0) > 3
    assert drafted(50.0) < 1


def test_the_model_is_timed_by_its_fastest_drafts() -> None:
    class SlowAtFirst(Slow):
        """Takes no time after the first 100 seconds."""

        def expand(self, tree: TokenTree, frontier: np.ndarray, context: Context) -> tuple[torch.Tensor, np.ndarray]:
            out = super().expand(tree, frontier, context)
            self._seconds = 50.0 if self._clock.now < 100 else 0.0
            return out

    clock = Clock()
    assert drafts_per_pass(SlowAtFirst(good_model(VOCAB), clock, 50.0), clock)[0] > 3


@pytest.mark.exhaustive_types
def test_rejections_in_one_request_do_not_stop_drafts_in_the_next() -> None:
    """A model that is wrong in the first request soon stops there, and drafts throughout the second one."""

    class WrongInTheFirst(Slow):
        def expand(self, tree: TokenTree, frontier: np.ndarray, context: Context) -> tuple[torch.Tensor, np.ndarray]:
            scores, at = super().expand(tree, frontier, context)
            wrong = context.sequences[0].prompt_length == len(GREEDY[0].prompt)
            return scores.roll(1, -1) if wrong else scores, at

    clock = Clock()
    drafted = drafts_per_pass(WrongInTheFirst(good_model(VOCAB), clock, 0.7), clock, GREEDY)
    assert drafted[0] < 2 and drafted[1] > 3


@pytest.mark.exhaustive_types
def test_acceptance_in_one_request_raises_the_prior_of_the_next() -> None:
    """Drafting takes 1.5 passes, which pays only if more drafts are accepted than the first prior says."""
    clock = Clock()
    assert min(drafts_per_pass(Slow(good_model(VOCAB), clock, 1.5), clock, GREEDY)) > 3


def test_a_model_on_hidden_states_is_tried_after_the_prompt() -> None:
    class Late(DraftModel):
        hidden_layers = (1,)

        def max_depths(self, context: Context) -> np.ndarray:
            fresh = np.array([not len(text.generated) for text in context.sequences])
            return np.where(fresh, 0, super().max_depths(context))

    assert drafts_per_pass(Late(good_model(VOCAB).runner), Clock())[0] > 3


def test_the_model_reads_the_tokens_of_steps_that_it_did_not_draft_for() -> None:
    clock = Clock()
    model = Slow(good_model(VOCAB), clock, 10.0)
    shape = RetrievalOrModel(CostAwareTrie(12, CHEAP), Chain(3, draw=False), retry_interval=5)
    engine = Engine(
        DecoderRunner(target()), Method(HybridDrafter(retriever(), model), shape, Match()), rows=2, clock=clock
    )
    for r in GREEDY:
        engine.submit(r)
    behind = []
    while engine.busy:
        engine.step()
        behind += [r.sequence.length - model.runner.length(r.row) for r in engine._scheduler.running]
    assert max(behind) > 4, "some steps went without the model"
    assert min(behind) <= 2, "and it was up to date again"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CostAwareTrie(-1), "budget of -1"),
        (lambda: PassCost({}), "cost table"),
        (lambda: PassCost({0: 1.0}), "cost table"),
        (lambda: RetrievalOrModel(CostAwareTrie(), Chain(4)), "draw=False"),
        (
            lambda: AnyMethod(retriever(), RetrievalOrModel(CostAwareTrie(), Chain(4, draw=False)), Match()),
            "RetrievalOrModel needs a HybridDrafter, and CombinedRetriever is not one; try Trie",
        ),
    ],
)
def test_bad_parts_are_refused(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()


def test_expected_seconds_are_where_learning_begins() -> None:
    cost, table = PassCost(), {1: 1.0, 64: 1.3}
    cost.expect(table)
    sizes = range(1, 129)
    assert cost.seconds_of(sizes) == pytest.approx(CHEAP.seconds_of(sizes)) and not cost.fixed
    for _ in range(40):
        cost.update(1, 2.0)
        cost.update(64, 6.0)
    one, many = cost.seconds_of([1, 64])
    assert many / one == pytest.approx(3.0, rel=0.05)
    learned = cost.seconds_of(sizes)
    cost.expect(table)
    assert cost.seconds_of(sizes) == learned, "what was observed stays"
    EXPENSIVE.expect(table)
    assert EXPENSIVE.seconds_of([64])[0] == 64.0, "what was given stays"
    with pytest.raises(ValueError, match="positive seconds"):
        PassCost().expect({1: 0.0})
