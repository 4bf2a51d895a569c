"""Profiles from a benchmark: acceptance by depth, shapes, and what a results file must have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretell.bench.competitor import PLAIN
from foretell.bench.results import build_results
from foretell.bench.schema import Answer, BenchSettings, QuestionResult
from foretell.cli.roofline import app
from foretell.cli.roofline_measured import read_measured
from foretell.roofline.acceptance import best_trees
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.hardware import known_hardware
from foretell.roofline.measured import MeasuredMethod, compare_measured
from foretell.roofline.model_configs import find_model
from foretell.roofline.plan import rank_methods
from foretell.roofline.workload import Workload

A100 = known_hardware()["a100-80g"]
LLAMA = AnalyzedModel(*find_model("llama-3-8b"))


def measured(
    name: str, tokens: float, drafted: float, *cumulative: float, speedup: float | None = 1.5
) -> MeasuredMethod:
    return MeasuredMethod(name, "16", tokens, drafted, cumulative, speedup, "here")


def test_a_chain_keeps_the_acceptance_of_every_depth() -> None:
    chain = measured("draft_model", 2.4, 4.0, 0.7, 0.4, 0.2, 0.1)
    acceptance = chain.profile().acceptance
    assert [acceptance.at(d, 0) for d in (1, 2, 3, 4, 9)] == pytest.approx([0.7, 4 / 7, 0.5, 0.5, 0.5])
    assert best_trees(acceptance, 5, 4).tokens == pytest.approx((1.0, 1.7, 2.1, 2.3, 2.4))
    assert chain.profile().largest == (5, 4)


def test_a_tree_yields_what_was_measured() -> None:
    tree = measured("eagle2", 3.9, 59.2, 0.9, 0.8, 0.6, 0.4, 0.2)
    shape, acceptance = tree.shape, tree.profile().acceptance
    assert shape is not None and (shape.nodes, shape.depth) == (61, 5)
    assert best_trees(acceptance, 61, 5).tokens[-1] == pytest.approx(3.9)


def test_few_drafts_make_a_small_shape_and_none_makes_none() -> None:
    seldom, never = measured("ngram", 1.3, 0.8, 0.2, 0.1, 0.05), measured("ngram", 1.0, 0.0)
    assert seldom.shape is not None and (seldom.shape.nodes, seldom.shape.depth) == (2, 1)
    assert never.shape is None
    with pytest.raises(ValueError, match="ngram drafted nothing"):
        never.profile()
    fixed = measured("lookahead", 1.8, 56.0, 0.5, 0.2, 0.1).profile()
    assert (fixed.tokens, fixed.nodes) == (1.8, 57)
    assert not measured("ngram", 1.0, 3.0, 0.0, 0.0).profile().acceptance.ranks[0]


def test_predictions_stand_beside_what_was_measured() -> None:
    good, plainless, unknown = (
        measured("ngram", 2.0, 4.0, 0.6, 0.4),
        measured("suffix", 2.0, 4.0, 0.6, speedup=None),
        (measured("universal_draft", 2.0, 4.0, 0.6, 0.4)),
    )
    workloads = [Workload()] * 3
    gpt2 = AnalyzedModel(*find_model("phi-4"))
    rows, left_out = compare_measured([good, plainless, unknown], gpt2, A100, workloads)
    assert [row.method.name for row in rows] == ["ngram"] and rows[0].error == rows[0].predicted / 1.5 - 1
    assert "no plain decoding" in left_out["suffix"] and "shares the vocabulary" in left_out["universal_draft"]


def test_a_plan_with_measured_acceptance() -> None:
    profile = measured("eagle3", 2.2, 12.0, 0.7, 0.4, 0.1).profile()
    (estimate,) = rank_methods(LLAMA, A100, Workload(), {"eagle3": profile}).estimates
    assert estimate.nodes <= 13 and estimate.depth <= 3 and estimate.profile.basis == "measured"
    assert estimate.tokens_per_pass <= 2.2 + 1e-9


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of plain decoding, ngram and EAGLE-3 on one question."""

    def one(name: str, seconds: float, passes: int, drafted: int, *accepted: int) -> QuestionResult:
        answer = Answer(
            prompt_tokens=9, tokens=tuple(range(41)), arrival_seconds=(0.1, 0.1 + seconds), arrival_counts=(1, 40),
            retokenized_tokens=41, passes=passes, drafted=drafted, accepted_per_position=accepted,
            tested_per_position=(passes, *accepted[:-1]),
        )  # fmt: skip
        return QuestionResult(
            question="q", category="c", group="g", competitor=f"{name}/bfloat16", repeat=0, answers=(answer,)
        )

    rows = [one(PLAIN, 4.0, 41, 0), one("ngram@4", 2.0, 21, 60, 12, 8), one("eagle3", 1.5, 14, 84, 13, 9, 5)]
    settings = BenchSettings(
        model="smollm2-135m", tasks="builtin", digest="", max_new_tokens=41, temperature=0, seed=0, threads=1,
        dtypes=("bfloat16",),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("results") / "results.json"
    path.write_text(build_results(rows, settings, {r.competitor: True for r in rows}).model_dump_json(), "utf-8")
    return path


def test_speedups_are_predicted_from_the_passes_of_other_questions(results: Path, tmp_path: Path) -> None:
    """Half as many accepted drafts on the other questions: the prediction follows them, the measured figure stays."""

    def moved(change: Callable[[dict[str, Any]], None], name: str) -> Path:
        raw = json.loads(results.read_text("utf-8"))
        change(raw)
        path = tmp_path / name
        path.write_text(json.dumps(raw), "utf-8")
        return path

    def other_questions(raw: dict[str, Any]) -> None:
        raw["competitors"] = [c for c in raw["competitors"] if not c["name"].startswith("eagle3")]
        for competitor in raw["competitors"]:
            for question in competitor["per_question"]:
                question["question"] = "another"
            pooled = competitor["pooled"]
            pooled["tokens_per_pass"] = 1 + (pooled["tokens_per_pass"] - 1) / 2
            pooled["speedup"] = 99.0

    others = moved(other_questions, "others.json")
    alone = json.loads(run("compare", results, "-H", "a6000", "--json")[1])
    (held_out,) = json.loads(run("compare", results, "--passes-of", others, "-H", "a6000", "--json")[1])
    seen = next(row for row in alone if row["method"] == "ngram")
    assert held_out["measured"] == seen["measured"] == 2.0
    assert held_out["tokens_per_pass"] == pytest.approx((seen["tokens_per_pass"] + 1) / 2, abs=1e-3)
    ratio = held_out["tokens_per_pass"] / seen["tokens_per_pass"]
    assert held_out["predicted"] == pytest.approx(seen["predicted"] * ratio, rel=1e-2)
    code, text = run("compare", results, "--passes-of", results, "-H", "a6000")
    assert code == 1 and "share 1 questions; choose others" in " ".join(text.split())

    def other_model(raw: dict[str, Any]) -> None:
        other_questions(raw)
        raw["settings"]["model"] = "llama-3-8b"

    code, text = run("compare", results, "--passes-of", moved(other_model, "model.json"), "-H", "a6000")
    assert code == 1 and "no method of the same model in common" in " ".join(text.split())


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


def test_the_commands_read_results(results: Path) -> None:
    run_settings, methods = read_measured(results)
    assert [(m.name, m.weights) for m in methods] == [("ngram", "16"), ("eagle3", "16")]
    assert [m.speedup for m in methods] == pytest.approx([2.0, 4.0 / 1.5])
    assert run_settings.settings.model == "smollm2-135m" and methods[1].cumulative == (13 / 14, 9 / 14, 5 / 14)
    code, text = run("plan", "llama-3-8b", "--measured", results, "--json")
    found = {row["method"]: row for row in json.loads(text)["methods"]}
    assert code == 0 and set(found) == {"ngram", "eagle3", "autoregressive"} and found["ngram"]["basis"] == "measured"
    code, text = run("compare", results, "-H", "a6000", "--draft-vocab", 12288, "--json")
    rows = json.loads(text)
    assert code == 0 and [row["measured"] for row in rows] == [2.0, 2.667]
    assert "median error" in run("compare", results, "-H", "a6000")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "llama-3-8b", "--measured", "RESULTS", "--accept", "0.5"), "leave out the others"),
        (("plan", "llama-3-8b", "--measured", "RESULTS", "--method", "spectr"), "spectr was not measured; the run has"),
        pytest.param(
            ("plan", "llama-3-8b", "--measured", "nowhere"), "nowhere: no results here", marks=pytest.mark.exhaustive
        ),
        pytest.param(("plan", "llama-3-8b", "--draft-vocab", "-1"), "found -1", marks=pytest.mark.exhaustive),
        (("compare", "RESULTS"), "not calibrated"),
        (("compare", "RESULTS", "-H", "a600"), "did you mean a6000"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...], message: str, results: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    code, text = run(*(results if a == "RESULTS" else a for a in arguments))
    assert code == 1 and message in " ".join(text.split()), text
