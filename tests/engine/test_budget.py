"""Any choice of drafts gives the same texts; the budget follows costs and chances; predictions; prompt chunks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from foretell.accept import Match, Rejection
from foretell.core.context import Context
from foretell.core.sampling import SamplingParams
from foretell.draft import Continuation, EagleDrafter, NoDrafter, PromptLookup, Retriever, cached_states
from foretell.draft.prediction import Prediction
from foretell.engine.acceptance import Acceptance
from foretell.engine.asking import Plan
from foretell.engine.budget import Budget
from foretell.engine.draft_account import DraftAccount
from foretell.engine.draft_source import Trials
from foretell.engine.drafted_trees import DraftedTrees
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, BoundMethod, Method
from foretell.engine.pass_times import PassTimes
from foretell.engine.request import Completion, Request
from foretell.engine.step_costs import StepLoad
from foretell.engine.tuning import FIRST_STEPS, TRIAL_INTERVAL, TRIAL_STEPS
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.cache.layout import Layout
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import BranchingTree, Chain, DynamicTree, RootOnly, Trie
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.eagle import Eagle3, EagleConfig, EagleNetwork
from foretell.testing import TINY
from helpers import (
    VARIANTS,
    VOCAB,
    Phrases,
    Variant,
    context_of,
    exact_distribution,
    good_model,
    methods_by_kind,
    naive,
    p_value,
    random_tokens,
    small_model,
    target,
    unchecked,
)

PLAIN: AnyMethod = Method(NoDrafter(), RootOnly(), Match())
CHEAP = {1: 1.0, 128: 1.3}
EXPENSIVE = {1: 1.0, 2: 2.0, 128: 128.0}
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


class RandomBudget(Budget):
    """Chooses at random: requests, depths (also of methods that it does not govern), and nodes."""

    def __init__(self, seed: int) -> None:
        super().__init__(PassTimes(CHEAP))
        self._rng = np.random.default_rng(seed)

    def depths(self, bound, indices):  # type: ignore[no-untyped-def]
        super().depths(bound, indices)
        return self._rng.integers(0, 5, len(indices)).tolist()

    def plan(self, bound, number, which, unread=lambda i: 0):  # type: ignore[no-untyped-def]
        asked = [int(i) for i in self._rng.permutation(which) if self._rng.integers(0, 3)]
        return Plan(asked, *(self._rng.random(2) / 10)) if asked else None

    def _count(self, values):  # type: ignore[no-untyped-def]
        return int(self._rng.integers(0, len(values) + 1))


class Scripted(Budget):
    """Drafts in the steps whose bits are set, and then verifies all drafts."""

    def __init__(self, bits: str) -> None:
        super().__init__()
        self._bits, self.seen = bits, list[bool]()

    def begin(self, load: StepLoad) -> None:
        super().begin(load)
        if load.weights:
            self.seen.append(self._bits[len(self.seen) % len(self._bits)] == "1")

    def plan(self, bound, number, which, unread=lambda i: 0):  # type: ignore[no-untyped-def]
        return Plan(list(which)) if self.seen[-1] else None

    def _count(self, values):  # type: ignore[no-untyped-def]
        return len(values)


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


def engine(method: AnyMethod, budget: Budget | None, rows: int = 4, tick: float = 0.001) -> Engine:
    return Engine(DecoderRunner(target()), method, rows, 16, clock=Clock(tick), budget=budget)


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(c.tokens) for c in completions]


def expected() -> list[list[int]]:
    return [naive(target(), r) for r in REQUESTS]


def long_texts(requests: Sequence[Request]) -> list[list[int]]:
    return [[*r.prompt, *naive(target(), r)] for r in requests]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2))])
def test_no_choice_of_drafts_changes_a_text(seed: int) -> None:
    methods = {v.name: v.make(VOCAB) for v in VARIANTS if v.name in NAMES}
    with unchecked():
        mixed = [
            replace(REQUESTS[i % 4], method=m, prediction=REQUESTS[i % 3].prompt)
            for i, m in enumerate(methods.values())
        ]
        budget = RandomBudget(seed)
        found = engine(PLAIN, budget, rows=6).complete(mixed)
        texts = expected()
        assert tokens(found) == [texts[i % 4] for i in range(len(mixed))]
        for run in range(4):
            alike = engine(methods["ngram"], RandomBudget(4 * seed + run), rows=4).complete(REQUESTS)
            assert tokens(alike) == texts, "of several requests of one method, asked in any order"
    s = budget.statistics
    assert s.nodes_drafted >= s.nodes_verified > 0


@pytest.mark.parametrize("table", [None, CHEAP, EXPENSIVE], ids=["learned", "cheap", "expensive"])
def test_the_budget_keeps_texts_and_counts(table: dict[int, float] | None) -> None:
    budget = Budget(PassTimes(table))
    with unchecked():
        found = engine(Method(PromptLookup(2, 1, 4), Trie(4), Match()), budget).complete(REQUESTS)
        assert tokens(found) == expected()
    s = budget.statistics
    assert s.steps > 0 and s.nodes_drafted >= s.nodes_verified


@pytest.mark.parametrize(
    "tree",
    [pytest.param(Chain(3), marks=pytest.mark.exhaustive), BranchingTree((2, 2), distinct=False)],
    ids=["chain", "tree"],
)
def test_sampled_drafts_keep_the_law_under_limits_of_depth_and_predictions(tree: AnyMethod) -> None:
    method = Method(small_model(4), tree, Rejection())  # type: ignore[arg-type]
    sampling, count = SamplingParams(2.5), 300
    requests = [Request([1, 0, 2], replace(sampling, seed=i), 3, prediction=[i % 4, 1, 2, 0, 3]) for i in range(count)]
    with unchecked():
        run = Engine(DecoderRunner(target(4)), method, 32, clock=Clock(), budget=RandomBudget(0))
        found = tokens(run.complete(requests))
    counts = np.bincount([16 * a + 4 * b + c for a, b, c in found], minlength=64)
    assert p_value(counts, exact_distribution(target(4), [1, 0, 2], 3, sampling)) > 1e-3


def test_drafts_stop_where_nodes_are_expensive_and_return_when_they_pay() -> None:
    requests = [Request(random_tokens(4, seed=9), max_new_tokens=240)]
    oracle = Oracle(long_texts(requests))
    budget = Budget(PassTimes(EXPENSIVE))
    oracle.chance, oracle.wrong = 0.3, True
    run = engine(Method(oracle, Trie(4), Match()), budget, rows=1, tick=0.02)
    run.submit(requests[0])
    found = list[int]()
    with unchecked():
        while run.busy:
            found += [t for u in run.step() for t in u.tokens]
            if len(found) == 50:
                silent, calls = budget.statistics.nodes_verified, oracle.calls
                budget.times, oracle.wrong, oracle.chance = PassTimes(CHEAP), False, 0.95
    assert found == long_texts(requests)[0][4:]
    assert silent < 10 and calls <= 50 / TRIAL_INTERVAL, "it still drafts, though nothing pays"
    assert budget.statistics.switched_off and budget.statistics.switched_on
    assert budget.statistics.nodes_verified > 30


def _load(weights: Sequence[float]) -> StepLoad:
    accounts = [DraftAccount() for _ in weights]
    rooms = [9] * len(weights)
    return StepLoad(len(weights), True, weights, rooms, [r + 1 for r in rooms], [False] * len(weights), accounts)


@pytest.mark.parametrize(("chance", "slope"), [(1.0, 0.01), (0.7, 0.3)], ids=["outdone", "does not pay beside it"])
def test_a_drafter_that_another_one_outdoes_in_a_step_is_asked_in_the_next(chance: float, slope: float) -> None:
    bound = BoundMethod(next(v for v in VARIANTS if v.name == "hybrid_model").make(VOCAB))
    budget = Budget(PassTimes({1: 1.0, 128: 1 + 127 * slope}))

    class Copies(Retriever):
        def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
            return [[Continuation((1, 2, 3), (chance, chance**2, chance**3))]]

    tree = Method(Copies(), Trie(6), Match()).grow(context_of([1]))
    budget._source(bound, 1).steps = FIRST_STEPS
    for copies in (False, True, False):
        budget.begin(_load([1.0]))
        if copies:
            assert budget.plan(bound, 0, [0]) is not None
            budget.offer(bound, 0, [0], tree)
        assert (budget.plan(bound, 1, [0]) is None) is copies
    assert not budget.statistics.switched_off


def test_a_new_drafter_that_had_nothing_to_offer_is_asked_again() -> None:
    """Retrieval knows no text in its first steps."""
    bound = BoundMethod(Method(Oracle([]), Trie(4), Match()))
    budget = Budget(PassTimes({1: 1.0, 128: 1.1}))
    source = budget._source(bound, 0)
    for _ in range(FIRST_STEPS):
        budget.begin(_load([1.0]))
        assert budget.plan(bound, 0, [0]) is not None
        source.count(0)
        source.acceptance(False).count_offer([], 9)
        source.acceptance(False).count([], [], 9)


@pytest.mark.parametrize(
    ("share", "forced", "first"),
    [(0.02, 0, 8), (0.02, 4, 64), (0.4, 0, 160), (0.4, 4, 160)],
    ids=["judged alone", "verified", "expensive", "verified and expensive"],
)
def test_a_trial_comes_the_later_the_more_it_costs(share: float, forced: int, first: int) -> None:
    """Of steps that take `share` of a plain step more each, so that trials take 1 % of the time at most."""
    trials = Trials()
    trials.switch(False, 0)
    begun = next(step for step in range(1, 999) if step >= trials.next and trials.begin(step, share, forced))
    assert begun == first and (trials.left, trials.forced) == (TRIAL_STEPS, forced)


def test_what_a_drafter_offers_is_learned_of_each_request() -> None:
    account = DraftAccount()
    assert account.share("suffix", 0.1) == 1
    for _ in range(2):
        account.count_offer("suffix", 3.0)
    assert 0.5 < 0.1 * account.share("suffix", 0.1) < 3 and account.share("eagle3", 0.1) == 1
    for _ in range(40):
        account.count_offer("suffix", 0.0)
    assert 0 < account.share("suffix", 0.1) < 1


def test_a_drafter_that_offered_nothing_for_long_still_promises_something_to_multiply() -> None:
    acceptance, account = Acceptance(True), DraftAccount()
    for _ in range(300):
        acceptance.count_offer([], 99)
        acceptance.count([], [], 99)
    account.count_offer("suffix", 3.0)
    assert 0 < acceptance.promised < 0.05
    assert acceptance.promised * account.share("suffix", acceptance.promised) == pytest.approx(0.6, abs=0.1)


def test_a_drafter_that_does_not_pay_is_weighed_ever_more_rarely_until_it_is_asked_again() -> None:
    trials = Trials()
    trials.switch(False, 0)
    trials.next = 1 << 20
    weighed = list[int]()
    for step in range(256):
        if not trials.rests(step):
            weighed.append(step)
            trials.rest(step)
    assert weighed == [0, 8, 24, 56, 120, 184, 248]
    trials.switch(True, 256)
    trials.switch(False, 300)
    trials.rest(300)
    assert trials.until == 308


def test_the_likeliest_nodes_of_all_requests_are_verified_and_late_requests_come_first() -> None:
    bound = BoundMethod(Method(Oracle([]), Trie(4), Match()))
    continuations = [[Continuation((1, 2, 3), (p, p**2, p**3))] for p in (0.9, 0.5)]

    class Two(Retriever):
        def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
            return continuations

    tree = Method(Two(), Trie(4), Match()).grow(context_of([1], [1]))

    def chosen(weights: list[float], table: dict[int, float]) -> list[int]:
        budget = Budget(PassTimes(table))
        budget.begin(_load(weights))
        plan = budget.plan(bound, 0, [0, 1])
        assert plan is not None and plan.asked == [0, 1]
        part = DraftedTrees(bound, [0, 1], budget.offer(bound, 0, [0, 1], tree), removable=True)
        budget.choose([part])
        valid = part.tree.valid
        assert all(valid[row, part.tree.parent[row, n]] for row, n in zip(*np.nonzero(valid), strict=True) if n)
        return [int(n) - 1 for n in valid.sum(1)]

    assert chosen([1, 1], CHEAP) == [3, 3]
    assert chosen([1, 1], EXPENSIVE) == [0, 0]
    middle = {1: 1.0, 2: 2.0, 128: 2.0 + 126 * 0.6}
    few, late = chosen([1, 1], middle), chosen([1, 4], middle)
    assert few[0] > few[1] and late[1] >= late[0]


def test_a_prediction_gives_the_same_text_in_fewer_passes_and_is_counted() -> None:
    request = Request(random_tokens(6, seed=3), SamplingParams(0.7, seed=4), 40)
    text = naive(target(), request)
    # Two tokens are replaced, one is inserted, and there is a rest that never comes.
    predicted = [*text[:10], (text[10] + 1) % VOCAB, *text[11:22], 5, 6, *text[22:], 1, 2, 3]
    with unchecked():
        for method in (PLAIN, Method(good_model(VOCAB), Chain(3, draw=False), Match())):
            for budget in (None, Budget(PassTimes(CHEAP))):
                found = engine(method, budget).complete([replace(request, prediction=predicted)])[0]
                plain = engine(method, None).complete([request])[0]
                s = found.statistics
                assert list(found.tokens) == list(plain.tokens) == text
                assert s.target_passes < plain.statistics.target_passes
                assert s.accepted_prediction_tokens + s.rejected_prediction_tokens == len(predicted)
                assert 34 <= s.accepted_prediction_tokens <= 40
        limited = engine(PLAIN, None).complete([replace(request, prediction=predicted, max_drafts=0)])[0]
        assert limited.statistics.drafted == 0 and list(limited.tokens) == text


def test_forced_tokens_and_predictions_are_drafted_though_the_method_is_switched_off() -> None:
    class Off(Budget):
        def plan(self, bound, number, which, unread=lambda i: 0):  # type: ignore[no-untyped-def]
            return None

    oracle = Oracle([])
    method: AnyMethod = Method(oracle, Trie(4), Match())
    constrained = Request([1, 2], SamplingParams(0.5, seed=1), 12, constraint=Phrases(), prediction=[3, 7, 12, 1])
    with unchecked():
        found = engine(method, Off(PassTimes(CHEAP))).complete([constrained] * 2)
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


def texts(method: AnyMethod, budget: Budget | None, temperature: float, new: int = 60) -> list[list[int]]:
    engine = Engine(DecoderRunner(target()), method, rows=3, chunk=8, prefix_caching=True, budget=budget)
    shared = random_tokens(20, seed=1)
    prompts = [shared, random_tokens(9, seed=2), [*shared, 3], random_tokens(30, seed=3), [*shared, 4]]
    requests = [Request(p, SamplingParams(temperature, seed=i), max_new_tokens=new) for i, p in enumerate(prompts)]
    return [list(completion.tokens) for completion in engine.complete(requests)]


@cache
def network() -> EagleNetwork:
    """EAGLE-3 with random weights."""
    config = EagleConfig.model_validate(
        {"kind": "eagle3", "target": TargetInfo(name="tiny", hidden=TINY.hidden, vocab=VOCAB, layers=2), "heads": 4}
        | {"kv_heads": 2, "head_dim": 4, "ffn": 24, "context": 256, "fc_norm": True, "hidden_layers": (0, 1, 3)}
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = Eagle3(config, EmbeddingAndHead(target().embedding.detach(), target().head.weight.detach()))
        for parameter in found.parameters():
            parameter.data = parameter.data.double() + 0.3 * torch.randn_like(parameter.data.double())
    return found.double()


def eagle() -> AnyMethod:
    return Method(EagleDrafter(network(), 5), DynamicTree(3, 3, 6), Match())


@cache
def always_drafted(temperature: float) -> list[list[int]]:
    return texts(eagle(), None, temperature)


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bits", ["0", "01", pytest.param("1110000", marks=pytest.mark.exhaustive), "1" * 9 + "0" * 40])
@pytest.mark.parametrize("held", [("_HELD_STEPS", 32), ("_HELD_POSITIONS", 24)], ids=["steps", "positions"])
def test_the_text_is_the_same_however_drafting_is_switched(
    bits: str, held: tuple[str, int], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_states, *held)
    budget = Scripted(bits)
    assert texts(eagle(), budget, temperature) == always_drafted(temperature)
    assert set(budget.seen) == {bit == "1" for bit in bits}


class First(Budget):
    """Asks for drafts of the first requests of a step alone, `count` of them."""

    count = 1

    def plan(self, bound, number, which, unread=lambda i: 0):  # type: ignore[no-untyped-def]
        asked = [i for i in which if i < self.count]
        return Plan(asked) if asked else None


def test_a_drafter_reads_only_the_requests_that_it_is_asked_for_and_then_all_of_them() -> None:
    budget, method = First(), eagle()
    drafter, read = method.draft, list[tuple[int, int]]()
    reserve = drafter._reserve_pending

    def note(rows: Sequence[int], counts: Sequence[int]) -> Layout:
        read.extend(zip(rows, counts, strict=True))
        layout: Layout = reserve(rows, counts)
        return layout

    drafter._reserve_pending = note
    engine = Engine(DecoderRunner(target()), method, rows=3, chunk=16, budget=budget)
    prompts = [random_tokens(n, seed=n) for n in (9, 70, 21)]
    for prompt in prompts:
        engine.submit(Request(prompt, SamplingParams(0), max_new_tokens=60))
    for _ in range(20):
        engine.step()
    rows = [r.row for r in engine._scheduler.running]
    assert {row for row, _ in read} == {rows[0]}
    read.clear()
    texts = [r.sequence for r in engine._scheduler.running]
    context = replace(context_of(*prompts), rows=tuple(rows), sequences=tuple(texts))
    behind = {row: drafter.unread(context, i) for i, row in enumerate(rows)}
    assert [behind[row] for row in rows[1:]] == [text.length - 1 for text in texts[1:]]
    budget.count = 3
    engine.step()
    assert {row: sum(n for r, n in read if r == row) for row in rows} == behind
    assert [drafter._prefixes[row].start for row in rows] == [0, 0, 0]


@pytest.mark.parametrize(("left", "asked"), [(600, [0, 1]), (6, [0])])
def test_a_request_is_read_only_if_its_drafts_can_pay_for_it(left: int, asked: list[int]) -> None:
    bound = BoundMethod(Method(Oracle([]), Trie(4), Match()))
    budget = Budget(PassTimes(CHEAP))
    load = replace(_load([1.0, 1.0]), left=[600, left])
    budget.begin(load)
    plan = budget.plan(bound, 0, [0, 1], [0, 1500].__getitem__)
    assert plan is not None and plan.asked == asked


@pytest.mark.parametrize(("later", "asked"), [(CHEAP, True), (EXPENSIVE, False)])
def test_beside_a_prompt_a_drafter_reads_only_where_later_steps_would_ask_it(
    later: dict[int, float], asked: bool
) -> None:
    bound = BoundMethod(Method(Oracle([]), Trie(4), Match()))
    budget = Budget(PassTimes(later))
    budget._source(bound, 0).steps = FIRST_STEPS
    budget.times.observe_draft("prompt", 1, 1e-3, 1e-3)
    budget.begin(replace(_load([1.0]), tokens=401, is_decode=False, left=[600]))
    assert (budget.plan(bound, 0, [0], lambda _: 100) is not None) is asked


def _plan(slope: float, weights: Sequence[float]) -> Plan:
    """For one drafter with scores, where a further token takes `slope` of a pass."""
    bound = BoundMethod(Method(Oracle([]), Trie(4), Match()))
    budget = Budget(PassTimes({1: 1.0, 128: 1 + 127 * slope}))
    budget._source(bound, 0).steps = FIRST_STEPS
    budget.begin(_load(weights))
    plan = budget.plan(bound, 0, range(len(weights)))
    assert plan is not None
    return plan


def test_nodes_are_expanded_only_where_their_children_can_pay_for_their_verification() -> None:
    assert _plan(0.1, [1.0]).least_expanded > _plan(0.05, [1.0]).least_expanded > _plan(0.01, [1.0]).least_expanded


def test_what_all_tokens_are_worth_is_no_reason_to_grow_other_trees() -> None:
    one, three = _plan(0.05, [1.0, 1.0]), _plan(0.05, [3.0, 3.0])
    assert (one.least_score, one.least_expanded) == pytest.approx((three.least_score, three.least_expanded))


def test_no_drafts_are_verified_in_a_step_without_drafting() -> None:
    budget = Scripted("0" * 20 + "1" * 20)
    engine = Engine(DecoderRunner(target()), eagle(), rows=1, budget=budget)
    engine.submit(Request(random_tokens(5, seed=1), SamplingParams(0), max_new_tokens=200))
    drafted = list[bool]()
    for _ in range(40):
        engine.step()
        drafted.append(engine.last_step.counts.drafted > 0)
    assert not any(drafted[:20])
    assert sum(drafted[20:]) > 15


@pytest.mark.parametrize("drafts", [True, False])
def test_a_prefix_that_others_have_read_is_not_read_again(drafts: bool) -> None:
    budget = None if drafts else Scripted("0")
    engine = Engine(DecoderRunner(target()), eagle(), rows=2, prefix_caching=True, budget=budget)
    prompt = random_tokens(50, seed=5)
    [first] = engine.complete([Request(prompt, SamplingParams(0), max_new_tokens=8, max_drafts=0)])
    [second] = engine.complete([Request([*prompt, 1], SamplingParams(0), max_new_tokens=8)])
    assert first.statistics.cached_tokens == 0
    assert second.statistics.cached_tokens == 49
    [alone] = Engine(DecoderRunner(target()), eagle(), rows=2).complete(
        [Request([*prompt, 1], SamplingParams(0), max_new_tokens=8)]
    )
    assert second.tokens == alone.tokens


class Failing(Budget):
    """Fails once, after the tokens of a step are in the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def observe(self, step, time, shared) -> None:  # type: ignore[no-untyped-def]
        self.calls += 1
        if self.calls == 12:
            raise ZeroDivisionError("the fifth wheel")


def test_an_error_after_the_commit_ends_the_requests_and_leaves_no_token_out() -> None:
    requests = [Request(random_tokens(9, seed=i), SamplingParams(0), max_new_tokens=60) for i in range(3)]
    expected = Engine(DecoderRunner(target()), eagle(), rows=2).complete(requests)
    engine = Engine(DecoderRunner(target()), eagle(), rows=2, budget=Failing())
    found = engine.complete(requests, raise_errors=False)
    assert [c.finish_reason for c in found] == ["error", "error", "length"]
    for completion, whole in zip(found, expected, strict=True):
        assert completion.tokens == whole.tokens[: len(completion.tokens)]
    assert found[2].tokens == expected[2].tokens
    assert engine.unowned_rows == 0


class JumpingClock:
    """A clock that goes on by very different times, in an order of its own per seed."""

    def __init__(self, seed: int) -> None:
        self.now, self._rng = 0.0, np.random.default_rng(seed)

    def __call__(self) -> float:
        self.now += float(10 ** self._rng.uniform(-6, 2))
        return self.now


@pytest.mark.parametrize(
    "variant",
    methods_by_kind([v for v in VARIANTS if v.lossless and not v.same_seed], of=("draft_model", "mixed", "pass")),
)
def test_no_measured_time_is_in_a_text_that_depends_on_drafts(variant: Variant) -> None:
    requests = [Request(random_tokens(6 + 3 * i, seed=i), SamplingParams(1.0, seed=i), 24) for i in range(3)]
    copies: AnyMethod = Method(PromptLookup(2, 1, 4), Trie(4, elastic=True), Match())
    others = [Request([1, 2, 3] * 4, max_new_tokens=20, method=copies)] * 2
    texts = list[list[list[int]]]()
    with unchecked():
        for seed, company in ((0, False), (1, True), (2, False)):
            run = Engine(DecoderRunner(target()), variant.make(VOCAB), 6, clock=JumpingClock(seed), budget=Budget())
            texts.append(tokens(run.complete([*requests, *(others if company else ())])[:3]))
    assert texts[0] == texts[1] == texts[2]
