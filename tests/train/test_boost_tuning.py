"""Boost-tuning on the command line: a second draft model for the tokens that the first one misses."""

from pathlib import Path

import pytest
from training_helpers import shared

from command import run_foretell, tiny_target
from foretell.speculator.config_file import read_config

SMALL = (
    "--steps", "3", "--batch-tokens", "256", "--sequence", "64", "--measure-every", "3", "--measure-prompts", "2",
    "--measure-tokens", "6",
    "--precision", "no", "--draft-vocab", "64", "--set", "layers=1", "--warmup", "2",
)  # fmt: skip


def train(out: Path, *more: str) -> None:
    result = run_foretell(
        "train", "draft_model", "--model", tiny_target(), "--data", shared(), "--out", out, *SMALL, *more
    )
    assert result.exit_code == 0, (result.output, result.exception)


def generate(*more: str | Path) -> str:
    result = run_foretell(
        "generate", "hello", "--model", tiny_target(), "--max-new-tokens", "8", "--dtype", "float32", *more
    )
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.mark.exhaustive
def test_two_drafts_trained_one_after_the_other_draft_together(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train(first)
    train(second, "--set", f"earlier={first}")
    assert read_config(first)["kind"] == read_config(second)["kind"] == "draft_model"
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()
    plain = generate()
    assert generate("--method", "specinfer", "--draft-model", first, "--draft-model", second) == plain
    assert generate("--method", "online", "--draft-model", first) == plain
