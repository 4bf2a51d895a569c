"""A drafter that does not fit its target is told by its first passes and switched off; the answer stays the same."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command import expect_error, run_foretell, save_tiny_model, tiny_target
from foretell.accept import Match
from foretell.draft import DraftModel, HybridDrafter, PromptLookup
from foretell.engine.budget import Budget
from foretell.engine.budget_statistics import BudgetStatistics
from foretell.engine.drafter_check import FIRST_PASSES, PASSES, DrafterCheck
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.pass_times import PassTimes
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, Trie
from foretell.shape.hybrid_tree import HybridTree
from helpers import naive, random_tokens, target, unchecked


def step(accepted: Sequence[int], drafted: int = 4, decodes: bool = True) -> Any:
    """A step whose requests have so many drafts and accept so many of them."""
    tree = SimpleNamespace(is_decode=decodes, drafted_counts=[drafted] * len(accepted))
    return SimpleNamespace(tree=tree, paths=[(0,) * (1 + n) for n in accepted])


def judged(accepted: Sequence[int], expected: float | None = None) -> tuple[list[str], list[float]]:
    said, kept = list[str](), list[float]()
    check = DrafterCheck("d", said.append, kept.append, expected, "its card")
    for n in accepted:
        check.observe(step([n]))
    return said, kept


@pytest.mark.parametrize(
    ("accepted", "expected", "words", "kept"),
    [
        ([0] * (FIRST_PASSES - 1), None, None, []),
        ([0] * FIRST_PASSES, None, "0 drafts were accepted in 24 passes", []),
        ([1, *[0] * (FIRST_PASSES - 1)], None, "1 drafts were accepted in 24 passes", []),
        ([1, 1, *[0] * 38], None, None, []),
        ([1, 1, *[0] * 39], None, "2 drafts were accepted in 41 passes", []),
        ([1, 0] * PASSES, None, None, [0.5]),
        ([1, 0] * PASSES, 2.4, None, [0.5]),
        ([1, 0] * PASSES, 2.6, "0.50 drafts are accepted per pass, and 2.60 by its card", []),
    ],
)
def test_a_drafter_is_judged_once(
    accepted: Sequence[int], expected: float | None, words: str | None, kept: list[float]
) -> None:
    said, records = judged(accepted, expected)
    assert records == kept and len(said) == (words is not None)
    assert words is None or (words in said[0] and said[0].endswith("answers stay those of the target"))


def test_passes_without_drafts_and_prompts_do_not_count() -> None:
    said = list[str]()
    check = DrafterCheck("d", said.append)
    for _ in range(9):
        check.observe(step([0] * 9, drafted=0))
        check.observe(step([0] * 9, decodes=False))
    assert not said and check.fits


def test_a_misfit_is_not_stopped_where_the_text_of_a_seed_depends_on_it() -> None:
    check = DrafterCheck("d", lambda text: None)
    check.observe(step([0] * FIRST_PASSES))
    greedy, sampled = (SimpleNamespace(sampling_params=[SimpleNamespace(temperature=t)]) for t in (0.0, 0.7))
    stops = [check.stops(context, same) for context in (greedy, sampled) for same in (True, False)]  # type: ignore[arg-type]
    assert stops == [True, True, True, False]


def test_a_drafter_of_another_model_is_told_and_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stranger = save_tiny_model(tmp_path / "stranger", seed=5, layers=1)
    options = "--model", tiny_target(), "--max-new-tokens", "120"
    plain = run_foretell("generate", "hello", *options, "--method", "autoregressive")
    drafted = run_foretell("generate", "hello", *options, "--method", "draft_model", "--draft-model", stranger)
    assert drafted.stdout == plain.stdout and drafted.exit_code == 0
    assert f"foretell: {stranger}: 0 drafts were accepted in {FIRST_PASSES} passes" in drafted.stderr
    assert "Traceback" not in drafted.stderr and not (tmp_path / "foretell/acceptance.json").exists()


def test_the_acceptance_of_the_last_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    same = save_tiny_model(tmp_path / "same")
    command = ("generate", "hello", "--model", tiny_target(), "--max-new-tokens", "400", "--method", "draft_model")
    options = ("--draft-model", same, "--speculative-config", '{"num_speculative_tokens": 3}')
    first = run_foretell(*command, *options)
    records = tmp_path / "foretell" / "acceptance.json"
    (drafts,) = json.loads(records.read_text()).values()
    assert 0.9 < drafts <= 3 and "drafts are accepted per pass" not in first.stderr
    records.write_text(json.dumps(dict.fromkeys(json.loads(records.read_text()), 20.0)))
    assert "and 20.00 by earlier texts" in run_foretell(*command, *options).stderr
    records.write_text("[damaged")
    assert "drafts are accepted per pass" not in run_foretell(*command, *options).stderr


def test_the_card_of_a_trained_speculator_counts_first(tmp_path: Path) -> None:
    from foretell.cli.drafter_check import _of_card

    (tmp_path / "README.md").write_text("| Tokens per pass | **2.750** on 40 held-out prompts |\n")
    assert _of_card(tmp_path) == 1.75 and _of_card(tmp_path / "none") is None
    assert "needs a draft model" in expect_error("generate", "x", "--model", tiny_target(), "--method", "draft_model")


VOCABULARY = 400
"""So large that guesses are right in fewer than one of twenty cases."""


class Timed(DecoderRunner):
    """Advances the clock by `seconds` for a pass over a token, and by a twentieth of it for each further one."""

    def __init__(self, network: Decoder, clock: list[float], seconds: float) -> None:
        super().__init__(network)
        self._clock, self._seconds = clock, seconds

    def forward(self, rows, tree, **more):  # type: ignore[no-untyped-def]
        output = super().forward(rows, tree, **more)
        self._clock[0] += self._seconds * (1 + 0.05 * (output.logits.shape[0] - 1))
        return output


def misfit() -> Decoder:
    """The target's first layer with the outputs of other tokens."""
    network = copy.deepcopy(target(VOCABULARY).first_layers(1))
    network.head.weight.data = network.head.weight.data.roll(7, 0)
    return network


def decoded(
    drafter: Decoder, seconds: float, check: DrafterCheck | None, tokens: int
) -> tuple[float, BudgetStatistics]:
    """The simulated seconds of two answers with a draft model of so many seconds a token, and what was drafted."""
    clock, budget = [0.0], Budget()
    method = Method(DraftModel(Timed(drafter, clock, seconds)), Chain(4), Match(), check=check)
    requests = [Request(random_tokens(5, VOCABULARY, seed), max_new_tokens=tokens) for seed in range(2)]
    runner = Timed(target(VOCABULARY), clock, 1.0)
    engine = Engine(runner, method, rows=1, clock=lambda: clock[0], budget=budget)
    with unchecked():
        answers = engine.complete(requests)
    assert [list(a.tokens) for a in answers] == [naive(target(VOCABULARY), request) for request in requests]
    return clock[0], budget.statistics


@pytest.mark.parametrize("seconds", [*(pytest.param(s, marks=pytest.mark.exhaustive) for s in (0.05, 0.5)), 0.2])
def test_a_misfit_is_told_within_two_answers_though_drafts_do_not_pay(seconds: float) -> None:
    said = list[str]()
    check = DrafterCheck("d", said.append)
    taken, statistics = decoded(misfit(), seconds, check, 100)
    assert len(said) == 1 and not check.fits and statistics.undrafted["cost"] > 100
    unchecked_seconds, _ = decoded(misfit(), seconds, None, 100)
    assert taken < 1.03 * unchecked_seconds + 2 * seconds, "each of two may lose 3 %, and a draft that is under way"


@pytest.mark.parametrize(("right", "fits"), [(10, False), (7, True)], ids=["1 of 10", "1 of 7"])
def test_passes_over_single_drafts_are_compared_with_what_is_expected_of_them(right: int, fits: bool) -> None:
    """Of 1.6 drafts per pass, each is right with 0.62; a fifth of that is the least."""
    check = DrafterCheck("d", list[str]().append, expected=1.6)
    for i in range(PASSES - 1):
        check.count(i % right == 0, single=True)
    assert check.fits and check.undecided is not fits
    check.count(0, single=True)
    assert check.fits is fits


@pytest.mark.parametrize(
    "seconds", [pytest.param(0.05, marks=pytest.mark.exhaustive), 2.0], ids=["pays", "does not pay"]
)
def test_a_fitting_drafter_stays_and_its_check_costs_nothing(seconds: float) -> None:
    said = list[str]()
    fitting, check = target(VOCABULARY).first_layers(1), DrafterCheck("d", said.append)
    assert decoded(fitting, seconds, check, 100) == decoded(fitting, seconds, None, 100)
    assert check.fits and not said and not check.undecided


def test_a_retriever_goes_on_beside_a_misfit() -> None:
    said = list[str]()
    check = DrafterCheck("d", said.append)
    hybrid = HybridDrafter(PromptLookup(2, 1, 4), DraftModel(DecoderRunner(misfit())))
    method = Method(hybrid, HybridTree(Trie(8), Chain(3, draw=False)), Match(), check=check)
    budget = Budget(PassTimes({1: 1.0, 128: 1.1}))
    request = Request(random_tokens(5, VOCABULARY, 1), max_new_tokens=240)
    with unchecked():
        (answer,) = Engine(DecoderRunner(target(VOCABULARY)), method, rows=1, budget=budget).complete([request])
    assert answer.statistics.target_passes < 180, "of 240 tokens"
    assert len(said) == 1 and list(answer.tokens) == naive(target(VOCABULARY), request)
