"""Drafts by exits of the target: which exit a token leaves at, and what the target's pass has left to do."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from foretell.accept import AcceptExits, Match, Rejection
from foretell.catalogue import BuildContext, build
from foretell.core.context import Context, TokenBuffer
from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.core.tree import TokenTree, root_tree
from foretell.draft import NoDrafter
from foretell.draft.early_exit import EarlyExitDrafter
from foretell.draft.exit_heads import ExitRule, SharedHead, TrainedExits
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Completion, Request
from foretell.model.load.checkpoint import embedding_and_head_of
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, DynamicTree, RootOnly
from foretell.speculator.checkpoint import save
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.exits import Exits, ExitsConfig, Halting
from helpers import VOCAB, chain_tree, naive, random_tokens, target, unchecked

LAYERS, EXITS = 5, (1, 2, 4)
PROMPTS = [random_tokens(n, seed=n) for n in (3, 17, 40, 1)]
REQUESTS = [Request(p, SamplingParams(temperature=i % 2, seed=i), max_new_tokens=16) for i, p in enumerate(PROMPTS)]


@cache
def network(halting: Halting = "agreement") -> Exits:
    """Exits of random weights."""
    decoder = target(layers=LAYERS)
    info = TargetInfo(name="tiny", hidden=decoder.config.hidden, vocab=VOCAB, layers=LAYERS)
    config = ExitsConfig(target=info, layers=EXITS, draft_vocab=20, norm_eps=decoder.config.norm_eps, halting=halting)
    made = Exits(config, embedding_and_head_of(decoder)).double()
    made.set_draft_vocab(torch.arange(4, 24))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in made.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return made.requires_grad_(False)


def drafter(*thresholds: float, **options: object) -> EarlyExitDrafter:
    rule = ExitRule("softmax", thresholds) if thresholds else None
    return EarlyExitDrafter(TrainedExits(network()), rule, **options)  # type: ignore[arg-type]


def engine_of(method: Method[Any], rows: int = 4) -> Engine:
    return Engine(DecoderRunner(target(layers=LAYERS)), method, rows=rows)


def answers(method: Method[Any], requests: Sequence[Request] = REQUESTS, rows: int = 4) -> list[list[int]]:
    return [list(c.tokens) for c in engine_of(method, rows).complete(requests)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [Chain(4, draw=False), DynamicTree(3, 2, 6)], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "thresholds",
    [(), (0.05, 0.1, 0.2), *(pytest.param(t, marks=pytest.mark.exhaustive) for t in ((0, 1, 1), (1, 1, 1)))],
    ids=str,
)
def test_tokens_are_those_of_naive_decoding_wherever_drafts_leave(shape: Chain, thresholds: tuple[float, ...]) -> None:
    expected = [naive(target(layers=LAYERS), r) for r in REQUESTS]
    draft = drafter(*thresholds)
    assert answers(Method(draft, shape, Match())) == expected
    assert answers(Method(drafter(*thresholds), shape, Match()), rows=1) == expected
    assert draft.exit_counts.sum() > 20


@pytest.mark.exhaustive
def test_sampled_drafts_of_several_exits_do_not_depend_on_the_batch() -> None:
    requests = [replace(r, sampling_params=SamplingParams(temperature=1.5, seed=7)) for r in REQUESTS]
    together = answers(Method(drafter(0.05, 0.1, 0.2), Chain(4), Rejection()), requests)
    assert together == answers(Method(drafter(0.05, 0.1, 0.2), Chain(4), Rejection()), requests, rows=1)


def test_a_token_leaves_at_the_first_confident_exit_and_at_the_last_one_in_any_case() -> None:
    for thresholds, expected in (((0, 1, 1), 0), ((1, 0, 1), 1), ((1, 1, 1), 2)):
        draft = drafter(*thresholds)
        answers(Method(draft, Chain(3, draw=False), Match()))
        assert np.flatnonzero(draft.exit_counts).tolist() == [expected]
    mixed = drafter(0.1, 0.1, 0.1)
    answers(Method(mixed, Chain(3, draw=False), Match()))
    assert (mixed.exit_counts > 0).sum() > 1


def test_exits_are_earlier_the_lower_the_threshold() -> None:
    depth = []
    for level in (0.0, 0.03, 0.1, 0.3, 1.0):
        draft = drafter(level, level, level)
        answers(Method(draft, Chain(2, draw=False), Match()), REQUESTS[:1])
        depth.append(float(draft.exit_counts @ np.array(EXITS) / draft.exit_counts.sum()))
    assert depth == sorted(depth) and depth[0] == 1 and depth[-1] == 4


def test_thresholds_decay_over_the_answer_and_stay_within_bounds() -> None:
    rule = ExitRule("softmax", (0.5, 1.0), decay=4, horizon=100)
    levels = rule.threshold(0, np.arange(200))
    assert levels[0] == pytest.approx(0.9 * 0.5 + 0.1) and (np.diff(levels) <= 0).all()
    assert ((levels >= 0) & (levels <= 1)).all() and levels[-1] == pytest.approx(0.45, abs=1e-3)
    assert rule.threshold(1, 50) == 1, "an exit that is switched off stays so"
    assert (ExitRule("softmax", (0.5,)).threshold(0, np.arange(9)) == 0.5).all()
    with unchecked(), pytest.raises(ValueError, match="unknown confidence 'guess': softmax, probability, state"):
        ExitRule("guess", (0.5,))  # type: ignore[arg-type]


def test_the_state_measure_compares_the_last_two_layers() -> None:
    draft = EarlyExitDrafter(TrainedExits(network(), (2, 4)), ExitRule("state", (-1.0, -1.0)))
    engine = engine_of(Method(draft, Chain(2, draw=False), Match()))
    seen = list[torch.Tensor]()
    runner = engine.runner
    assert isinstance(runner, DecoderRunner)
    begin = runner.begin_pass

    def spied(rows: Sequence[int], tree: TokenTree) -> object:
        run = begin(rows, tree)
        advance = run.advance

        def advance_and_keep(wanted: np.ndarray, layer: int) -> object:
            found = advance(wanted, layer)
            seen.append(torch.nn.functional.cosine_similarity(found.states, found.before, dim=-1))
            assert found.before.shape == found.states.shape and not torch.equal(found.before, found.states)
            return found

        run.advance = advance_and_keep  # type: ignore[method-assign,assignment]
        return run

    runner.begin_pass = spied  # type: ignore[method-assign,assignment]
    completed = engine.complete(REQUESTS)
    assert [list(c.tokens) for c in completed] == [naive(target(layers=LAYERS), r) for r in REQUESTS]
    assert seen and all((s.abs() <= 1 + 1e-9).all() for s in seen)


def test_the_classifier_measure_is_the_trained_one() -> None:
    exits = network()
    h = torch.randn(6, exits.config.target.hidden, dtype=torch.float64)
    heads = TrainedExits(exits)
    x = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + exits.config.norm_eps)
    expected = torch.sigmoid(x @ exits.classifier[1] + exits.classifier_bias[1])
    torch.testing.assert_close(heads.classify(1, h), expected)
    draft = EarlyExitDrafter(heads, ExitRule("classifier", (0.5, 0.5, 0.5)))
    assert answers(Method(draft, Chain(3, draw=False), Match())) == [naive(target(layers=LAYERS), r) for r in REQUESTS]
    with pytest.raises(ValueError, match="have no classifier"):
        SharedHead(target(layers=LAYERS), 2).classify(0, h)


def test_the_method_reads_fitted_exits_and_refuses_others(tmp_path: Path) -> None:
    exits = network()
    exits.agreement.copy_(torch.tensor([0.1, 0.6, 0.2]))
    save(tmp_path / "exits", exits, exits.config)
    context = BuildContext(VOCAB, target(layers=LAYERS), speculators=(tmp_path / "exits",))
    method = build("layer_skip", context, {"draft_sample_method": "greedy"})
    assert method.draft.heads.layers == (2,) and method.drafter_label == "exits after 2 of 5 layers"
    assert answers(method) == [naive(target(layers=LAYERS), r) for r in REQUESTS]
    several = build("layer_skip", context, {"exit_layer": 4, "exit_threshold": 0.2})
    assert several.draft.heads.layers == (1, 2, 4)
    with pytest.raises(ValueError, match=r"no exit after 3 layers: the exits are after \[1, 2, 4\]"):
        build("layer_skip", context, {"exit_layer": 3})
    with pytest.raises(ValueError, match="trained for another model"):
        build("layer_skip", replace(context, network=target(layers=3), known_speculators={}))


def test_a_drafter_without_an_engine_says_so() -> None:
    request = REQUESTS[0]
    context = Context((0,), (TokenBuffer(request.prompt),), (request.sampling_params,), (CounterRNG(0),), np.array([3]))
    with pytest.raises(ValueError, match="shares the cache of its target works in an engine only"):
        drafter().expand(root_tree([1]), np.zeros((1, 1), np.int64), context)


def test_without_a_confident_exit_answers_are_those_of_all_layers() -> None:
    draft = drafter(1, 1, 1, only_confident=True)
    greedy = [replace(r, sampling_params=SamplingParams()) for r in REQUESTS]
    assert answers(Method(draft, Chain(4), AcceptExits()), greedy) == [naive(target(layers=LAYERS), r) for r in greedy]
    assert draft.exit_counts.sum() == 0


@pytest.mark.parametrize("cap", [1, 3])
def test_no_more_tokens_wait_than_allowed(cap: int) -> None:
    """EE-LLM's cap: where every token may leave, a pass of all layers takes the waiting ones and one more."""
    draft = drafter(0, 0, 0, only_confident=True)
    engine, request = engine_of(Method(draft, Chain(cap), AcceptExits())), Request(PROMPTS[1], max_new_tokens=24)
    engine.submit(request)
    tokens = [len(update.tokens) for _ in range(14) for update in engine.step()]
    assert max(tokens) == cap + 1 and sum(tokens) == 24


def test_rollback_takes_back_what_the_whole_model_finds_unlikely(tmp_path: Path) -> None:
    """FREE's RollBack: without a limit all that left stays, and at 0 nats the answer is the whole model's."""
    save(tmp_path / "exits", network(), network().config)
    context = BuildContext(VOCAB, target(layers=LAYERS), speculators=(tmp_path / "exits",))
    request = Request(PROMPTS[1], max_new_tokens=14)

    def run(**options: float) -> Completion:
        method = build("early_exit_lossy", context, {"exit_threshold": 0.02, **options})
        return engine_of(method).complete([request])[0]

    kept, every, none = run(), run(rollback_threshold=1e9), run(rollback_threshold=0.0)
    assert kept.tokens == every.tokens and kept.statistics.target_passes == every.statistics.target_passes
    assert list(none.tokens) == naive(target(layers=LAYERS), request) != list(kept.tokens)
    assert none.statistics.fidelity.changed == 0 < kept.statistics.fidelity.changed
    assert run(rollback_threshold=3.0).statistics.fidelity.changed <= kept.statistics.fidelity.changed


@pytest.mark.parametrize("missing", ["recompute", "copy"])
def test_tokens_that_leave_are_answers_and_the_next_pass_runs_what_is_left(missing: str) -> None:
    draft = drafter(0.02, 0.02, 0.02, only_confident=True, missing_keys=missing)
    method = Method(draft, Chain(4), AcceptExits(exact_keys=missing == "recompute"))
    engine, request = engine_of(method), Request(PROMPTS[1], max_new_tokens=24)
    completed = engine.complete([request])[0]
    assert len(completed.tokens) == 24 and completed.statistics.target_passes < 24
    # What copied keys change is not known, not even where a token has run all layers.
    assert completed.statistics.fidelity.tokens == (24 if missing == "recompute" else 0)


@pytest.mark.parametrize("missing", ["recompute", "copy"])
def test_missing_keys_are_exact_if_recomputed_and_copies_of_the_exit_otherwise(missing: str) -> None:
    draft = drafter(0.02, 0.02, 0.02, only_confident=True, missing_keys=missing)
    engine = engine_of(Method(draft, Chain(4), AcceptExits(exact_keys=missing == "recompute")))
    engine.submit(Request(PROMPTS[1], max_new_tokens=60))
    text = [*PROMPTS[1]]
    for _ in range(8):
        for update in engine.step():
            text += update.tokens
    runner, fresh = engine.runner, DecoderRunner(target(layers=LAYERS))
    assert isinstance(runner, DecoderRunner) and draft.exit_counts.sum() > 8
    length = runner.length(0)
    assert length == len(text) - 1
    fresh.forward([0], chain_tree(text[:length]))
    same = [
        torch.allclose(mine, own, rtol=0, atol=1e-10)
        for layer in range(LAYERS)
        for mine, own in zip(
            runner.cache.read(layer, torch.tensor([0]), length),  # type: ignore[attr-defined]
            fresh.cache.read(layer, torch.tensor([0]), length),  # type: ignore[attr-defined]
            strict=True,
        )
    ]
    assert all(same) if missing == "recompute" else all(same[:2]) and not all(same)


def depth_drafter(halting: Halting, level: float) -> EarlyExitDrafter:
    """Tokens leave at the depth that classifiers choose."""
    return EarlyExitDrafter(TrainedExits(network(halting)), ExitRule("classifier", (level,) * 3), only_confident=True)


def test_a_depth_that_is_chosen_for_an_answer_holds_for_all_its_tokens() -> None:
    request, found = Request(PROMPTS[1], max_new_tokens=24), set[int]()
    for level in (0.02, 0.2, 0.4, 0.6, 0.8, 0.98):
        draft = depth_drafter("sequence", level)
        answers(Method(draft, Chain(4), AcceptExits()), [request])
        used = np.flatnonzero(draft.exit_counts).tolist()
        assert len(used) <= 1, "one exit, or none"
        found |= set(used)
    assert found, "some level lets tokens leave"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("halting", get_args(Halting))
def test_at_a_threshold_of_one_the_depth_is_that_of_all_layers(halting: Halting, rows: int) -> None:
    """Depth-Adaptive Transformer: no share of the depths below the last one passes it, and the text is the model's."""
    draft = depth_drafter(halting, 1.0)
    greedy = [replace(r, sampling_params=SamplingParams()) for r in REQUESTS]
    found = answers(Method(draft, Chain(4), AcceptExits()), greedy, rows=rows)
    assert found == [naive(target(layers=LAYERS), r) for r in greedy] and draft.exit_counts.sum() == 0
    draft = depth_drafter(halting, 0.0)
    answers(Method(draft, Chain(4), AcceptExits()), greedy, rows=rows)
    assert draft.exit_counts.sum() > 0


def test_depths_of_tokens_are_the_distribution_at_the_first_exit() -> None:
    heads = TrainedExits(network("token"))
    h = torch.randn(6, heads._network.config.target.hidden, dtype=torch.float64)
    below = heads.depth_distribution(h)
    scores = torch.cat([heads._network.depth_scores(h), torch.zeros(6, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(below, scores.softmax(-1).cumsum(-1)[:, :3])
    some = TrainedExits(network("token"), (4,))
    assert some.first_layer == 1 and torch.equal(some.depth_distribution(h)[:, 0], below[:, 2])
    draft = depth_drafter("token", 0.3)
    together = answers(Method(draft, Chain(4), AcceptExits()))
    assert together == answers(Method(depth_drafter("token", 0.3), Chain(4), AcceptExits()), rows=1)
    assert draft.exit_counts.sum() > 0
    with pytest.raises(ValueError, match="choose no depth"):
        SharedHead(target(layers=LAYERS), 2).depth_distribution(h)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_threshold": 1.5}, "exit_threshold"),
        ({"exit_layers": [3]}, r"no exit after 3 layers: the exits are after \[1, 2, 4\]"),
        ({"exit_adaptive": True}, r"threshold of one exit, and there are 3, after \[1, 2, 4\] layers; name one with"),
        ({"exit_adaptive": True, "missing_keys": "copy"}, "needs missing_keys recompute and exit_decay 0"),
        ({"rollback_threshold": -1}, "rollback_threshold"),
        ({"rollback_threshold": 1.0, "missing_keys": "copy"}, "it needs missing_keys recompute"),
        ({"exit_adaptive": True, "exit_confidence": "state"}, "a probability as confidence, not exit_confidence state"),
        ({"exit_posterior": 0.7}, "exit_posterior would not be read without exit_adaptive"),
        ({"exit_adaptive": True, "calibration": "c.json"}, "so exit_adaptive would not be read"),
    ],
    ids=str,
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path / "exits", network(), network().config)
    context = BuildContext(VOCAB, target(layers=LAYERS), speculators=(tmp_path / "exits",))
    with pytest.raises(ValueError, match=message):
        build("early_exit_lossy", context, options)


def test_copied_keys_are_not_reused_by_other_requests() -> None:
    """An answer with copied keys, and then a request of plain decoding that begins with it."""
    copies = Method(drafter(0.02, 0.02, 0.02, only_confident=True, missing_keys="copy"), Chain(4), AcceptExits(False))
    engine = Engine(DecoderRunner(target(layers=LAYERS)), copies, rows=2, prefix_caching=True)
    first = engine.complete([Request(PROMPTS[1], max_new_tokens=24)])[0]
    longer = [*PROMPTS[1], *(int(t) for t in first.tokens)]
    lossless = Method(NoDrafter(), RootOnly(), Match())
    request = Request(longer, max_new_tokens=8, method=lossless)
    again = engine.complete([request])[0]
    assert list(again.tokens) == naive(target(layers=LAYERS), request)
    assert again.statistics.cached_tokens <= len(PROMPTS[1])


@pytest.mark.exhaustive
def test_exits_draft_beside_retrieval(tmp_path: Path) -> None:
    save(tmp_path / "exits", network(), network().config)
    context = BuildContext(VOCAB, target(layers=LAYERS), speculators=(tmp_path / "exits",))
    method = build("hybrid_model", context, {"num_speculative_tokens": 3, "exit_layer": 4})
    assert method.drafter_label == "retrieval, and beside it exits of the target"
    requests = [replace(r, max_new_tokens=40) for r in REQUESTS]
    assert answers(method, requests) == [naive(target(layers=LAYERS), r) for r in requests]
    assert method.draft.predictor.exit_counts.sum() > 0, "the exit has drafted"
    with pytest.raises(ValueError, match="eagle_topk"):
        build("hybrid_model", context, {"eagle_topk": 3})
