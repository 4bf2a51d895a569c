"""The weights in the package: small enough, described, for the embedded model, worth having, and lossless."""

import pytest

import foretell
from foretell.api import Model
from foretell.load import EMBEDDED
from foretell.speculator.checkpoint import WEIGHTS
from foretell.speculator.shipped import SHIPPED, shipped

PROMPTS = ("List three fruits and say what colour each of them is.", "What is 12 times 12? Explain every step.")
METHODS = {"draft_model": "dynamic_tree"}
"""How a kind is decoded with here, where its own method draws: greedy drafts are alike on every machine."""
ALL = sorted(s.kind for s in shipped())


@pytest.fixture(scope="module")
def model() -> Model:
    return foretell.load(EMBEDDED, "bfloat16")


@pytest.fixture(scope="module")
def plain(model: Model) -> list[tuple[int, ...]]:
    return [a.tokens for a in model.generate(PROMPTS, max_new_tokens=32)]


def test_all_of_it_is_small_and_described() -> None:
    assert set(ALL) >= {"eagle3", "mlp_speculator", "medusa", "blockwise", "draft_model"}
    assert sum(f.stat().st_size for f in SHIPPED.rglob(WEIGHTS)) <= 40_000_000
    for shipment in shipped():
        card = (shipment.folder / "README.md").read_text("utf-8")
        for part in ("## Command", "## Data", "## Course", "## Questions that it never saw"):
            assert part in card, (shipment.kind, part)
        assert (shipment.folder / "curve.png").is_file() and (shipment.folder / "curve.csv").is_file()


@pytest.mark.parametrize("kind", ALL)
def test_it_drafts_well_and_changes_nothing(kind: str, model: Model, plain: list[tuple[int, ...]]) -> None:
    answers = model.generate(PROMPTS, METHODS.get(kind, kind), max_new_tokens=32)
    assert [a.tokens for a in answers] == plain
    passes = sum(a.statistics.target_passes for a in answers)
    assert sum(a.statistics.new_tokens for a in answers) / passes > 1.1
