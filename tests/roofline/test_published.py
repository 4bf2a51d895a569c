"""Predictions beside published measurements, and what a runtime adds to a data sheet."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from foretell.cli.roofline import app
from foretell.roofline.analysis import AnalyzedModel, analyse, predict_seconds
from foretell.roofline.cost import scalar
from foretell.roofline.fit_runtime import FITTED, fit_runtime, rows_to_fit
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import known_hardware
from foretell.roofline.method_profiles import cost_of_profile, find_method
from foretell.roofline.model_configs import find_model
from foretell.roofline.plan import rank_methods
from foretell.roofline.published import ComparedRow, compare_published, group_errors, predict_row
from foretell.roofline.published_rows import published_groups, published_rows
from foretell.roofline.runtime import DATASHEET, Runtime, find_runtime, known_runtimes, runtime_figures
from foretell.roofline.speculation import DraftShape, estimate_method
from foretell.roofline.workload import Workload

LARGEST_MEDIAN = {
    "eager": 0.08,
    "eager_third_party": 0.10,
    "compiled": 0.16,
    "serving": 0.20,
    "low_bit_and_parallel": 0.15,
    "offload": 0.10,
    "first_generation": 0.05,
}
A100 = known_hardware()["a100-80g"]
LLAMA = AnalyzedModel(*find_model("llama-2-7b"))


@cache
def compared() -> list[ComparedRow]:
    return compare_published()


def test_median_errors_of_rows_that_nothing_was_fitted_to() -> None:
    found = group_errors(compared())
    assert [g.group for g in found] == list(published_groups()) == list(LARGEST_MEDIAN)
    assert [(g.group, g.median) for g in found if g.median > LARGEST_MEDIAN[g.group]] == []
    assert sum(g.checked for g in found) >= 140 and all(g.checked > g.fitted for g in found)


def test_the_stated_error_of_a_runtime_covers_four_fifths_of_its_checked_rows() -> None:
    for name, runtime in known_runtimes().items():
        errors = [abs(c.error) for c in compared() if c.row.runtime == name and not c.row.fit]
        assert not errors or float(np.quantile(errors, 0.8)) <= runtime.error, name


def test_every_row_states_its_source_and_what_its_tokens_rest_on() -> None:
    for row in published_rows():
        assert len(row.source) > 10 and row.published > 0
        assert (row.measure == "speedup") == bool(row.method)
        if row.method:
            assert 1 < row.tau <= row.depth + 1 or row.method in ("rest", "lookahead")


def test_loss_at_large_batches_is_predicted_where_it_was_measured_worst() -> None:
    worst = [c for c in compared() if c.row.method == "eagle" and c.row.hardware == "rtx-3090" and c.row.batch == 56]
    best = [c for c in compared() if c.row.method == "eagle" and c.row.hardware == "rtx-3090" and c.row.batch == 2]
    assert worst[0].predicted < 1.1 < best[0].predicted


def test_a_fit_finds_the_figures_that_made_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements are replaced by predictions of known figures; the fit starts elsewhere and finds them."""
    truth = replace(find_runtime("graphs"), bandwidth=0.7, pass_overhead=5e-4)
    rows = [replace(row, published=predict_row(row, truth)) for row in rows_to_fit("graphs")]
    monkeypatch.setattr("foretell.roofline.fit_runtime.published_rows", lambda: rows)
    found = fit_runtime(find_runtime("graphs"), ("bandwidth", "pass_overhead"))
    assert found.bandwidth == pytest.approx(0.7, rel=1e-3) and found.pass_overhead == pytest.approx(5e-4, rel=1e-2)
    with pytest.raises(ValueError, match="cannot be fitted to 6 measurements"):
        fit_runtime(find_runtime("graphs"), ("bandwidth",) * 7)


@pytest.mark.exhaustive
def test_the_figures_of_every_fitted_runtime_are_at_least_near_their_fit() -> None:
    """A small change of a fitted figure to either side does not lower the misfit by more than rounding does."""

    def misfit(runtime: Runtime) -> float:
        return sum(float(np.log(predict_row(r, runtime) / r.published)) ** 2 for r in rows_to_fit(runtime.name))

    for name, figures in FITTED.items():
        runtime = find_runtime(name)
        for figure in figures:
            value = getattr(runtime, figure)
            moved = [replace(runtime, **{figure: value * factor}) for factor in (0.8, 1.2) if value * factor <= 1]
            assert all(misfit(m) > misfit(runtime) * 0.98 for m in moved), (name, figure)


def test_a_runtime_only_adds_time() -> None:
    for workload in (Workload(), Workload("prefill", 4, 512), Workload("decode", 8, weights=parse_format("4g128"))):
        bound = predict_seconds(LLAMA, A100, workload)
        for name, runtime in known_runtimes().items():
            took = predict_seconds(LLAMA, A100.run_by(runtime), workload)
            assert took == bound if name == "datasheet" else took > bound, name


def test_each_figure_of_a_runtime_changes_what_it_should() -> None:
    few_bits = Workload(weights=parse_format("4g128"))

    def seconds(workload: Workload, **figures: float) -> float:
        return predict_seconds(LLAMA, replace(A100, runtime=Runtime("x", **figures)), workload)  # type: ignore[arg-type]

    plain = seconds(Workload())
    ops = sum(g.count * sum(not o.is_collective for o in g.ops) for g in LLAMA.graph("flash", False).groups)
    assert seconds(Workload(), bandwidth=0.5) == pytest.approx(2 * plain, rel=1e-3)
    assert seconds(Workload(), pass_overhead=1.0) == pytest.approx(plain + 1)
    assert seconds(Workload(), op_overhead=1e-3) == pytest.approx(plain + 1e-3 * (ops - 1))
    assert seconds(Workload(), launch=1.0) == pytest.approx(ops)
    assert seconds(Workload(), convert=10.0) == plain and seconds(few_bits, convert=10.0) > seconds(few_bits)
    analysis = analyse(LLAMA, replace(A100, runtime=Runtime("x", overlap=0.0)), Workload("verify", 8, tokens=8))
    total = analysis.total
    assert analysis.seconds == pytest.approx(scalar(total.compute_seconds) + scalar(total.memory_seconds))
    two = Workload(devices=2)
    assert seconds(two, collective_latency=1.0) == pytest.approx(seconds(two) + 2 * LLAMA.config.layers + 1)


def test_measured_devices_and_processors_keep_their_own_figures() -> None:
    graphs = find_runtime("graphs")
    assert known_hardware()["epyc-9654"].run_by(graphs).runtime is DATASHEET
    measured = replace(A100, matmul_rates={"fp16": ((1.0, 1e12),)})
    assert measured.run_by(graphs) is measured and A100.run_by(graphs).runtime is graphs


def test_a_given_tree_is_priced_as_it_is() -> None:
    device, eagle, medusa = A100.run_by(find_runtime("eager")), find_method("eagle2"), find_method("medusa")
    drafter = cost_of_profile(eagle, LLAMA)
    given = estimate_method(eagle, drafter, LLAMA, device, Workload(), shape=DraftShape(61, 6, 4.5))
    assert (given.nodes, given.depth, given.tokens_per_pass) == (61, 6, 4.5)
    low, high = given.range
    assert low < given.speedup < high and high / given.speedup - 1 == pytest.approx(device.runtime.error)
    with pytest.raises(ValueError, match="has 5 heads and cannot draft a tree of depth 6"):
        estimate_method(medusa, cost_of_profile(medusa, LLAMA), LLAMA, device, Workload(), shape=DraftShape(61, 6))
    deepest = estimate_method(medusa, None, LLAMA, A100, Workload()).depth
    assert deepest <= 5


def test_drafters_with_their_own_vocabulary_and_padded_vocabularies() -> None:
    big = AnalyzedModel(*find_model("llama-3.1-8b"))
    small, full = cost_of_profile(find_method("eagle3"), big), cost_of_profile(find_method("eagle2"), big)
    assert small and full and small.added_parameters == full.added_parameters + 32000 * 4096
    head = {op.name: op for group in small.graph.groups for op in group.ops}["lm_head"]
    assert head.weights.constant == 32000 * 4096
    qwen = rank_methods(AnalyzedModel(*find_model("qwen2.5-7b")), A100, Workload())
    assert "draft_model" not in qwen.unavailable


def test_the_acceptance_of_a_known_draft_model_replaces_the_general_one() -> None:
    plan = rank_methods(LLAMA, A100, Workload())
    chain = next(e for e in plan.estimates if e.profile.name == "draft_model")
    assert chain.profile.acceptance.ranks[0] == 0.57 and "Spec-Bench" in chain.profile.acceptance.source


def test_advice_says_yes_no_or_measure() -> None:
    device = known_hardware()["h100-sxm"].run_by(find_runtime("graphs"))
    model = AnalyzedModel(*find_model("llama-3.1-8b"))
    few, many = (rank_methods(model, device, Workload(batch=b)) for b in (1, 256))
    only = {"eagle": find_method("eagle")}
    between = rank_methods(model, device, Workload(batch=64), only)
    assert few.advice.startswith("Use ") and few.estimates[0].range[0] > 1
    assert between.advice.startswith("Measure first: eagle is predicted at 1.")
    assert rank_methods(model, device, Workload(batch=256, context=200), only).advice.startswith("Do not speculate")
    assert many.estimates[0].speedup < few.estimates[0].speedup


@pytest.mark.exhaustive
def test_the_commands() -> None:
    runner = CliRunner()
    rows = json.loads(runner.invoke(app, ["published", "--json"]).stdout)
    assert len(rows) == len(published_rows()) and {r["used"] for r in rows} == {"fitted", "checked"}
    pinned = runner.invoke(
        app,
        [
            *("plan", "vicuna-7b", "-H", "a100-80g", "--method", "eagle2", "--tree", "60x6", "--tau", "4.68"),
            *("--runtime", "eager", "--json"),
        ],
    )
    (method, plain) = json.loads(pinned.stdout)["methods"]
    assert method["nodes"] == 61 and method["low"] < method["speedup"] < method["high"] and plain["speedup"] == 1
    assert runtime_figures(find_runtime("eager"))["launch"] == pytest.approx(41.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "llama-3-8b", "--runtime", "eagre"], "there is no runtime called 'eagre'; did you mean eager"),
        (["plan", "llama-3-8b", "--tau", "3"], "give it with --tokens or --tree"),
        (["plan", "llama-3-8b", "--tokens", "3", "--tree", "60x6"], "leave out one of them"),
        pytest.param(["plan", "llama-3-8b", "--tokens", "0"], "at least 1", marks=pytest.mark.exhaustive),
        pytest.param(["plan", "llama-3-8b", "--tree", "60"], "looks like 60x6", marks=pytest.mark.exhaustive),
        pytest.param(
            ["plan", "llama-3-8b", "--tree", "3x6"],
            "of depth 6 drafts at least 6 nodes, found 3 drafted",
            marks=pytest.mark.exhaustive,
        ),
        (["plan", "llama-3-8b", "--tokens", "3", "--tau", "7"], "yields 1 to 4 tokens per pass, found 7"),
        (["analyze", "llama-3-8b", "--sweep", "batch=1:256:0"], "its step must be above 0"),
        (["published", "--fit", "datasheet"], "unknown --fit 'datasheet'"),
        (["published", "--fit", "nope"], "Known: acceptance, compiled, eager, eager-hub, expanding, graphs"),
        pytest.param(["published", "--out", "/nowhere/x.png"], "there is no directory", marks=pytest.mark.exhaustive),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("figure", ["bandwidth", "peak", "host", "overlap", "launch"])
def test_a_runtime_refuses_impossible_figures(figure: str) -> None:
    with pytest.raises(ValueError, match=figure):
        Runtime("mine", **{figure: -1.0})  # type: ignore[arg-type]


def test_a_head_of_16_bits_costs_what_its_elements_add() -> None:
    model, form = AnalyzedModel(*find_model("llama-3-8b")), parse_format("4g128")
    all_four, kept = (analyse(model, A100, Workload(weights=form, head=head)) for head in (None, parse_format("16")))
    table = 128256 * 4096
    assert scalar(kept.memory.weights) - scalar(all_four.memory.weights) == pytest.approx(2 * table * (2 - form.bytes))
    plain = analyse(model, A100, Workload()).seconds
    assert plain / all_four.seconds > plain / kept.seconds > 3


def test_models_with_uncounted_layers_are_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "lfm2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["analyze", str(tmp_path)])
    assert result.exit_code == 1 and "recurrent layers other than gated delta nets, which the roofline" in result.stderr


@pytest.mark.parametrize(
    ("hub_id", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-3-70b"),
        ("lmsys/vicuna-7b-v1.5", "vicuna-7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
    ],
)
def test_editions_of_a_model_have_its_architecture(hub_id: str, name: str) -> None:
    assert find_model(hub_id)[0] == name
