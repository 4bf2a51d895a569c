"""Trains speculators with the recipes of `foretell train`, for a fixed number of steps each."""

import gc
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foretell.api import Model
from foretell.catalogue.speculators import DRAFT_MODEL
from foretell.lab.reproduce.preparation.maker import Identity, Maker, PreparationSettings
from foretell.lab.reproduce.preparation.texts import Texts
from foretell.speculator.checkpoint import read_config
from foretell.speculator.installed import find_installed
from foretell.train.loop.accelerator import create_accelerator
from foretell.train.loop.checkpoint import FOLDER
from foretell.train.loop.job import TrainingJob, feature_source, find_recipe, prepare
from foretell.train.loop.model_card import write_card
from foretell.train.loop.settings import DatasetWeight, TrainingSettings
from foretell.train.loop.trainer import Trainer
from foretell.train.recipe.eagle import fused_layers

_DRAFT_VOCAB = 12_288
_MEASURED_PROMPTS, _MEASURED_TOKENS = 8, 48
_CACHE_GIB = 4.0
_FUSED = "fused"
"""Stands for the layers whose hidden states are kept beside the texts."""


@dataclass(frozen=True)
class TrainingPlan:
    """A training of a few minutes on one core, for a target of the size of SmolLM2-135M."""

    steps: int
    lr: float = 1.5e-3
    batch_tokens: int = 512
    warmup: int = 30
    sequence: int = 512
    save_minutes: float = 2.0
    init_from: str = ""
    """Kind of speculator to start from, if one is installed for the target; a draft model decides on `layers`."""
    options: Mapping[str, str] = field(default_factory=dict)


PLANS: Mapping[str, TrainingPlan] = {
    "blockwise": TrainingPlan(1000, lr=1e-3, options={"learn": "soft"}),
    "dflash": TrainingPlan(1200, options={"hard": "0.3", "markov_rank": "64", "hidden_layers": _FUSED}),
    "draft_model": TrainingPlan(600, lr=8e-4, options={"layers": "3"}),
    "eagle": TrainingPlan(1200, lr=5e-4),
    "eagle3": TrainingPlan(1000, options={"steps": "3", "hard": "0.3"}),
    "masked_diffusion": TrainingPlan(50, lr=1e-4, warmup=5, sequence=256, save_minutes=5.0),
    "medusa": TrainingPlan(1000, lr=1e-3, options={"blocks": "2", "learn": "soft"}),
    "mlp_speculator": TrainingPlan(1000, options={"soft": "0.7"}),
    "p_eagle": TrainingPlan(1600, lr=1e-3, init_from="eagle3", options={"hard": "0.3"}),
    "pard": TrainingPlan(450, lr=5e-4, init_from=DRAFT_MODEL, options={"layers": "3", "hard": "0.3"}),
    "pass": TrainingPlan(80, warmup=5),
    "redrafter": TrainingPlan(700),
}
"""By kind of speculator; what is not named has the value of `foretell train`."""


class TrainedSpeculator(Maker):
    """A speculator of one kind."""

    def __init__(self, kind: str, model: Model, texts: Texts, settings: PreparationSettings) -> None:
        super().__init__(model, texts, settings)
        self.name = kind  # type: ignore[misc]
        self._plan = PLANS[kind]

    @property
    def identity(self) -> Identity:
        """The texts, and the settings of the training without the folders."""
        values = self._training_settings(Path(), Path()).model_dump(mode="json", exclude={"data", "out", "model"})
        return {"texts": self.texts.identity, **values}

    def make(self, folder: Path) -> str:
        """Train, from the latest checkpoint on if there is one."""
        settings = self._training_settings(self.texts.folder(), folder)
        self.settings.report(f"training {self.name}: {settings.steps:,} steps of {settings.batch_tokens:,} tokens")
        job, start = self._job(settings)
        trainer = Trainer(job, create_accelerator(), feature_source(job), self.settings.callback())
        with self.settings.stoppable() as stop:
            trainer.run(lambda: stop.requested)
        write_card(trainer, self.settings.command)
        tokens = trainer.curve[-1].tokens
        note = (
            f"{self.name}{start}: {trainer.step:,} steps on {tokens:,} tokens (repeats and prompts included) of "
            f"{self.texts.describe()}; {trainer.best:.2f} tokens per pass on {len(job.prompts)} held-back prompts of "
            "this kind"
        )
        del trainer, job
        gc.collect()
        return note

    def _job(self, settings: TrainingSettings) -> tuple[TrainingJob, str]:
        """The training, and what it starts from, for the note; from nothing where the installed speculator that it
        should start from does not fit.
        """
        recipe, name = find_recipe(settings), settings.init_from
        try:
            return prepare(settings, self.model, recipe), f" from {name}" if name else ""
        except ValueError as error:
            if not name:
                raise
            self.settings.report(f"{self.name} does not start from the installed {name}: {error}")
            job = prepare(settings.model_copy(update={"init_from": ""}), self.model, recipe)
            return job, f" from nothing, because the installed {name} does not fit"

    def clean(self, folder: Path) -> None:
        """Delete the checkpoint."""
        shutil.rmtree(folder / FOLDER, ignore_errors=True)

    def _training_settings(self, data: Path, out: Path) -> TrainingSettings:
        plan, options = self._plan, dict(self._plan.options)
        if "hidden_layers" in options:
            options["hidden_layers"] = _list(fused_layers(self.model.config.layers))
        if "layers" in options:
            options["layers"] = str(min(int(options["layers"]), self.model.config.layers))
        start = find_installed(plan.init_from, self.model.checkpoint.fingerprint()) if plan.init_from else None
        begun = {} if start is None else read_config(start)
        if start is not None and "layers" in options:
            options["layers"] = str(begun["model"]["layers"])
        if begun.get("hidden_layers"):
            options["hidden_layers"] = _list(begun["hidden_layers"])
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
            precision="no" if self.model.precision == "float32" else "bf16",
            draft_vocab=_DRAFT_VOCAB,
            save_minutes=plan.save_minutes,
            measure_every=0,
            measure_prompts=_MEASURED_PROMPTS,
            measure_tokens=_MEASURED_TOKENS,
            options=options,
            init_from=plan.init_from if start is not None else "",
            cache_gib=_CACHE_GIB,
        )


def _list(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))
