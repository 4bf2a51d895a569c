"""Any choice of drafts gives the same texts; the controller follows costs and chances; predictions; prompt chunks."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from foretell.accept import Match, Rejection
from foretell.core.context import Context
from foretell.core.sampling import SamplingParams
from foretell.draft import Continuation, NoDrafter, PromptLookup, Retriever
from foretell.draft.prediction import Prediction
from foretell.engine.controller import Controller, StepLoad
from foretell.engine.drafted_trees import DraftedTrees
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, BoundMethod, Method
from foretell.engine.request import Completion, Request
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import BranchingTree, Chain, PassCost, RootOnly, Trie
from helpers import (
    VARIANTS,
    VOCAB,
    Phrases,
    context_of,
    exact_distribution,
    good_model,
    naive,
    p_value,
    random_tokens,
    small_model,
    target,
    unchecked,
)

PLAIN: AnyMethod = Method(NoDrafter(), RootOnly(), Match())
CHEAP = PassCost({1: 1.0, 128: 1.3})
EXPENSIVE = PassCost({1: 1.0, 2: 2.0, 128: 128.0})
"""A further token costs as much as a pass."""
REQUESTS = [
    Request(random_tokens(5 + 4 * i, seed=i), SamplingParams(i % 3 / 2, seed=i), 12 + i, deadline=i - 2.0)
    for i in range(4)
]
NAMES = ("ngram", "eagle3", "hybrid_model", "lookahead", "draft_model", "pass", "pass_tree", "medusa", "dynamic_match")


class Clock:
    """A clock that advances at every call."""

    def __init__(self, tick: float = 0.001) -> None:
        self.now, self._tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self._tick
        return self.now


class RandomController(Controller):
    """Chooses at random: methods that draft, depths, and nodes."""

    def __init__(self, seed: int) -> None:
        super().__init__(CHEAP)
        self._rng = np.random.default_rng(seed)

    def depths(self, bound, count):  # type: ignore[no-untyped-def]
        super().depths(bound, count)
        return self._rng.integers(0, 5, count).tolist()

    def _choose(self, value, first, worth, draft_seconds):  # type: ignore[no-untyped-def]
        chosen, order = value > 0, np.argsort(-value, kind="stable")
        chosen[order[self._rng.integers(0, len(value) + 1) :]] = False
        return chosen


class Oracle(Retriever):
    """Retrieves the target's own tokens, or wrong ones."""

    def __init__(self, texts: Sequence[Sequence[int]], chance: float = 0.9) -> None:
        self._texts, self.chance, self.wrong, self.calls = texts, chance, False, 0

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        out = []
        for text in context.sequences:
            self.calls += 1
            known = next(t for t in self._texts if list(t[: text.length]) == text.tokens.tolist())
            copy = [(t + self.wrong) % VOCAB for t in known[text.length : text.length + 5]]
            out.append([Continuation(tuple(copy), tuple(self.chance ** (i + 1) for i in range(len(copy))))])
        return out


def engine(method: AnyMethod, controller: Controller | None, rows: int = 4, tick: float = 0.001) -> Engine:
    return Engine(DecoderRunner(target()), method, rows, 16, clock=Clock(tick), controller=controller)


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(c.tokens) for c in completions]


def expected() -> list[list[int]]:
    return [naive(target(), r) for r in REQUESTS]


def long_texts(requests: Sequence[Request]) -> list[list[int]]:
    return [[*r.prompt, *naive(target(), r)] for r in requests]


@pytest.mark.parametrize("seed", range(3))
def test_no_choice_of_drafts_changes_a_text(seed: int) -> None:
    methods = [v.make(VOCAB) for v in VARIANTS if v.name in NAMES]
    with unchecked():
        mixed = [replace(REQUESTS[i % 4], method=m, prediction=REQUESTS[i % 3].prompt) for i, m in enumerate(methods)]
        controller = RandomController(seed)
        found = engine(PLAIN, controller, rows=6).complete(mixed)
        texts = expected()
        assert tokens(found) == [texts[i % 4] for i in range(len(mixed))]
    s = controller.statistics
    assert s.nodes_drafted >= s.nodes_verified > s.nodes_accepted > 0


@pytest.mark.parametrize("cost", [None, CHEAP, EXPENSIVE], ids=["learned", "cheap", "expensive"])
def test_the_controller_keeps_texts_and_counts(cost: PassCost | None) -> None:
    controller = Controller(cost)
    with unchecked():
        found = engine(Method(PromptLookup(2, 1, 4), Trie(4), Match()), controller).complete(REQUESTS)
        assert tokens(found) == expected()
    s = controller.statistics
    assert s.steps > 0 and s.seconds > 0 and s.realised_speedup > 0 and s.predicted_speedup > 0
    assert s.nodes_verified >= s.nodes_accepted


@pytest.mark.parametrize("tree", [Chain(3), BranchingTree((2, 2), distinct=False)], ids=["chain", "tree"])
def test_sampled_drafts_keep_the_law_under_limits_of_depth_and_predictions(tree: AnyMethod) -> None:
    method = Method(small_model(4), tree, Rejection())  # type: ignore[arg-type]
    sampling, count = SamplingParams(2.5), 300
    requests = [Request([1, 0, 2], replace(sampling, seed=i), 3, prediction=[i % 4, 1, 2, 0, 3]) for i in range(count)]
    with unchecked():
        run = Engine(DecoderRunner(target(4)), method, 32, clock=Clock(), controller=RandomController(0))
        found = tokens(run.complete(requests))
    counts = np.bincount([16 * a + 4 * b + c for a, b, c in found], minlength=64)
    assert p_value(counts, exact_distribution(target(4), [1, 0, 2], 3, sampling)) > 1e-3


def test_drafts_stop_where_nodes_are_expensive_and_return_when_they_pay() -> None:
    requests = [Request(random_tokens(4, seed=9), max_new_tokens=100)]
    oracle = Oracle(long_texts(requests))
    controller = Controller(EXPENSIVE)
    oracle.chance = 0.3
    oracle.wrong = True
    run = engine(Method(oracle, Trie(4), Match()), controller, rows=1, tick=0.02)
    run.submit(requests[0])
    found = list[int]()
    with unchecked():
        while run.busy:
            found += [t for u in run.step() for t in u.tokens]
            if len(found) == 50:
                silent, calls = controller.statistics.nodes_verified, oracle.calls
                controller.cost, oracle.wrong, oracle.chance = CHEAP, False, 0.95
    assert found == long_texts(requests)[0][4:]
    assert silent < 30 and calls < 40, "it still drafts, though nothing pays"
    assert controller.statistics.switches >= 2 and controller.statistics.probes > 0
    assert controller.statistics.nodes_accepted > 30


def test_the_likeliest_nodes_of_all_requests_are_verified_and_late_requests_come_first() -> None:
    bound = BoundMethod(Method(Oracle([]), Trie(4), Match()))
    continuations = [[Continuation((1, 2, 3), (p, p**2, p**3))] for p in (0.9, 0.5)]

    class Two(Retriever):
        def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
            return continuations

    tree = Method(Two(), Trie(4), Match()).grow(context_of([1], [1]))

    def chosen(weights: list[float], cost: PassCost) -> list[int]:
        controller = Controller(cost)
        controller.begin(StepLoad(2, True, np.array(weights, float)))
        controller.depths(bound, 2)
        part = DraftedTrees(bound, [0, 1], [0, 1], tree, [9, 9])
        controller.prune([part])
        valid = part.tree.valid
        assert all(valid[row, part.tree.parent[row, n]] for row, n in zip(*np.nonzero(valid), strict=True) if n)
        return [int(n) - 1 for n in valid.sum(1)]

    assert chosen([1, 1], CHEAP) == [3, 3]
    assert chosen([1, 1], EXPENSIVE) == [0, 0]
    middle = PassCost({1: 1.0, 2: 2.0, 128: 2.0 + 126 * 0.6})
    few, late = chosen([1, 1], middle), chosen([1, 4], middle)
    assert few[0] > few[1] and late[1] >= late[0]


def test_a_prediction_gives_the_same_text_in_fewer_passes_and_is_counted() -> None:
    request = Request(random_tokens(6, seed=3), SamplingParams(0.7, seed=4), 40)
    text = naive(target(), request)
    # Two tokens are replaced, one is inserted, and there is a rest that never comes.
    predicted = [*text[:10], (text[10] + 1) % VOCAB, *text[11:22], 5, 6, *text[22:], 1, 2, 3]
    with unchecked():
        for method in (PLAIN, Method(good_model(VOCAB), Chain(3, draw=False), Match())):
            for controller in (None, Controller(CHEAP)):
                found = engine(method, controller).complete([replace(request, prediction=predicted)])[0]
                plain = engine(method, None).complete([request])[0]
                s = found.statistics
                assert list(found.tokens) == list(plain.tokens) == text
                assert s.target_passes < plain.statistics.target_passes
                assert s.accepted_prediction_tokens + s.rejected_prediction_tokens == len(predicted)
                assert 34 <= s.accepted_prediction_tokens <= 40
        limited = engine(PLAIN, None).complete([replace(request, prediction=predicted, max_drafts=0)])[0]
        assert limited.statistics.drafted == 0 and list(limited.tokens) == text


def test_forced_tokens_and_predictions_are_drafted_though_the_method_is_switched_off() -> None:
    class Off(Controller):
        def depths(self, bound, count):  # type: ignore[no-untyped-def]
            super().depths(bound, count)
            return [0] * count

    oracle = Oracle([])
    method: AnyMethod = Method(oracle, Trie(4), Match())
    constrained = Request([1, 2], SamplingParams(0.5, seed=1), 12, constraint=Phrases(), prediction=[3, 7, 12, 1])
    with unchecked():
        found = engine(method, Off(CHEAP)).complete([constrained] * 2)
        plain = engine(PLAIN, None).complete([replace(constrained, prediction=None)])[0]
    assert tokens(found) == [list(plain.tokens)] * 2
    assert oracle.calls == 0 and found[0].statistics.target_passes < plain.statistics.target_passes


def test_a_prediction_is_found_again_after_a_difference() -> None:
    sequence = context_of([9, 9, 1, 2, 3], prompt=2).sequences[0]
    prediction = Prediction([1, 2, 3, 4, 5, 6, 7, 8, 2, 3])
    assert prediction.propose(2).tokens == (1, 2)
    prediction.follow(sequence)
    assert prediction.propose(3).tokens == (4, 5, 6)
    sequence.append([11, 6])
    prediction.follow(sequence)
    assert prediction.propose(8).tokens[:1] == (7,)
    assert (prediction.appeared, prediction.missing) == (3, 7)
    with pytest.raises(ValueError, match="the prediction is empty"):
        Prediction([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prediction": [VOCAB]}, "the prediction holds a token outside the model's vocabulary"),
        ({"prediction": "text"}, "the prediction must be a sequence of token ids"),
    ],
)
def test_bad_predictions_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(PLAIN, None).submit(replace(REQUESTS[0], **change))  # type: ignore[arg-type]
