"""A method per request in one batch: texts, passes, limits, failures, order, and prefixes shared between rows."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from foretell.accept import Match
from foretell.catalogue import BUILT_IN
from foretell.core.context import Context, StepResult
from foretell.core.sampling import SamplingParams
from foretell.core.tree import join_probe_embeddings, root_tree, tree_from_lists
from foretell.draft import DrafterUnion, DraftModel, NoDrafter, PromptLookup
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Completion, Request
from foretell.model import kernels as native
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import BranchingTree, Chain, DynamicTree, RootOnly, Trie
from helpers import (
    VARIANTS,
    VOCAB,
    Phrases,
    Variant,
    engine_for,
    naive,
    of_catalogue,
    random_tokens,
    sibling,
    small_model,
    speculator,
    target,
    unchecked,
    wide_target,
)

PLAIN: AnyMethod = Method(NoDrafter(), RootOnly(), Match())
MIXED = (
    *("autoregressive", "ngram", "eagle3", "hybrid_model", "jacobi", "lookahead", "draft_model", "medusa", "pass"),
    *("pass_tree", "phrases", "typical_tree"),
)
"""Variants that decode in one batch, each with one request."""
kernels_only = pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")


def variant(name: str) -> Variant:
    return next(v for v in VARIANTS if v.name == name)


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(c.tokens) for c in completions]


class CountingRunner(DecoderRunner):
    """Counts its passes and the tokens of prompts that it reads."""

    passes = prompt_tokens = 0

    def forward(self, rows, tree, **more):  # type: ignore[no-untyped-def]
        self.passes += 1
        self.prompt_tokens += int(tree.prefix_length[tree.prefix_length > 1].sum())
        return super().forward(rows, tree, **more)


def test_requests_of_all_methods_share_a_pass_and_each_gets_the_text_it_gets_alone() -> None:
    requests = [
        Request(random_tokens(5 + 3 * i, seed=i), SamplingParams(i % 3 / 2, seed=i), 9) for i in range(len(MIXED))
    ]
    runner = CountingRunner(target())
    engine, steps = Engine(runner, PLAIN, rows=len(MIXED) - 3, chunk=32), 0
    with unchecked():
        methods = [variant(name).make(VOCAB) for name in MIXED]
        alone = [engine_for(m).complete([r])[0] for m, r in zip(methods, requests, strict=True)]
        mixed = [replace(r, method=m) for r, m in zip(requests, methods, strict=True)]
        numbers, found = [engine.submit(r) for r in mixed], dict[int, list[int]]()
        while engine.busy:
            steps += 1
            for update in engine.step():
                assert update.error is None
                found.setdefault(update.request, []).extend(update.tokens)
    assert [found[n] for n in numbers] == tokens(alone)
    assert runner.passes == steps
    expected = [naive(target(), r) for r in requests]
    for i, name in enumerate(MIXED):
        if variant(name).same_seed or (variant(name).lossless and not requests[i].sampling_params.temperature):
            assert list(alone[i].tokens) == expected[i], name


@kernels_only
def test_methods_in_one_batch_give_the_bits_they_give_alone_on_the_kernels() -> None:
    requests = [
        Request(random_tokens(9 + i, seed=i), SamplingParams(i % 2, seed=i), 12, logprobs=True) for i in range(6)
    ]

    def methods() -> list[AnyMethod]:
        entries = {e.name: e for e in BUILT_IN}
        names = ("autoregressive", "eagle3", "hybrid", "lookahead", "pass", "dynamic_tree")
        drafts = [DecoderRunner(NativeDecoder(wide_target(5, 1), "float32"))]
        trained = [entries[n].speculator for n in names]
        return [
            of_catalogue(entries[n], wide_target(), drafts, speculator(kind, wide=True) if kind else None)
            for n, kind in zip(names, trained, strict=True)
        ]

    def engine(method: AnyMethod = PLAIN) -> Engine:
        return Engine(DecoderRunner(NativeDecoder(wide_target(), "float32")), method, rows=6, chunk=16)

    with unchecked():
        together = [replace(r, method=m) for r, m in zip(requests, methods(), strict=True)]
        found = engine().complete(together)
        alone = [engine(m).complete([r])[0] for m, r in zip(methods(), requests, strict=True)]
    assert [(c.tokens, c.logprobs) for c in found] == [(c.tokens, c.logprobs) for c in alone]


def test_methods_of_one_engine_must_not_share_parts_while_both_are_busy() -> None:
    draft, request = small_model(VOCAB), Request([1, 2, 3], max_new_tokens=6)
    one, two = (
        Method(draft, Chain(3), Match()),
        Method(DrafterUnion([draft]), BranchingTree((2, 2)), Match()),
    )
    engine = engine_for(PLAIN)
    first = engine.submit(replace(request, method=one))
    engine.step()
    with pytest.raises(ValueError, match="another method, which is busy: build parts of its own"):
        engine.submit(replace(request, method=two))
    engine.cancel(first)
    expected = naive(target(), request)
    assert tokens(engine.complete([replace(request, method=m) for m in (two, two, PLAIN)])) == [expected] * 3
    assert tokens(engine.complete([replace(request, method=one)])) == [expected]


def test_draft_models_of_several_methods_may_share_a_runner() -> None:
    runner = DecoderRunner(sibling(VOCAB))
    methods = [Method(DraftModel(runner), shape, Match()) for shape in (Chain(3), DynamicTree(2, 2, 4))]
    engine = Engine(DecoderRunner(target()), PLAIN, rows=2, prefix_caching=True)
    requests = [Request(random_tokens(n % 5 + 4, seed=n % 3), max_new_tokens=8) for n in range(6)]
    with unchecked():
        found = engine.complete([replace(r, method=methods[i % 2]) for i, r in enumerate(requests)])
        assert tokens(found) == [naive(target(), r) for r in requests]


class Failing(PromptLookup):
    """Fails in one phase of every step that contains a prompt of 3 tokens."""

    phase = "propose"

    def retrieve(self, context: Context, budget: int):  # type: ignore[no-untyped-def]
        self._check("propose", context)
        return super().retrieve(context, budget)

    def observe(self, step: StepResult) -> None:
        self._check("observe", step.context)
        super().observe(step)

    def _check(self, phase: str, context: Context) -> None:
        if phase == self.phase and any(t.prompt_length == 3 and len(t.generated) > 2 for t in context.sequences):
            raise IndexError("out of bounds")


@pytest.mark.parametrize("phase", ["propose", "observe"])
def test_a_drafter_that_fails_ends_requests_of_its_own_method_only(phase: str) -> None:
    bad = Method(Failing(), Trie(6), Match())
    bad.draft.phase = phase
    lengths, methods = (3, 9, 5, 6), (bad, bad, variant("eagle3").make(VOCAB), PLAIN)
    requests = [
        Request(random_tokens(n, seed=n), max_new_tokens=9, method=m) for n, m in zip(lengths, methods, strict=True)
    ]
    runner = CountingRunner(target())
    engine = Engine(runner, PLAIN, rows=4, chunk=64)
    numbers, found, passes = [engine.submit(r) for r in requests], dict[int, list[int]](), list[int]()
    errors = dict[int, str]()
    while engine.busy:
        runner.passes = 0
        for update in engine.step():
            found.setdefault(update.request, []).extend(update.tokens)
            if update.error is not None:
                errors[update.request] = repr(update.error)
        passes.append(runner.passes)
    assert errors == {numbers[0]: "IndexError('out of bounds')"}
    assert [found[n] for n in numbers[1:]] == [naive(target(), replace(r, method=None)) for r in requests[1:]]
    assert sorted(passes)[-2:] == [1, 2 if phase == "propose" else 3], "the other methods' requests stay together"


def test_a_request_limits_its_drafts() -> None:
    prompt, seen = random_tokens(12, seed=1), list[tuple[int, ...]]()

    class Watched(DynamicTree):
        def observe(self, step: StepResult) -> None:
            seen.append(tuple(step.num_drafted(i) for i in range(len(step.paths))))

    method = Method(small_model(VOCAB), Watched(4, 3, 12), Match())
    limits = (None, 0, 1, 3)
    requests = [Request(prompt, SamplingParams(1.0, seed=5), 20, max_drafts=m) for m in limits]
    found = engine_for(method, rows=4).complete(requests)
    assert tokens(found) == [naive(target(), requests[0])] * 4
    assert [c.statistics.drafted > 0 for c in found] == [True, False, True, True]
    for most, completion in zip(limits, found, strict=True):
        assert most is None or completion.statistics.drafted <= most * completion.statistics.target_passes
    assert max(map(max, seen)) == 12 and all(len(counts) <= 3 for counts in seen)


def test_a_request_among_many_drafts_what_its_constraint_forces_and_nothing_else() -> None:
    free = Request([1, 2, 3] * 4, SamplingParams(), 24)
    constrained = replace(free, constraint=Phrases(), max_new_tokens=12)
    requests = [free, free, constrained, replace(constrained, max_drafts=0)]
    with unchecked():
        runner = engine_for(PLAIN).runner
        method: AnyMethod = Method(PromptLookup(3), Trie(4), Match())
        found = Engine(runner, method, rows=4, budget=Budget(disable_by_batch_size=1)).complete(requests)
        plain = Engine(runner, PLAIN, rows=4).complete(requests)
        alone = Engine(runner, method, rows=4).complete(requests[:1])[0].statistics
    assert tokens(found) == tokens(plain)
    first, _, forced, none = (c.statistics for c in found)
    assert not none.drafted and first.drafted < alone.drafted
    assert forced.drafted and forced.target_passes < none.target_passes


def test_the_drafts_that_are_left_out_are_the_last_or_the_least_likely() -> None:
    tree = tree_from_lists([[9, 1, 2, 3, 4], [9, 1, 2, 3, 4]], [[-1, 0, 0, 1, 2], [-1, 0, 0, 1, 2]])
    assert tree.limit_drafts(()) is tree.limit_drafts((4, None)) is tree
    assert tree.limit_drafts((2, 0)).valid.tolist() == [[True] * 3 + [False] * 2, [True] + [False] * 4]
    scored = replace(tree, score=np.array([[1, 0.2, 0.7, 0.1, 0.6]] * 2))
    assert scored.limit_drafts((2, None)).valid.tolist() == [[True, False, True, False, True], [True] * 5]


def test_probe_embeddings_of_several_trees_get_ids_of_their_own() -> None:
    one, two = torch.ones(2, 4), torch.zeros(3, 4)
    trees = [
        replace(root_tree([1]).with_probes([[VOCAB, VOCAB + 1]], [[0, 1]]), probe_embeddings=one),
        root_tree([5]),
        replace(root_tree([2]).with_probes([[VOCAB + 2]], [[0]]), probe_embeddings=two),
    ]
    joined, offsets = join_probe_embeddings(trees, VOCAB)
    assert offsets == [0, 0, 2] and joined[2].token.tolist() == [[2, VOCAB + 4]]
    assert joined[0].probe_embeddings is joined[2].probe_embeddings
    assert (
        joined[0].probe_embeddings is not None
        and joined[0].probe_embeddings.tolist() == [[1.0] * 4] * 2 + [[0.0] * 4] * 3
    )
    assert joined[2].shift_probe_ids(VOCAB, -2).token.tolist() == trees[2].token.tolist()


def test_the_order_of_service_is_lateness_priority_arrival() -> None:
    now = [0.0]
    engine = Engine(DecoderRunner(target()), PLAIN, rows=1, clock=lambda: now[0])
    request, ended = Request([1, 2], max_new_tokens=1), list[int]()
    for priority, deadline in ((0, None), (-1, None), (5, 2.0), (-1, 9.0), (0, None)):
        engine.submit(replace(request, priority=priority, deadline=deadline))
    ended += [u.request for u in engine.step()]
    now[0] = 3.0
    ended += [u.request for u in engine.run()]
    assert ended == [2, 3, 4, 1, 5]
    engine = Engine(DecoderRunner(target()), PLAIN, rows=2, chunk=4)
    for priority in (1, 0):
        engine.submit(Request(random_tokens(6, seed=priority), max_new_tokens=1, priority=priority))
    assert [engine.step(), [u.request for u in engine.step()]] == [[], [2]], "chunks of prompts go by priority, too"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"method": "eagle3"}, "method must be a Method, found str"),
        ({"max_drafts": -1}, "max_drafts must be at least 0, found -1"),
        ({"max_drafts": 1.5}, "max_drafts must be a whole number"),
        ({"priority": "high"}, "priority must be a whole number, found 'high'"),
        ({"deadline": "soon"}, "deadline must be a time in seconds, found 'soon'"),
    ],
)
def test_switches_of_wrong_types_are_refused(values: dict[str, object], words: str) -> None:
    with unchecked(), pytest.raises(ValueError, match=words):
        engine_for(PLAIN).submit(Request([1], **values))  # type: ignore[arg-type]


# Prefixes shared between rows.

COPYING = ("autoregressive", "eagle3", "draft_model", "hybrid_model", "phrases", "cascade")


@pytest.mark.parametrize("name", COPYING)
def test_a_prefix_of_a_running_request_is_copied_and_changes_no_answer(name: str) -> None:
    prompt = random_tokens(40, seed=3)
    requests = [
        Request([*prompt, *random_tokens(n, seed=n)], SamplingParams(1.0, seed=n), 10) for n in (6, 5, 5, 2)
    ] + [Request(random_tokens(9, seed=9), max_new_tokens=5)]
    texts, read = list[list[list[int]]](), list[int]()
    with unchecked():
        for caching in (False, True):
            runner = CountingRunner(target())
            engine = Engine(runner, variant(name).make(VOCAB), rows=4, chunk=32, prefix_caching=caching)
            found = engine.complete(requests)
            texts.append(tokens(found))
            read.append(sum(len(r.prompt) - c.statistics.cached_tokens for r, c in zip(requests, found, strict=True)))
    assert texts[0] == texts[1]
    # Of the prompts that wait, two get the 32 tokens of the first chunk; the last gets 40 of a row that is free again.
    assert read == [sum(len(r.prompt) for r in requests), 46 + 13 + 13 + 2 + 9]


@kernels_only
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_copied_rows_give_the_same_bits_on_the_kernels(precision: str) -> None:
    found = []
    for caching in (False, True):
        runner = DecoderRunner(NativeDecoder(wide_target(), precision))  # type: ignore[arg-type]
        engine = Engine(runner, PLAIN, rows=3, chunk=16, prefix_caching=caching)
        requests = [Request([*random_tokens(37, seed=2), n], max_new_tokens=8, logprobs=True) for n in (1, 2, 3)]
        found.append([(c.tokens, c.logprobs) for c in engine.complete(requests)])
    assert found[0] == found[1]


def test_a_row_of_another_method_serves_drafters_that_do_not_need_all_hidden_states() -> None:
    eagle, lookup = variant("eagle3").make(VOCAB), variant("ngram").make(VOCAB)
    request = Request(random_tokens(30, seed=1), max_new_tokens=8)
    engine = Engine(DecoderRunner(target()), PLAIN, rows=3, prefix_caching=True)
    cached = []
    with unchecked():
        for method in (eagle, lookup, PLAIN, eagle):
            (completion,) = engine.complete([replace(request, method=method)])
            assert list(completion.tokens) == naive(target(), request)
            cached.append(completion.statistics.cached_tokens)
    assert cached == [0, 29, 29, 29]


def test_a_short_common_prefix_does_not_cost_another_conversation_its_row() -> None:
    engine = Engine(DecoderRunner(target()), PLAIN, rows=2, prefix_caching=True)
    long, short = random_tokens(50, seed=1), [*random_tokens(50, seed=1)[:8], 3, 4]
    cached = [
        engine.complete([Request(p, max_new_tokens=2)])[0].statistics.cached_tokens for p in (long, short, long, short)
    ]
    assert cached == [0, 7, 49, 9]


def test_a_prompt_that_continues_a_running_request_reads_the_rest_alone() -> None:
    engine = Engine(DecoderRunner(target()), variant("eagle3").make(VOCAB), rows=3, prefix_caching=True)
    engine.submit(Request(random_tokens(40, seed=2), max_new_tokens=20))
    begun = [t for _ in range(4) for u in engine.step() for t in u.tokens]
    text = [*random_tokens(40, seed=2), *begun]
    branches = [Request(text, SamplingParams(1.0, seed=4), 6), Request([*text, 3, 1], max_new_tokens=6)]
    numbers = [engine.submit(branch) for branch in branches]
    found, statistics = dict[int, list[int]](), dict[int, int]()
    for update in engine.run():
        found.setdefault(update.request, []).extend(update.tokens)
        if update.statistics is not None:
            statistics[update.request] = update.statistics.cached_tokens
    for branch_number, branch in zip(numbers, branches, strict=True):
        assert found[branch_number] == naive(target(), branch)
        assert statistics[branch_number] >= 38 + len(begun)
