"""The weights in the package `foretell-smollm2-135m`: small enough, described, for the embedded model, worth having,
and lossless.
"""

import json
from pathlib import Path

import pytest

import foretell
from command import run_foretell
from foretell.api import Model
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.speculator.checkpoint import WEIGHTS
from foretell.speculator.installed import PACKAGE, PACKAGE_KINDS, PACKAGE_TARGET, find_all_installed

PROMPTS = ("List three fruits and say what colour each of them is.", "What is 12 times 12? Explain every step.")
METHODS = {"draft_model": "dynamic_tree"}
"""How a kind is decoded with here, where its own method draws: greedy drafts are alike on every machine."""
FOLDER = Path(__file__).parents[2] / "packages" / PACKAGE / "src" / PACKAGE.replace("-", "_")


@pytest.fixture(scope="module")
def model() -> Model:
    return foretell.load(DEFAULT_MODEL, "bfloat16")


@pytest.fixture(scope="module")
def plain(model: Model) -> list[tuple[int, ...]]:
    return [a.tokens for a in model.generate(PROMPTS, max_new_tokens=32)]


def test_all_of_it_is_small_and_described() -> None:
    ours = [s for s in find_all_installed().speculators if s.target == DEFAULT_MODEL]
    assert {s.kind for s in ours} == set(PACKAGE_KINDS) and {s.fingerprint for s in ours} == {PACKAGE_TARGET}
    assert sum(f.stat().st_size for f in FOLDER.rglob(WEIGHTS)) <= 40_000_000
    for kind in PACKAGE_KINDS:
        card = (FOLDER / kind / "README.md").read_text("utf-8")
        for part in ("## Command", "## Data", "## Training curve", "## Questions that it never saw"):
            assert part in card, (kind, part)
        assert (FOLDER / kind / "curve.png").is_file() and (FOLDER / kind / "curve.csv").is_file()


@pytest.mark.parametrize("kind", PACKAGE_KINDS)
def test_it_drafts_well_and_changes_nothing(kind: str, model: Model, plain: list[tuple[int, ...]]) -> None:
    answers = model.generate(PROMPTS, METHODS.get(kind, kind), max_new_tokens=32)
    assert [a.tokens for a in answers] == plain
    passes = sum(a.statistics.target_passes for a in answers)
    assert sum(a.statistics.new_tokens for a in answers) / passes > 1.1


@pytest.mark.exhaustive
def test_the_shipped_eagle3_is_exported_as_good(model: Model, tmp_path: Path) -> None:
    """It reads the state after the final norm, which other engines do not give; the export reads that before it."""
    out = tmp_path / "out"
    done = run_foretell("export", "eagle3", "--format", "speculators", "--out", out, "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    assert json.loads((out / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27, 30]
    passes = []
    for drafts in ((), (out,)):
        method = model.method("eagle3", {"num_steps": 3, "num_draft_tokens": 3}, drafts=drafts)
        answers = model.generate(list(PROMPTS), method, max_new_tokens=64)
        passes.append(sum(a.statistics.target_passes for a in answers))
    assert abs(passes[1] - passes[0]) <= 0.1 * passes[0], passes
