"""A drafter that does not fit its target is told by its first passes and switched off; the answer stays the same."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command import expect_error, run_foretell, save_tiny_model, tiny_target
from foretell.engine.drafter_check import FIRST_PASSES, PASSES, DrafterCheck


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
