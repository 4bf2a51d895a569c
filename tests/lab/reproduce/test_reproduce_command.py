"""`foretell reproduce`: verdicts, reports, resumption and bad input."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from command import expect_error, run_foretell, tiny_draft, tiny_target
from foretell.catalogue import BUILT_IN, registry
from helpers import unchecked

QUICK = ("--model", tiny_target(), "--dtype", "float32", "--max-new-tokens", "8")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with unchecked():
        yield


def test_verdicts_a_report_and_the_same_runs_again(tmp_path: Path) -> None:
    methods = ("jacobi", "eagle3")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    own = (*QUICK, "--prompts", prompts, "--out", tmp_path)
    first = run_foretell("reproduce", *methods, *own, "--json")
    assert first.exit_code == 0, first.output
    jacobi, eagle3 = json.loads(first.stdout)
    assert jacobi["verdict"] in ("reproduced", "direction only", "not reproduced") and jacobi["published"] == 1.1
    measured = jacobi["finding"]
    assert measured["prompts"] == 2 and measured["value"]["low"] <= measured["value"]["value"]
    assert measured["ratio"]["value"] == pytest.approx((measured["value"]["value"] - 1) / 0.1)
    assert eagle3["verdict"] == "not checked" and "speculator" in eagle3["found"]

    index = (tmp_path / "index.html").read_text()
    assert all(f"<td>{m}</td>" in index for m in methods) and "https://arxiv.org/abs/2002.03629" in index
    assert jacobi["verdict"] in index and jacobi["paper"] in index
    runs = (tmp_path / "runs" / "records.jsonl").read_text()

    again = run_foretell("reproduce", *methods, *own)
    assert again.exit_code == 0 and "1.1 in the paper" in again.stdout
    assert (tmp_path / "runs" / "records.jsonl").read_text() == runs

    assert run_foretell("reproduce", "ngram", *own).exit_code == 0
    index = (tmp_path / "index.html").read_text()
    assert all(index.count(f"<td>{m}</td>") == 1 for m in (*methods, "ngram")), "earlier claims stay"


def test_a_claim_says_that_the_named_draft_model_was_used(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    named = (*QUICK, "--draft-model", tiny_draft(), "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "out")
    for _ in range(2):
        result = run_foretell("reproduce", "draft_model", "jacobi", *named, "--json")
        assert result.exit_code == 0, result.output
        drafted, plain = json.loads(result.stdout)
        assert f"draft_model drafts with {tiny_draft()}, as named" in drafted["prepared"] and not plain["prepared"]
    result = run_foretell("reproduce", "jacobi", *named)
    assert result.exit_code == 1 and "had no effect: no method of the claims that were checked drafts" in result.stderr


def test_a_model_of_short_context_is_given_advice_that_helps() -> None:
    result = run_foretell(
        "reproduce", "draft_model", "sparse_kv_draft", *QUICK, "--draft-model", tiny_draft(), "--json"
    )
    assert result.exit_code == 0, result.output
    mixed, own = (claim["found"] for claim in json.loads(result.stdout))
    assert mixed.endswith("and the model reads at most 511; give shorter ones with --prompts FILE.jsonl")
    assert own.endswith("the claim needs prompts of its own, so it cannot be checked on this model")


def test_bad_input_gives_one_sentence(tmp_path: Path) -> None:
    assert "--all" in expect_error("reproduce", *QUICK)
    assert "--all" in expect_error("reproduce", "ngram", "--all", *QUICK)
    assert "unknown method 'eagel3': did you mean 'eagle3'" in expect_error("reproduce", "eagel3", *QUICK)
    file = tmp_path / "file"
    file.write_text("")
    assert "choose another --out" in expect_error("reproduce", "ngram", *QUICK, "--out", file)
    (tmp_path / "runs").write_text("")
    assert "runs: a file is" in expect_error("reproduce", "ngram", *QUICK, "--out", tmp_path)
    (tmp_path / "index.html").write_text("a site")
    assert "no report" in expect_error("reproduce", "ngram", *QUICK, "--out", tmp_path)
    assert (tmp_path / "index.html").read_text() == "a site"
    run_foretell("reproduce", "jacobi", *QUICK, "--out", tmp_path / "report")
    other = (*QUICK[:-1], "9")
    assert "another new_tokens" in expect_error("reproduce", "ngram", *other, "--out", tmp_path / "report")


def test_a_method_of_another_package_has_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(BUILT_IN[0], name="mine", aliases=())
    points = [SimpleNamespace(name="mine", value="my.module:ENTRY", load=lambda: mine)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert "has no claim to check" in (error := expect_error("reproduce", "mine", *QUICK))
    assert "foretell verify mine" in error and "unknown" not in error


def test_a_full_disk_is_told_before_anything_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 5_000_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert "5 MB are free" in expect_error("reproduce", "ngram", *QUICK, "--out", tmp_path)
