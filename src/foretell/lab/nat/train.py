"""The training loop: batches, learning rate, checkpoints and the training curve."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, model_validator

from foretell.lab.nat.align import fertilities
from foretell.lab.nat.checkpoint import load_model, require_autoregressive, require_same_words, save_model
from foretell.lab.nat.network import Kind, NatConfig, NatModel
from foretell.lab.nat.objective import PairBatch, loss_of
from foretell.lab.nat.pairs import Pair, Subwords, Vocabulary, pad, read_pairs
from foretell.train.loop.checkpoint import (
    CheckpointState,
    CheckpointStore,
    begin_optimizer,
    optimizer_tensors,
    other_training_error,
)
from foretell.train.loop.curve import StepMetrics, write_curve
from foretell.train.loop.model_card import CARD
from foretell.train.loop.settings import option_name
from foretell.utils.options import Option
from foretell.utils.validation import FrozenModel, validate

_SEED_FACTOR = 1_000_003
"""Distance between the seeds of two trainings: more than a training has steps."""
_MIN_LR_FACTOR = 0.02
_CARD_WIDTH = 100


class NatSettings(FrozenModel):
    """Settings of a training."""

    kind: Kind
    data: str
    """File of pairs."""
    out: str
    minutes: Annotated[float, Option("CPU time of the training.", "M")] = Field(0.0, ge=0)
    """0: `steps` decide."""
    steps: Annotated[int, Option("Steps, in place of --minutes.", "N")] = Field(0, ge=0)
    batch: Annotated[int, Option("Pairs of a batch.", "N")] = Field(64, ge=1)
    lr: Annotated[float, Option("Highest learning rate.", "X")] = Field(2e-3, gt=0)
    warmup: Annotated[int, Option("Steps until --lr is reached.", "N")] = Field(100, ge=0)
    smoothing: Annotated[float, Option("Label smoothing.", "X")] = Field(0.1, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)
    clip: float = Field(1.0, gt=0)
    hidden: Annotated[int, Option("Width.", "N")] = Field(128, ge=8)
    heads: Annotated[int, Option("Attention heads.", "N")] = Field(4, ge=1)
    layers: Annotated[int, Option("Layers of encoder and decoder each.", "N")] = Field(2, ge=1)
    ffn: Annotated[int, Option("Width of feed-forward layers.", "N")] = Field(512, ge=1)
    dropout: Annotated[float, Option("Dropout.", "X")] = Field(0.1, ge=0, lt=1)
    aligner: Annotated[str, Option("Autoregressive model whose attention gives fertilities (fertility).", "DIR")] = ""
    """Empty: even fertilities."""
    subwords: Annotated[int, Option("Parts of words to learn for each side; 0: whole words.", "N")] = Field(0, ge=0)
    words_of: Annotated[str, Option("Model whose words, or parts of words, are used.", "DIR")] = ""
    save_minutes: Annotated[float, Option("Minutes between checkpoints.", "M")] = Field(1.0, gt=0)
    seed: Annotated[int, Option("Seed of random numbers.", "N", least=0)] = Field(0, ge=0)

    @model_validator(mode="after")
    def _check_length(self) -> "NatSettings":
        if (self.minutes > 0) == (self.steps > 0):
            raise ValueError("give the length of the training once: --minutes of CPU time, or --steps")
        if self.aligner and self.kind != "fertility":
            raise ValueError(f"--aligner is for the kind fertility, and this is {self.kind}")
        if self.words_of and self.subwords:
            raise ValueError("--words-of DIR gives the parts of words already; leave --subwords out")
        return self


class NatState(CheckpointState):
    """The state of a training in a checkpoint."""

    settings: NatSettings
    pairs: int
    curve: tuple[StepMetrics, ...]


def config_for(settings: NatSettings, pairs: Sequence[Pair]) -> NatConfig:
    """The configuration of a model for these pairs.

    Raises:
        ValueError: sizes that do not fit together.
    """
    sources, targets = [p.source for p in pairs], [r for p in pairs for r in p.references]
    if settings.words_of:
        vocabularies = (like := load_model(Path(settings.words_of)).config).source, like.target
    elif settings.subwords:
        vocabularies = Subwords.learn(sources, settings.subwords), Subwords.learn(targets, settings.subwords)
    else:
        vocabularies = Vocabulary.of(sources), Vocabulary.of(targets)
    values: dict[str, object] = {
        "kind": settings.kind,
        "hidden": settings.hidden,
        "heads": settings.heads,
        "layers": settings.layers,
        "ffn": settings.ffn,
        "dropout": settings.dropout,
        "max_source": max(len(vocabularies[0].encode(s)) for s in sources),
        "max_target": max(len(vocabularies[1].encode(t)) for t in targets),
    }
    for side, vocabulary in zip(("source", "target"), vocabularies, strict=True):
        if isinstance(vocabulary, Subwords):
            values[f"{side}_subwords"] = vocabulary.table
        else:
            values[f"{side}_words"] = vocabulary.words
    if settings.words_of and like.marian:
        values |= {"marian": like.marian, "source_words": (), "target_words": ()}
    return validate(NatConfig, values, "sizes of the model")


class NatTrainer:
    """Trains a model on pairs, of which each is seen with its first reference.

    A step depends on the settings, its number and the tensors. With `minutes`, the learning rate depends on the CPU
    time as well, so that a repeated training is not the same one.
    """

    def __init__(self, settings: NatSettings, report: Callable[[StepMetrics, float], None] = lambda *_: None) -> None:
        pairs = read_pairs(Path(settings.data))
        torch.manual_seed(settings.seed)
        self.settings, self.model, self._report = settings, NatModel(config_for(settings, pairs)), report
        self.out, self.curve = Path(settings.out), list[StepMetrics]()
        c = self.model.config
        self._source = [c.source.encode(p.source) for p in pairs]
        self._target = [c.target.encode(p.references[0]) for p in pairs]
        self._fertility = self._fertilities() if c.kind == "fertility" else None
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
        self._store = CheckpointStore(self.out, NatState)
        self._seconds = 0.0

    def _fertilities(self) -> list[list[int]]:
        c, name = self.model.config, self.settings.aligner
        aligner = None
        if name:
            aligner = require_autoregressive(load_model(Path(name)), Path(name), "aligner")
            require_same_words(self.model, aligner, Path(name))
        return fertilities(self._source, self._target, c.max_fertility, aligner)

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Train to the end, from the latest checkpoint if there is one, and write the model.

        Raises:
            ValueError: the checkpoint is damaged or of another training, or the loss is not finite.
            KeyboardInterrupt: `should_stop` returned True; a checkpoint was written.
        """
        self._resume()
        started, saved = time.process_time() - self._seconds, time.monotonic()
        while self._progress() < 1:
            self._step()
            self._seconds = time.process_time() - started
            self._report(self.curve[-1], self._progress())
            stop = should_stop()
            if stop or time.monotonic() - saved > 60 * self.settings.save_minutes or self._progress() >= 1:
                self._save()
                saved = time.monotonic()
            if stop and self._progress() < 1:
                raise KeyboardInterrupt
        save_model(self.out, self.model.eval())
        write_curve(self.out, self.curve, with_plot=False)

    def _progress(self) -> float:
        """Finished share of the training."""
        if self.settings.steps:
            return len(self.curve) / self.settings.steps
        return self._seconds / (60 * self.settings.minutes)

    def _step(self) -> None:
        s, step = self.settings, len(self.curve)
        torch.manual_seed(s.seed * _SEED_FACTOR + step)
        batch = self._batch(step)
        self.model.train()
        lr = s.lr * self._lr_factor(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        loss = loss_of(self.model, batch)
        if not math.isfinite(float(loss.detach())):
            raise ValueError(f"the loss is {float(loss.detach())} at step {step + 1}; try a lower --lr")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        tokens = (self.curve[-1].tokens if self.curve else 0) + int(batch.length.sum())
        self.curve.append(
            StepMetrics(step=step + 1, tokens=tokens, loss=float(loss.detach()), lr=lr, seconds=self._seconds)
        )

    def _lr_factor(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.settings.warmup) if self.settings.warmup else 1.0
        cosine = 0.5 * (1 + math.cos(math.pi * min(self._progress(), 1.0)))
        return warm * (_MIN_LR_FACTOR + (1 - _MIN_LR_FACTOR) * cosine)

    def _batch(self, step: int) -> PairBatch:
        """The batch of a step: every epoch is another permutation of the pairs."""
        size = min(self.settings.batch, len(self._source))
        epoch, begin = divmod(step, len(self._source) // size)
        order = np.random.default_rng((self.settings.seed, epoch)).permutation(len(self._source))
        rows = order[begin * size : (begin + 1) * size].tolist()
        source, target = ([side[i] for i in rows] for side in (self._source, self._target))
        fertility = None if self._fertility is None else pad([self._fertility[i] for i in rows])
        length = torch.tensor([len(t) for t in target])
        return PairBatch(pad(source), pad(target), length, fertility, self._progress(), self.settings.smoothing)

    def _save(self) -> None:
        step = len(self.curve)
        state = NatState(
            step=step, seconds=self._seconds, settings=self.settings, pairs=len(self._source), curve=tuple(self.curve)
        )
        self._store.write_tensors(step, self._tensors())
        self._store.commit(state)

    def _resume(self) -> None:
        state = self._store.load_state()
        if state is None:
            return
        for name in type(self.settings).model_fields:
            then, now = getattr(state.settings, name), getattr(self.settings, name)
            if then != now and name not in ("out", "save_minutes"):
                raise other_training_error(self.out, option_name(name), then, now)
        if state.pairs != len(self._source):
            raise ValueError(
                f"{self.out} holds a checkpoint of a training on {state.pairs} pairs, and {self.settings.data} has "
                f"{len(self._source)} now; give another --out"
            )
        tensors = self._store.load_tensors()
        begin_optimizer(dict(self.model.named_parameters()), self._optimizer, tensors)
        self._store.restore(tensors, self._tensors())
        self.curve, self._seconds = list(state.curve), state.seconds

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Weights and the optimizer's state."""
        parameters = dict(self.model.named_parameters())
        weights = {"weight/" + name: p.detach() for name, p in parameters.items()}
        return weights | optimizer_tensors(parameters, self._optimizer)


def write_card(trainer: NatTrainer, command: str) -> None:
    """Write what the model is and how it was trained, beside its weights."""
    c, s, last = trainer.model.config, trainer.settings, trainer.curve[-1]
    parameters = sum(p.numel() for p in trainer.model.parameters())
    text = (
        f"{c.kind} sequence-to-sequence model of {parameters:,} parameters ({c.layers} + {c.layers} layers, width "
        f"{c.hidden}), trained on `{Path(s.data).name}` ({last.tokens:,} target tokens, repeats included) in "
        f"{last.step:,} steps and {last.seconds / 60:.1f} minutes of CPU time; last loss {last.loss:.4f}."
    )
    body = fill(text, _CARD_WIDTH, break_long_words=False, break_on_hyphens=False)
    (trainer.out / CARD).write_text(f"# {trainer.out.name}\n\n{body}\n\n## Command\n\n```\n{command}\n```\n", "utf-8")
