"""`foretell generate --plan`."""

import json
from pathlib import Path

import pytest

from command import expect_error, run_foretell, save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), context=2048)


def test_one_prompt_and_a_file(model: Path, tmp_path: Path) -> None:
    common = ("generate", "--model", model, "--dtype", "float32", "--max-new-tokens", "8")
    plain = run_foretell(*common, "hello").stdout
    result = run_foretell(*common, "hello", "--plan", "skeleton")
    assert result.stdout == plain and result.exit_code == 0
    assert "LOSSY · plan skeleton, answered plainly: " in result.stderr
    file = tmp_path / "prompts.jsonl"
    file.write_text('"hello"\n"a\\nb"\n{"turns": ["x", "y"]}\n')
    result = run_foretell(*common, "--prompts", file, "--json", "--plan", '{"type": "skeleton", "router": "off"}')
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(records) == 4 and records[0]["text"] == plain.removesuffix("\n")
    assert all(r["plan"]["requests"] == 2 and r["lossless"] is False and "fidelity_loss" not in r for r in records)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plan", "tree"), "unknown plan 'tree'"),
        (("--plan", '{"type": "skeleton", "max_points": 99}'), "max_points"),
        (("--plan", "skeleton", "--raw"), "raw"),
        (("--plan", "skeleton", "--logprobs", "--json"), "takes no logprobs"),
        (("--plan", "skeleton", "--json-object"), "takes no constraint"),
    ],
)
def test_bad_input(model: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in expect_error("generate", "hello", "--model", model, "--dtype", "float32", *arguments)
