"""Helpers of the training tests: a tiny target on disk, data sets of its answers, settings and trainers."""

import os
import tempfile
from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from command import tiny_target
from foretell.api import Model
from foretell.engine.request import Request
from foretell.load import load
from foretell.train.data.dataset import DatasetManifest, DatasetWriter, DocumentRecord
from foretell.train.loop.job import TrainingJob, feature_source, find_recipe, prepare
from foretell.train.loop.settings import DatasetWeight, TrainingSettings
from foretell.train.loop.trainer import Trainer, TrainingCallback
from helpers import unchecked

PROCESSES = get_context("spawn") if torch.cuda.is_available() else get_context("fork")
"""Starts a process that has imported everything; what uses CUDA cannot be copied."""


@cache
def target(path: str, dtype: str = "float32") -> Model:
    """A tiny model, loaded once."""
    with patch.dict(os.environ, FORETELL_NATIVE="0"):
        return load(path, dtype)


@cache
def shared() -> Path:
    """Answers of the tiny target of the command tests; tests that write to a set make their own."""
    return answers(Path(_folder().name), target(str(tiny_target())))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def answers(folder: Path, model: Model, texts: int = 24, seed: int = 0, tokens: int = 40, prompt: int = 8) -> Path:
    """A training set: the model continues random prompts greedily."""
    manifest = DatasetManifest.of(model, "prompts", seed=seed)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 256, prompt + int(rng.integers(0, 4))).tolist() for _ in range(texts)]
    engine = model.engine("autoregressive", rows=texts)
    numbers = [engine.submit(Request(tuple(p), max_new_tokens=tokens - int(rng.integers(0, 12)))) for p in prompts]
    found: dict[int, list[int]] = {n: [] for n in numbers}
    for update in engine.run():
        found[update.request] += update.tokens
    with DatasetWriter(folder, manifest) as collection:
        for i, (prompt_tokens, n) in enumerate(zip(prompts, numbers, strict=True)):
            collection.add(DocumentRecord(number=i, tokens=prompt_tokens + found[n], start=len(prompt_tokens)))
        collection.seal()
    return folder


def settings(out: Path, data: Path | None = None, **changed: object) -> TrainingSettings:
    """A training of seconds on the tiny target."""
    values: dict[str, object] = {
        "recipe": "mlp_speculator", "options": {"inner": "32"}, "model": str(tiny_target()), "out": str(out),
        "data": (DatasetWeight(folder=str(data or shared()), weight=1.0),), "steps": 12, "batch_tokens": 256,
        "sequence": 64, "warmup": 2, "precision": "no", "draft_vocab": 64, "measure_every": 6, "measure_prompts": 3,
        "measure_tokens": 8, "lr": 3e-3,
    }  # fmt: skip
    return TrainingSettings.model_validate(values | changed)


def task(wanted: TrainingSettings) -> TrainingJob:
    """Data and recipe, ready to train."""
    return prepare(wanted, target(wanted.model), find_recipe(wanted))


def trainer(wanted: TrainingSettings | TrainingJob) -> Trainer:
    """A training in this process."""
    ready = wanted if isinstance(wanted, TrainingJob) else task(wanted)
    Path(ready.settings.out).mkdir(parents=True, exist_ok=True)
    states = feature_source(ready)
    return Trainer(ready, Accelerator(cpu=True, mixed_precision="no"), states, TrainingCallback())


def trained(wanted: TrainingSettings | TrainingJob) -> Trainer:
    """A training run to its end, or on to it."""
    out = trainer(wanted)
    with unchecked():
        out.run()
    return out


def check_resume(path: Path, wanted: Callable[[str], TrainingSettings], stop: int) -> None:
    """A training that is stopped at a step and resumed ends with the weights of an uninterrupted one.

    `wanted`: the settings of a training that writes to a folder of this name under `path`.
    """
    whole = trained(wanted("whole"))
    part = trainer(wanted("part"))
    with unchecked(), pytest.raises(KeyboardInterrupt):
        part.run(lambda: part.step == stop)
    rest = trained(wanted("part"))
    assert [row.loss for row in rest.curve] == [row.loss for row in whole.curve]
    ours, theirs = (done.job.recipe.module.state_dict() for done in (rest, whole))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    files = [load_file(path / name / "model.safetensors") for name in ("part", "whole")]
    for name in files[0]:
        assert torch.equal(files[0][name], files[1][name]), name


def losses(done: Trainer) -> list[float]:
    """The loss of every step."""
    return [r.loss for r in done.curve]
