"""`foretell export`: a trained speculator of a small model, written for vLLM, read back by its method; and what is
refused in one sentence.
"""

import json
from pathlib import Path

import pytest
from toy import card_of

from command import expect_error, run_foretell, save_tiny_model, tiny_target
from foretell.load import load
from foretell.speculator.checkpoint import save
from foretell.speculator.network.medusa import Medusa, MedusaConfig


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    source = load(str(tiny_target())).checkpoint
    config = MedusaConfig(target=card_of(source), heads=2, draft_vocab=40)
    save(tmp_path / "trained", Medusa(config, source.embedding_and_head()), config)
    return tmp_path / "trained"


def test_a_speculator_is_written_and_drafts(tmp_path: Path, trained: Path) -> None:
    out = tmp_path / "out"
    done = run_foretell(
        "export", trained, "--format", "vllm-medusa", "--out", out, "--model", tiny_target(), "--verifier", "owner/tiny"
    )
    assert done.exit_code == 0 and "medusa speculator in the format vllm-medusa" in done.stdout
    assert json.loads((out / "config.json").read_text())["base_model_name_or_path"] == "owner/tiny"
    common = ("--model", tiny_target(), "--max-new-tokens", "12", "--dtype", "float32")
    plain = run_foretell("generate", "abc", *common)
    for folder in (trained, out):
        drafted = run_foretell("generate", "abc", *common, "--method", "medusa", "--draft-model", folder)
        assert drafted.exit_code == 0 and drafted.stdout == plain.stdout


def test_what_is_refused_is_refused_in_a_sentence(tmp_path: Path, trained: Path) -> None:
    common = ("--out", tmp_path / "out", "--model", tiny_target())
    assert "did you mean 'vllm-medusa'" in expect_error("export", trained, "--format", "vllm-medus", *common)
    assert "formats for that kind: vllm-medusa" in expect_error("export", trained, "--format", "speculators", *common)
    assert "no medusa speculator is installed" in expect_error("export", "medusa", "--format", "vllm-medusa", *common)
    other = save_tiny_model(tmp_path / "other", seed=1)
    said = expect_error("export", trained, "--format", "vllm-medusa", "--out", tmp_path / "out", "--model", other)
    assert "was trained for another model (tiny: 2 layers, width 16, 257 tokens, fingerprint" in said
    assert not (tmp_path / "out").exists()
    assert "there is something already" in expect_error(
        "export", trained, "--format", "hf", "--out", trained, "--model", tiny_target()
    )
