"""Bounds on what exits change: coverage of the tests, the order of thresholds, and the command."""

import math
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import Float
from training_helpers import answers, shared, target

from command import expect_error, run_foretell, tiny_target
from foretell.speculator.exit_calibration import ExitCalibration
from foretell.train.exits.calibrate import CalibrationSettings
from foretell.train.exits.risk import betting_p_value, count_accepted, smallest_bound


def bernoulli(rate: float, count: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).random(count) < rate).astype(np.float64)


def test_a_loss_at_the_bound_is_rarely_accepted() -> None:
    """The share of wrong acceptances is at most 1 - confidence, for losses of either kind."""
    wrong = np.mean([betting_p_value(bernoulli(0.1, 120, seed), 0.1) <= 0.1 for seed in range(400)])
    assert wrong <= 0.1 + 3 * (0.1 * 0.9 / 400) ** 0.5
    rng = np.random.default_rng(0)
    spread = [rng.beta(2, 38, 120) for _ in range(400)]
    assert np.mean([betting_p_value(x, 0.05) <= 0.1 for x in spread]) <= 0.1 + 3 * (0.1 * 0.9 / 400) ** 0.5


def hoeffding_p_value(losses: Float[np.ndarray, " n"], bound: float) -> float:
    """The p-value of `betting_p_value` by Hoeffding's inequality, as in CALM."""
    return math.exp(-2 * len(losses) * max(0.0, bound - float(losses.mean())) ** 2)


def test_small_losses_need_fewer_answers_than_by_hoeffding() -> None:
    losses = np.random.default_rng(1).beta(2, 98, 200)
    assert betting_p_value(losses, 0.05) < 0.02 < 0.5 < hoeffding_p_value(losses, 0.05)
    assert hoeffding_p_value(losses, 0.5) == pytest.approx(np.exp(-400 * (0.5 - losses.mean()) ** 2))


def test_testing_stops_at_the_first_failure() -> None:
    low, high = np.zeros(100), np.full(100, 0.3)
    assert count_accepted([low, low, high, low], 0.1, 0.9) == 2
    assert count_accepted([high, low], 0.1, 0.9) == 0 and count_accepted([], 0.1, 0.9) == 0


def test_the_smallest_bound_is_kept_and_no_smaller_one() -> None:
    losses = bernoulli(0.05, 300, 3)
    found = smallest_bound(losses, 0.95)
    assert found > losses.mean()
    assert betting_p_value(losses, found) <= 0.05 < betting_p_value(losses, found - 5e-3)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 2.0])
def test_shares_outside_their_range_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"--disagreement .* between 0 and 1, both excluded"):
        CalibrationSettings(value, 0.95)
    with pytest.raises(ValueError, match=r"--confidence .* between 0 and 1, both excluded"):
        CalibrationSettings(0.05, value)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fitted") / "exits"
    result = run_foretell("train", "exits", tiny_target(), "--out", out, "--data", shared(), "--draft-vocab", "64")
    assert result.exit_code == 0, (result.output, result.exception)
    return out


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers that the exits were not fitted on."""
    return answers(tmp_path_factory.mktemp("fresh"), target(str(tiny_target())), texts=120, seed=9)


def calibration(fitted: Path, fresh: Path, *options: str) -> tuple[str | Path, ...]:
    return ("calibrate", "exits", fitted, "--model", tiny_target(), "--data", fresh, *options)


@pytest.mark.exhaustive
def test_the_blocks_of_an_exit_count_as_layers(fresh: Path, tmp_path: Path) -> None:
    options = "--draft-vocab", "64", "--layers", "1", "--blocks", "1", "--steps", "2"
    fitted = run_foretell("train", "exits", tiny_target(), "--out", tmp_path / "exits", "--data", shared(), *options)
    assert fitted.exit_code == 0, (fitted.output, fitted.exception)
    made = run_foretell(*calibration(tmp_path / "exits", fresh, "--disagreement", "0.6", "--confidence", "0.6"))
    assert made.exit_code == 0, (made.output, made.exception)
    found = ExitCalibration.model_validate_json((tmp_path / "exits" / "calibration.json").read_text())
    # A layer and a block of a model of two layers, and after all layers the block as well.
    assert found.mean_loss <= 0.6 and 1 <= found.depth <= 1.5
    spoken = run_foretell(
        *("generate", "hello", "--model", tiny_target(), "--max-new-tokens", "8", "--method", "early_exit_lossy"),
        *("--draft-model", tmp_path / "exits", "--speculative-config"),
        f'{{"calibration": "{tmp_path / "exits" / "calibration.json"}"}}',
    )
    assert spoken.exit_code == 0 and "LOSSY" in spoken.stderr, spoken.output


def test_the_command_writes_thresholds_that_generation_reads(fitted: Path, fresh: Path, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    made = run_foretell(*calibration(fitted, fresh, "--disagreement", "0.5", "--confidence", "0.8", "--out", str(file)))
    assert made.exit_code == 0, (made.output, made.exception)
    assert "fresh answers" in made.stdout and "at most 50.0% of tokens change" in made.stdout
    found = ExitCalibration.model_validate_json(file.read_text())
    assert found.mean_loss <= 0.5 and 0 < found.depth <= 1 and found.layers == (1,)
    spoken = run_foretell(
        "generate", "hello", "--model", tiny_target(), "--method", "early_exit_lossy", "--draft-model", fitted,
        "--speculative-config", f'{{"method": "early_exit_lossy", "calibration": "{file}"}}', "--max-new-tokens", "8",
    )  # fmt: skip
    assert spoken.exit_code == 0, (spoken.output, spoken.exception)
    assert "LOSSY" in spoken.stderr


def test_a_bound_that_nothing_keeps_says_the_best_that_can_be_kept(fitted: Path, fresh: Path) -> None:
    text = expect_error(*calibration(fitted, fresh, "--disagreement", "0.0001"))
    assert "no threshold keeps a disagreement of 0.0001 at a confidence of 0.95: the best that can be kept is" in text


def test_too_few_answers_are_refused(fitted: Path) -> None:
    text = expect_error(*calibration(fitted, shared(), "--disagreement", "0.3"))
    assert "24 greedy answers are too few to calibrate on; 80 are needed" in text


def test_thresholds_of_other_exits_are_refused(fitted: Path, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    values = ExitCalibration(
        model="", exits="another", measure="softmax", layers=(1,), thresholds=(0.5,), loss="tokens", disagreement=0.1,
        confidence=0.9, answers=30, mean_loss=0.05, depth=0.8,
    )  # fmt: skip
    values.save(file)
    options = ("--draft-model", fitted, "--speculative-config")
    text = expect_error(
        "generate", "hello", "--model", tiny_target(), *options,
        f'{{"method": "early_exit_lossy", "calibration": "{file}"}}',
    )  # fmt: skip
    assert "calibrated for other exits or another model; make one with `foretell calibrate exits`" in text
