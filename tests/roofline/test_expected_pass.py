"""Methods begin with the times that the roofline model predicts for a calibrated machine."""

from pathlib import Path

import pytest

from foretell.api import Model
from foretell.bench.machine import processor_name
from foretell.cli.pass_times import expected_pass, kept_pass_times
from foretell.engine.pass_times import PassTimes, load_key
from foretell.engine.tuning import PRIOR_PASSES
from foretell.load import load
from foretell.roofline.analysis import AnalyzedModel, predict_seconds
from foretell.roofline.calibrate import PROBES, add_to_file, calibrated_hardware, fit_costs, pass_workload, time_probes
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import Hardware, user_hardware_file


@pytest.fixture(scope="module")
def model() -> Model:
    return load("smollm2-135m", dtype="bfloat16")


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hardware:
    """This machine with invented rates, in a hardware file of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    timers = [(config, lambda n, s: 1e-3 + 2e-4 * n + 1e-7 * s) for config in PROBES]
    fits = {"16": fit_costs(time_probes(timers))}
    found = calibrated_hardware("this-machine", processor_name(), "test", 70e9, 24e9, fits)
    add_to_file(user_hardware_file(), found, {})
    return found


def test_without_a_calibration_nothing_is_expected(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert expected_pass(model) is None
    user_hardware_file().parent.mkdir()
    user_hardware_file().write_text("no toml [", "utf-8")
    assert expected_pass(model) is None


def test_the_prediction_of_a_calibrated_machine_is_expected(model: Model, calibrated: Hardware) -> None:
    found = expected_pass(model)
    assert found is not None and sorted(found) == [1, 2, 4, 8, 16, 32, 64, 128]
    workload = pass_workload(parse_format("16"), 8, 256)
    assert found[8] == pytest.approx(predict_seconds(AnalyzedModel("m", model.config), calibrated, workload))
    assert list(found.values()) == sorted(found.values())


def test_a_calibration_of_another_machine_is_not_used(model: Model, calibrated: Hardware) -> None:
    text = user_hardware_file().read_text("utf-8")
    user_hardware_file().write_text(text.replace(processor_name(), "another, 9 threads"), "utf-8")
    assert expected_pass(model) is None


def test_an_engine_begins_with_what_is_expected(model: Model) -> None:
    texts, before = list[list[str]](), model.pass_times
    try:
        for dear in (1.0, 64.0):
            model.pass_times = PassTimes(expected={1: 1.0, 64: dear})
            assert model.engine("hybrid").budget.times.seconds(load_key(1, 0), 1)[63] == pytest.approx(dear)
            texts.append([a.text for a in model.generate("Say hello.", max_new_tokens=8, method="hybrid")])
    finally:
        model.pass_times = before
    assert texts[0] == texts[1]


def test_without_a_calibration_the_passes_of_the_kernels_are_expected(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where eight tokens take 2.5 times as long as one, few drafts pay from the first step on."""
    for folder in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(folder, str(tmp_path))
    monkeypatch.setattr(Model, "usual_passes", PRIOR_PASSES["avx2"])
    assert expected_pass(model) is None
    times = kept_pass_times(model, "cpu")
    assert times.seconds(load_key(1, 0), 1)[:8:7] == pytest.approx([1.0, 2.5])
    for tokens in (1, 8) * 20:
        times.observe_pass(load_key(1, 0), 1, tokens, 0.01 if tokens == 1 else 0.04)
    times.save()
    learned = kept_pass_times(model, "cpu").seconds(load_key(1, 0), 1)
    assert learned[7] / learned[0] == pytest.approx(4, rel=0.1)
    monkeypatch.setattr(Model, "usual_passes", None)
    assert kept_pass_times(model, "cpu").seconds(load_key(1, 0), 1) == PassTimes().seconds(load_key(1, 0), 1)
