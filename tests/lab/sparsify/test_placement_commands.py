"""`foretell calibrate placement` from end to end, on a small random model, and what it refuses."""

import json
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_sparsity_commands import CALIBRATE, text

from command import ENVIRONMENT, HEADS, expect_error, run_foretell, save_tiny_model
from foretell.lab.sparsify.profile import count_choices, shares_of_most_frequent
from foretell.load import load, open_checkpoint
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.offload.sparsity_file import read_sparsity
from helpers import all_logits, random_tokens


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "FORETELL_NATIVE", "1")


@cache
def model() -> Path:
    """A model that the CPU kernels run."""
    return save_tiny_model(Path(mkdtemp()) / "model", layers=2, hidden=16 * HEADS, ffn=192)


def calibrate(out: Path, method: str) -> None:
    result = run_foretell(
        "calibrate", "sparsity", model(), "--out", out, "--method", method, "--text", text(), *CALIBRATE
    )
    assert result.exit_code == 0, (result.output, result.exception)


@cache
def half() -> Path:
    """A sparse model of `cats` with a profile."""
    out = Path(mkdtemp()) / "half"
    calibrate(out, "cats")
    arguments = "calibrate", "placement", model(), "--sparsity", out, "--text", text()
    result = run_foretell(*arguments, "--calibration-tokens", "1024", "--target-memory-limit", "1", "--passes", "2")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "times as fast" in result.stdout and "choices that fall on the most frequent" in result.stdout
    return out


def test_answers_under_a_limit_are_those_of_the_sparse_model_in_memory() -> None:
    arguments: list[str | Path] = ["generate", "ab", "--model", model(), "--max-new-tokens", "8", "--sparsity", half()]
    placed = run_foretell(*arguments, "--target-memory-limit", "1")
    assert placed.exit_code == 0 and "LOSSY" in placed.stderr and "100.0% of the neurons in memory" in placed.stderr
    assert placed.stdout == run_foretell(*arguments).stdout
    by_file = run_foretell(*arguments[:-1], half() / "sparsity.json", "--target-memory-limit", "1")
    assert by_file.stdout == placed.stdout


def test_any_limit_gives_the_same_numbers_and_keeps_to_its_bytes() -> None:
    tokens, reference = random_tokens(30, 257), load(str(model()), sparsity=half())
    wanted, refused = all_logits(reference.network, tokens), ""
    shares = set[float]()
    for limit in range(400_000, 100_000, -50_000):
        try:
            network = load(str(model()), memory_limit=limit, sparsity=half()).network
        except ValueError as error:
            refused = str(error)
            break
        assert isinstance(network, NativeDecoder) and network.nbytes + network.packed_bytes <= limit
        np.testing.assert_array_equal(all_logits(network, tokens), wanted)
        assert network.file_reads is not None
        shares.add(network.file_reads.total()[0])
    assert len(shares) > 1 and "is too small: embedding, head, attention" in refused


def test_models_that_the_kernels_do_not_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "FORETELL_NATIVE", "0")
    assert "run it without a limit of memory" in generate(half())


def test_choices_are_counted() -> None:
    opened, counts = open_checkpoint(model()), load_file(half() / "neuron_counts.safetensors")["counts"]
    sparse = read_sparsity(half(), "", opened.config)
    tokens = torch.tensor(random_tokens(128, 257)).view(2, 64)
    found = count_choices(opened.config, opened.weights, sparse, tokens)
    assert found.shape == counts.shape == (2, opened.config.ffn) and 0 < int(found.min()) + int(found.max()) <= 256
    assert 0.3 < float(counts.double().mean()) / 1024 < 0.7
    shares = list(shares_of_most_frequent(counts, (0.0, 0.25, 0.5, 1.0)))
    assert shares == sorted(shares) and shares[0] == 0 and shares[1] >= 0.25 and shares[-1] == 1


def generate(folder: Path, *more: str | Path) -> str:
    arguments: list[str | Path] = ["generate", "ab", "--model", model(), "--max-new-tokens", "2"]
    return expect_error(*arguments, "--target-memory-limit", "1", "--sparsity", folder, *more)


def test_a_sparse_model_without_a_profile_is_refused_under_a_limit(tmp_path: Path) -> None:
    calibrate(tmp_path / "plain", "cats")
    assert "make one with `foretell calibrate placement`" in generate(tmp_path / "plain")
    calibrate(tmp_path / "teal", "teal")
    assert "teal does not choose neurons" in generate(tmp_path / "teal")
    placement = "calibrate", "placement", model(), "--text", text(), "--sparsity"
    assert "teal does not choose neurons" in expect_error(*placement, tmp_path / "teal")
    assert "no such file" in expect_error(*placement, tmp_path / "nothing")
    assert "neurons per layer" in expect_error(*placement, tmp_path / "plain", "--least-neurons", "9999")
    assert "too short a text" in expect_error(*placement, tmp_path / "plain", "--calibration-tokens", "10")


def test_a_profile_that_does_not_fit_or_is_damaged_is_refused(tmp_path: Path) -> None:
    stored = json.loads((half() / "placement.json").read_text())
    assert stored["floats"] == "float32"
    assert "its neurons are in float32, and bfloat16 was asked for" in generate(half(), "--dtype", "bfloat16")
    for name, damage, message in (
        ("placement.json", json.dumps(stored | {"thresholds": [[0.5], [0.5]]}).encode(), "of other thresholds"),
        ("placement.json", b"{", "placement.json"),
        ("neuron_counts.safetensors", b"damaged", "the counts cannot be read"),
        ("neurons.bin", b"short", "damaged: 2 layers of neurons take"),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        copytree(half(), folder)
        (folder / name).write_bytes(damage)
        assert message in generate(folder)


@pytest.mark.parametrize("missing", ["neurons.bin", "neuron_counts.safetensors"])
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    copytree(half(), tmp_path / "copy")
    (tmp_path / "copy" / missing).unlink()
    assert missing in generate(tmp_path / "copy")
