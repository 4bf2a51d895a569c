"""`foretell verify`: what it prints, and when it fails."""

import json
from collections.abc import Iterator
from dataclasses import replace

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
    assert "degrees of freedom" in result.stdout and "would be seen with a chance of" in result.stdout
    (report,) = json.loads(run_foretell("verify", "pld", *QUICK, "--json").stdout)
    assert report["method"] == "ngram" and report["passed"] and report["law"]["samples"] == 60


def test_lossy_methods_show_their_price_and_fail_only_strictly() -> None:
    lossy = (
        "verify",
        "typical_lossy",
        *QUICK,
        "--draft-model",
        tiny_draft(),
        "--samples",
        "300",
        "--speculative-config",
        '{"posterior_threshold": 1e-9}',
    )
    result = run_foretell(*lossy)
    assert result.exit_code == 0 and "price" in result.stdout and "says it is LOSSY" in result.stdout
    strict = run_foretell(*lossy, "--strict")
    assert strict.exit_code == 1 and strict.stderr.startswith("foretell: typical_lossy changed")


def test_a_lossless_method_that_is_not_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Match.accept

    def spoilt(self: Match, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        found, drafts = honest(self, tree, row, distributions), tree.valid[row].sum() > tree.prefix_length[row]
        return replace(found, token=(found.token + 1) % 256) if drafts else found

    monkeypatch.setattr(Match, "accept", spoilt)
    assert "suffix changed what the model says" in run_foretell("verify", "suffix", *QUICK).stderr


def test_what_is_missing() -> None:
    assert "needs a draft model" in expect_error("verify", "draft_model", *QUICK)
