"""A training holds one copy of its target, shared by feature source, recipe and measurement."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_resume import CASES
from training_helpers import settings, task, trained, trainer

from foretell.model.block.decoder import Decoder
from foretell.model.config.model import ModelConfig
from foretell.model.load import checkpoint as source
from foretell.model.load.build import build_decoder
from foretell.model.load.weights import Weights
from foretell.train.loop import job as jobs
from foretell.train.loop.job import TrainingJob
from helpers import unchecked


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> list[Decoder]:
    """Whole decoders that were read from the checkpoint."""
    found = list[Decoder]()

    def counted(config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
        found.append(build_decoder(config, weights, dtype, device))
        return found[-1]

    monkeypatch.setattr(source, "build_decoder", counted)
    return found


def ready(folder: Path, case: str) -> TrainingJob:
    recipe, options = CASES[case]
    return task(settings(folder, recipe=recipe, options=options, steps=1, measure_every=0, features="stream"))


# A tuned target is written to disk as a copy of its own.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            c,
            marks=()
            if c in ("draft_model", "dflash", "eagle3", "medusa", "mlp_speculator")
            else pytest.mark.exhaustive,
        )
        for c in CASES
        if "tuned" not in c
    ],
)
def test_a_target_that_runs_in_plain_torch_is_not_read_again(
    case: str, tmp_path: Path, decoders: list[Decoder]
) -> None:
    with unchecked():
        trained(ready(tmp_path, case))
    assert decoders == []


@pytest.mark.parametrize("case", CASES)
def test_beside_a_target_on_kernels_there_is_at_most_one_decoder(
    case: str, tmp_path: Path, decoders: list[Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "plain_decoder", lambda network, dtype: None)
    real = jobs._setup
    monkeypatch.setattr(jobs, "_setup", lambda *values: replace(real(*values), network=None))
    one = ready(tmp_path, case)
    with unchecked():
        out = trainer(one)
        out._train_step(0)
    assert decoders == [one.setup.decoder]
