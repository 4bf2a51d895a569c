"""`foretell verify`: what it prints, and when it fails."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from command import expect_error, run_foretell, tiny_draft, tiny_target
from foretell.accept import Match
from foretell.accept.base import AcceptResult
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions
from helpers import unchecked

QUICK = ("--model", tiny_target(), "--dtype", "float32", "--max-new-tokens", "6", "--samples", "60")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with unchecked():
        yield


def test_reports_as_text_and_json() -> None:
    result = run_foretell("verify", "suffix", *QUICK)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("pass ") == 3 and "1 method changes nothing here" in result.stdout
    assert "degrees of freedom" in result.stdout and "is detected with a power of" in result.stdout
    (report,) = json.loads(run_foretell("verify", "pld", *QUICK, "--json").stdout)
    assert report["method"] == "ngram" and report["passed"] and report["distribution"]["samples"] == 60


def test_lossy_methods_fail_only_with_strict() -> None:
    lossy = (
        "verify",
        "typical_lossy",
        *QUICK,
        "--draft-model",
        tiny_draft(),
        "--samples",
        "150",
        "--speculative-config",
        '{"posterior_threshold": 1e-9}',
    )
    result = run_foretell(*lossy)
    assert result.exit_code == 0 and "  lossy " in result.stdout and "is LOSSY" in result.stdout
    strict = run_foretell(*lossy, "--strict")
    assert strict.exit_code == 1 and strict.stderr.startswith("foretell: typical_lossy changed")


def test_a_broken_lossless_method_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Match.accept

    def broken(self: Match, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        found, drafts = accept(self, tree, row, distributions), tree.valid[row].sum() > tree.prefix_length[row]
        return replace(found, token=(found.token + 1) % 256) if drafts else found

    monkeypatch.setattr(Match, "accept", broken)
    assert "suffix changed the target's output" in run_foretell("verify", "suffix", *QUICK).stderr


def test_a_missing_draft_model_is_named() -> None:
    assert "needs a draft model" in expect_error("verify", "draft_model", *QUICK)


@pytest.mark.exhaustive
def test_the_draft_model_goes_to_the_methods_that_use_it() -> None:
    draft = ("--draft-model", tiny_draft())
    assert "suffix does not draft with it; leave it out" in expect_error("verify", "suffix", *QUICK, *draft)
    result = run_foretell("verify", "suffix", "draft_model", *QUICK, *draft)
    assert result.exit_code == 0, result.output
    assert "used by draft_model; not used by suffix" in " ".join(result.stderr.split())


def test_prompts_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abab"}\n{"messages": [{"role": "user", "content": "one two"}]}\n')
    (report,) = json.loads(run_foretell("verify", "suffix", *QUICK, "--prompts", file, "--json").stdout)
    assert report["greedy_equality"]["prompts"] == 2 and report["batch_invariance"]["passed"]
    file.write_text('{"prompt": "abab"}\n{"promt": "x"}\n')
    assert "line 2: " in expect_error("verify", "suffix", *QUICK, "--prompts", file)
