"""Trains speculators with the recipes of `foretell train`, for a fixed number of steps each."""

import gc
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

from foretell.api import Model
from foretell.lab.reproduce.preparation.texts import Texts
from foretell.train.loop.accelerator import create_accelerator
from foretell.train.loop.checkpoint import FOLDER
from foretell.train.loop.job import feature_source, find_recipe, prepare
from foretell.train.loop.model_card import write_card
from foretell.train.loop.settings import DatasetWeight, TrainingSettings
from foretell.train.loop.trainer import Trainer, TrainingCallback
from foretell.train.recipe.eagle import fused_layers

_DRAFT_VOCAB = 12_288
_MEASURED_PROMPTS, _MEASURED_TOKENS = 8, 48
_CACHE_GIB = 4.0
_SAVE_MINUTES = 2.0
_FUSED = "fused"
"""Stands for the layers whose hidden states are kept beside the texts."""


class StopRequest(Protocol):
    """Whether the user wants to stop."""

    requested: bool


def _never() -> AbstractContextManager[StopRequest]:
    return nullcontext(SimpleNamespace(requested=False))


@dataclass(frozen=True)
class PreparationSettings:
    """How things are made. `steps`: of every training, None: those of its kind. `command`: for model cards.
    `stoppable`: lets a training end with a checkpoint when the user stops it. `callback`: observes a training.
    `report`: is told what is being made.
    """

    steps: int | None = None
    command: str = "foretell reproduce --train"
    stoppable: Callable[[], AbstractContextManager[StopRequest]] = _never
    callback: Callable[[], TrainingCallback] = TrainingCallback
    report: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class TrainingPlan:
    """A training of a few minutes on one core, for a target of the size of SmolLM2-135M."""

    steps: int
    lr: float = 1.5e-3
    batch_tokens: int = 512
    warmup: int = 30
    sequence: int = 512
    options: Mapping[str, str] = field(default_factory=dict)


PLANS: Mapping[str, TrainingPlan] = {
    "blockwise": TrainingPlan(1000, lr=1e-3, options={"learn": "soft"}),
    "dflash": TrainingPlan(
        1200,
        options={"hard": "0.3", "markov_rank": "64", "hidden_layers": _FUSED, "fc_norm": "true", "qk_norm": "false"},
    ),
    "draft_model": TrainingPlan(600, lr=8e-4, options={"layers": "3"}),
    "eagle": TrainingPlan(1200, lr=5e-4),
    "eagle3": TrainingPlan(1000, options={"steps": "3", "hard": "0.3"}),
    "medusa": TrainingPlan(1000, lr=1e-3, options={"blocks": "2", "learn": "soft"}),
    "mlp_speculator": TrainingPlan(1000, options={"soft": "0.7"}),
}
"""By kind of speculator; what is not named has the value of `foretell train`."""


class TrainedSpeculator:
    """A speculator of one kind for one target."""

    def __init__(self, kind: str, model: Model, texts: Texts, settings: PreparationSettings) -> None:
        self.model, self.texts, self.settings = model, texts, settings
        self.name, self._plan = kind, PLANS[kind]

    @property
    def label(self) -> str:
        """Name and identity, as the folder is called: the texts, and the settings of the training without folders."""
        values = self._training_settings(Path(), Path()).model_dump(mode="json", exclude={"data", "out", "model"})
        identity = {"texts": self.texts.identity, **values}
        return f"{self.name}-{sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]}"

    def make(self, folder: Path) -> str:
        """Train into a folder, from the latest checkpoint on if there is one; returns a sentence on how.

        Raises:
            ValueError: it cannot be trained for this model.
        """
        settings = self._training_settings(self.texts.folder(), folder)
        self.settings.report(f"training {self.name}: {settings.steps:,} steps of {settings.batch_tokens:,} tokens")
        job = prepare(settings, self.model, find_recipe(settings))
        trainer = Trainer(job, create_accelerator(), feature_source(job), self.settings.callback())
        with self.settings.stoppable() as stop:
            trainer.run(lambda: stop.requested)
        write_card(trainer, self.settings.command)
        tokens = trainer.curve[-1].tokens
        note = (
            f"{self.name}: {trainer.step:,} steps on {tokens:,} tokens (repeats and prompts included) of "
            f"{self.texts.describe()}; {trainer.best:.2f} tokens per pass on {len(job.prompts)} held-back prompts of "
            "this kind"
        )
        del trainer, job
        gc.collect()
        return note

    def clean(self, folder: Path) -> None:
        """Delete the checkpoint."""
        shutil.rmtree(folder / FOLDER, ignore_errors=True)

    def _training_settings(self, data: Path, out: Path) -> TrainingSettings:
        plan, options = self._plan, dict(self._plan.options)
        if "hidden_layers" in options:
            options["hidden_layers"] = ",".join(map(str, fused_layers(self.model.config.layers)))
        if "layers" in options:
            options["layers"] = str(min(int(options["layers"]), self.model.config.layers))
        return TrainingSettings(
            recipe=self.name,
            model=self.model.name,
            data=(DatasetWeight(folder=str(data), weight=1.0),),
            out=str(out),
            steps=self.settings.steps or plan.steps,
            batch_tokens=plan.batch_tokens,
            sequence=min(plan.sequence, self.model.config.context),
            lr=plan.lr,
            warmup=plan.warmup,
            precision="no" if self.model.precision == "float32" else "auto",
            draft_vocab=_DRAFT_VOCAB,
            save_minutes=_SAVE_MINUTES,
            measure_every=0,
            measure_prompts=_MEASURED_PROMPTS,
            measure_tokens=_MEASURED_TOKENS,
            options=options,
            cache_gib=_CACHE_GIB,
        )
