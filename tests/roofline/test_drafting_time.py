"""Calibrated times of steps outside the target's pass, and speed-ups predicted from them."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.roofline.analysis import AnalyzedModel, predict_seconds
from foretell.roofline.calibrate import add_to_file
from foretell.roofline.drafting_time import DraftingSample, DraftingTime, at_predicted_pace, fit_drafting_time
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import Hardware, known_hardware, read_hardware_file
from foretell.roofline.measured import PLAIN, MeasuredMethod, MeasuredPasses, compare_measured, measured_workload
from foretell.roofline.model_configs import find_model
from foretell.roofline.runtime import Runtime
from foretell.roofline.workload import Workload

CPU = Hardware("here", "a machine", 40e9, {"fp16": 1e12}, "test", runtime=Runtime("measured", pass_overhead=1e-4))
SMALL = AnalyzedModel(*find_model("smollm2-135m"))


def test_a_fit_finds_the_times_that_made_its_steps() -> None:
    true, draw = DraftingTime(3e-4, 5e-5, 2e-3, 1e-4), random.Random(1)
    samples = list[DraftingSample]()
    for requests in (1, 2, 6, 14):
        for _ in range(24):
            drafted = draw.randint(0, 4)
            seconds = true.seconds(requests, drafted) * (20 if draw.random() < 0.01 else 1)
            samples.append(DraftingSample(requests, drafted * requests, seconds))
    found = fit_drafting_time(samples)
    for asked in ((1, 0.0), (4, 2.5), (16, 1.0)):
        assert found.seconds(*asked) == pytest.approx(true.seconds(*asked), rel=0.1)
    with pytest.raises(ValueError, match="at least 12 steps, found 3"):
        fit_drafting_time(samples[:3])


def test_what_happens_in_some_steps_is_part_of_all() -> None:
    samples = [DraftingSample(1, 1, 1e-2 if i % 6 == 5 else 1e-3) for i in range(60)]
    assert fit_drafting_time(samples).seconds(1, 1) == pytest.approx(2.5e-3, rel=1e-3)


def test_steps_are_scaled_to_the_pace_at_which_passes_are_predicted() -> None:
    """The machine was half as fast while drafting was calibrated; one step in ten was interrupted besides."""
    true = DraftingTime(1e-3, 0.0, 0.0, 0.0)
    samples = [DraftingSample(2, 4, 2 * true.seconds(2, 2), 6, 80, 4e-3 * (9 if i % 10 == 3 else 1)) for i in range(40)]
    scaled = at_predicted_pace(samples, lambda s: 2e-3 * s.read / 6)
    assert scaled[0] == DraftingSample(2, 4, 1e-3, 6, 80, 2e-3)
    assert fit_drafting_time(scaled).seconds(2, 2) == pytest.approx(1e-3, rel=1e-6)


def method(name: str, requests: float, read: float, drafted: float, tokens: float) -> MeasuredMethod:
    passes = MeasuredPasses(requests, read, drafted, tokens, 100.0, requests)
    return MeasuredMethod(name, "16", tokens, drafted, (0.5,), 1.25, "here", name, "smollm2-135m bfloat16", passes)


def test_a_calibrated_method_pays_its_passes_and_its_drafting(tmp_path: Path) -> None:
    figures = {PLAIN: (2e-4, 1e-5, 0.0, 0.0), "ngram": (3e-4, 2e-5, 1e-5, 1e-6)}
    calibrated = replace(CPU, drafting={"smollm2-135m bfloat16": figures})
    add_to_file(tmp_path / "mine.toml", calibrated, {})
    read = read_hardware_file(tmp_path / "mine.toml")["here"]
    assert read.drafting["smollm2-135m bfloat16"]["ngram"] == pytest.approx(figures["ngram"])
    one, other = method("ngram", 4.0, 3.0, 2.0, 1.9), method("suffix", 4.0, 3.0, 2.0, 1.9)
    workloads = [measured_workload(m) for m in (one, other)]
    (known, unknown), left_out = compare_measured([one, other], SMALL, read, workloads)
    verify = replace(workloads[0], stage="verify", tokens=3)
    plain, drafted = (DraftingTime(*figures[n]).seconds(4, d) for n, d in ((PLAIN, 0.0), ("ngram", 2.0)))
    expected = 1.9 * (predict_seconds(SMALL, read, workloads[0]) + plain)
    assert known.predicted == pytest.approx(expected / (predict_seconds(SMALL, read, verify) + drafted), rel=1e-6)
    assert (known.calibrated, unknown.calibrated, left_out) == (True, False, {})
    assert known.error == known.predicted / 1.25 - 1
    assert (workloads[0].batch, workloads[0].context, measured_workload(one, 7).context) == (4, 100, 7)


def test_a_hardware_file_with_a_wrong_number_of_figures_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[here]\nbandwidth = 1\nfp16 = 1\ndrafting = {"m int8" = {ngram = [1, 2]}}\n')
    with pytest.raises(ValueError, match="drafting of ngram has 4 figures, found 2"):
        read_hardware_file(file)


def test_attention_reads_its_cache_at_the_calibrated_rate() -> None:
    """Sixteen sequences of one token cost more than one of sixteen: each reads keys and values of its own."""

    def seconds(batch: int, tokens: int, cache_read: float = 0.0, logit_time: float = 0.0) -> float:
        measured = replace(CPU, runtime=Runtime("measured", cache_read=cache_read, logit_time=logit_time))
        form = parse_format("16")
        asked = Workload("verify", batch, 512, tokens, weights=form, activations=form, fusion="full")
        return predict_seconds(SMALL, measured, asked)

    positions = 16 * (512 + 1) - (512 + 16)
    slow, fast = (seconds(16, 1, cache_read=t) - seconds(1, 16, cache_read=t) for t in (1e-9, 1e-10))
    assert slow - fast == pytest.approx(2 * 2 * 30 * 3 * 64 * positions * 9e-10)
    assert seconds(16, 1, logit_time=1e-9) - seconds(16, 1) == pytest.approx(16 * 49152 * 1e-9)
    assert known_hardware()["a100-80g"].runtime.cache_read == 0
