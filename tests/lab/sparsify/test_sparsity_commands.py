"""`foretell calibrate sparsity` from end to end, on a small random model, and what it refuses."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch

from command import ENVIRONMENT, expect_error, run_foretell, save_tiny_model
from foretell.lab.sparsify.nested import spread_units
from foretell.lab.sparsify.thresholds import calibrate_thresholds, magnitude_quantile
from foretell.load import load, open_checkpoint
from foretell.model import kernels as native
from foretell.model.block.activation import gated
from foretell.model.block.sparsity import FirstNeurons, sparse_decoder
from foretell.model.kernels.structures import prefix_size
from foretell.model.offload.sparsity_file import read_sparsity
from helpers import all_logits, random_tokens

CALIBRATE = "--calibration-tokens", "1024", "--held-back-tokens", "512"


@cache
def model() -> Path:
    return save_tiny_model(Path(mkdtemp()) / "model", layers=2)


@cache
def text() -> Path:
    path = Path(mkdtemp()) / "text.jsonl"
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), 5)) for _ in range(40)]
    path.write_text("\n".join(json.dumps({"text": " ".join(random.choice(words, 90))}) for _ in range(8)))
    return path


def calibrate(out: Path, method: str, *more: str) -> None:
    result = run_foretell("calibrate", "sparsity", model(), "--out", out, "--method", method, "--text", text(), *more)
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.parametrize("method", ["cats", "teal"])
def test_a_calibration_says_its_price_and_runs(method: str, tmp_path: Path) -> None:
    calibrate(tmp_path / "out", method, *CALIBRATE)
    found = json.loads((tmp_path / "out" / "sparsity.json").read_text())
    assert found["method"] == method and len(found["thresholds"]) == 2 and found["price"]["kl"] > 0
    arguments: list[str | Path] = ["generate", "ab", "--model", model(), "--max-new-tokens", "6"]
    lossy = run_foretell(*arguments, "--method", "autoregressive", "--sparsity", tmp_path / "out")
    assert lossy.exit_code == 0 and "LOSSY" in lossy.stderr and f"{method} 0.5: KL" in lossy.stderr
    config = json.dumps({"sparsity": str(tmp_path / "out")})
    drafted = run_foretell(*arguments, "--method", "sparse_mlp_draft", "--speculative-config", config)
    plain = run_foretell(*arguments, "--method", "autoregressive")
    assert drafted.exit_code == 0 and "lossless" in drafted.stderr and drafted.stdout == plain.stdout
    again = expect_error("calibrate", "sparsity", model(), "--out", tmp_path / "out", "--method", method)
    assert "there is something already" in again


def test_thresholds_leave_out_the_share_that_was_asked_for() -> None:
    opened, tokens = open_checkpoint(model()), torch.tensor(random_tokens(128, 257)).view(2, 64)
    found = calibrate_thresholds(opened.config, opened.weights, tokens, "cats", 0.25)
    assert len(found) == 2
    network = load(str(model()), "float32").checkpoint.decoder(torch.float32)
    x = torch.randn(4, 9)
    gate = gated(x, torch.ones_like(x), network.block(0).mlp.activation)  # type: ignore[arg-type]
    threshold = magnitude_quantile(gate, 0.25)
    assert float((gate.abs() <= threshold).float().mean()) == 0.25 and magnitude_quantile(gate, 0) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparsity", "1.5"], "at least 0 and less than 1; found 1.5"),
        (["--method", "cat"], "did you mean 'cats'"),
        (["--calibration-tokens", "40"], "too short a text to calibrate on"),
        (["--calibration-tokens", "90000"], "give more text"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    found = expect_error("calibrate", "sparsity", model(), "--out", tmp_path / "x", "--text", text(), *arguments)
    assert message in found


def test_thresholds_of_another_model_are_refused(tmp_path: Path) -> None:
    calibrate(tmp_path / "out", "cats", *CALIBRATE)
    other = save_tiny_model(tmp_path / "other", layers=3)
    arguments: list[str | Path] = ["generate", "ab", "--model", other, "--max-new-tokens", "2"]
    assert "chosen for another model" in expect_error(*arguments, "--sparsity", tmp_path / "out")
    assert "needs to know which neurons to read" in expect_error(*arguments, "--method", "sparse_mlp_draft")


def test_predictors_find_more_than_a_fixed_set_and_draft_without_loss(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_foretell(
        *("train", "sparsity", model(), "--out", out, "--text", text(), "--rank", "8", "--steps", "20", *CALIBRATE)
    )
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads((out / "sparsity.json").read_text())
    assert len(found["recall"]) == len(found["recall_of_fixed_set"]) == 2 and len(found["recall_ahead"]) == 1
    assert all(r > c for r, c in zip(found["recall"], found["recall_of_fixed_set"], strict=True)), found
    arguments: list[str | Path] = ["generate", "ab", "--model", model(), "--max-new-tokens", "6", "--method"]
    drafted = run_foretell(*arguments, "sparse_mlp_draft", "--speculative-config", json.dumps({"sparsity": str(out)}))
    assert drafted.stdout == run_foretell(*arguments, "autoregressive").stdout and "lossless" in drafted.stderr


@pytest.mark.skipif(not native.available(), reason=native.unavailable_reason() or "available")
def test_heads_and_runs_of_neurons_are_predicted_ahead_and_draft_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("command.ENVIRONMENT", {**ENVIRONMENT, "FORETELL_NATIVE": "1"})
    out, source = tmp_path / "out", save_tiny_model(tmp_path / "m", layers=2, hidden=64, ffn=128)
    result = run_foretell(
        *("train", "sparsity", source, "--out", out, "--text", text(), "--rank", "8", "--steps", "20", *CALIBRATE),
        *("--block", "32", "--head-sparsity", "0.5", "--look-ahead"),
    )
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads((out / "sparsity.json").read_text())
    assert len(found["head_recall"]) == len(found["head_thresholds"]) == 2 and found["look_ahead"]
    assert "of the query heads" in result.stdout and "recall of the heads to read" in result.stdout
    rules = read_sparsity(out, "", open_checkpoint(source).config).rules
    assert [rule.ahead for rule in rules] == [False, True]  # type: ignore[union-attr]
    arguments: list[str | Path] = ["generate", "ab", "--model", source, "--max-new-tokens", "6", "--method"]
    drafted = run_foretell(*arguments, "sparse_mlp_draft", "--speculative-config", json.dumps({"sparsity": str(out)}))
    assert drafted.stdout == run_foretell(*arguments, "autoregressive").stdout and "lossless" in drafted.stderr
    lossy = run_foretell(*arguments, "autoregressive", "--sparsity", out)
    assert "LOSSY" in lossy.stderr and "deja_vu 0.5, heads 0.5: KL" in lossy.stderr
    limit = "--sparsity", out, "--target-memory-limit", "1"
    assert "chosen one by one and heads are not" in expect_error(*arguments, "autoregressive", *limit)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", "0"], "predictors have a rank of 1 to"),
        (["--head-sparsity", "1"], "--head-sparsity is the share that is not read, at least 0 and less than 1"),
        (["--block", "7"], "neurons are chosen one by one (1) or in runs of 32 that divide"),
        (["--block", "32"], "in runs of 32 that divide the 24 neurons"),
        (["--look-ahead"], "--look-ahead needs neurons that are chosen in runs; add --block 32"),
    ],
)
def test_settings_of_predictors_outside_their_range_are_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    command = "train", "sparsity", model(), "--out", tmp_path / "x", "--text", text(), "--rank", "8"
    assert message in expect_error(*command, *arguments, *CALIBRATE)


def test_looking_ahead_needs_the_kernels(tmp_path: Path) -> None:
    source = wide_model(tmp_path)
    command = "train", "sparsity", source, "--out", tmp_path / "x", "--text", text(), "--rank", "8", "--block", "32"
    assert "needs a model that the CPU kernels run" in expect_error(*command, "--look-ahead", *CALIBRATE)


def wide_model(folder: Path) -> Path:
    return save_tiny_model(folder / "wide", ffn=128)


def nest(model: Path, out: Path, *more: str) -> str:
    result = run_foretell("train", "matformer", model, "--out", out, "--text", text(), *CALIBRATE, *more)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_ordering_neurons_changes_no_answer_and_the_first_ones_are_the_best(tmp_path: Path) -> None:
    source = wide_model(tmp_path)
    nest(source, tmp_path / "nested")
    nest(source, tmp_path / "half", "--extract", "0.5")
    whole, ordered, half = (load(str(p), "float32") for p in (source, tmp_path / "nested", tmp_path / "half"))
    tokens = random_tokens(30, 257)
    wanted, same, less = (all_logits(m.network, tokens) for m in (whole, ordered, half))
    np.testing.assert_allclose(same, wanted, atol=1e-3)
    assert half.config.ffn == 64 and not np.allclose(less, wanted, atol=1e-3)
    nest(tmp_path / "nested", tmp_path / "cut", "--extract", "0.5", "--ordered")
    np.testing.assert_allclose(all_logits(load(str(tmp_path / "cut"), "float32").network, tokens), less, atol=1e-3)
    short = sparse_decoder(ordered.checkpoint.decoder(torch.float32), [FirstNeurons(64)] * whole.config.layers)
    np.testing.assert_allclose(less, all_logits(short, tokens), atol=1e-3)
    arguments: list[str | Path] = [
        "generate",
        "ab",
        "--model",
        tmp_path / "nested",
        "--max-new-tokens",
        "6",
        "--method",
    ]
    drafted = run_foretell(*arguments, "matformer_draft")
    assert drafted.exit_code == 0 and "lossless" in drafted.stderr
    assert drafted.stdout == run_foretell(*arguments, "autoregressive").stdout


def test_units_go_where_they_contribute_most() -> None:
    shares = [torch.tensor([0.9, 0.1, 0.0, 0.0]), torch.tensor([0.4, 0.3, 0.2, 0.1])]
    assert spread_units(shares, 0.5) == (64, 192) and spread_units(shares, 0) == (256, 256)
    assert prefix_size(0.5, 192) == 64 and prefix_size(1, 100) == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--extract", "1.5"], "--extract 1.5: a share of the neurons above 0 and at most 1"),
        (["--extract", "0"], "--extract 0: a share"),
    ],
)
def test_shares_outside_their_range_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert message in expect_error("train", "matformer", model(), "--out", tmp_path / "x", "--text", text(), *arguments)
