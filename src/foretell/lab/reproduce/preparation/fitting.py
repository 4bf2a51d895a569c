"""What is fitted or calibrated in seconds: exits of the target, and thresholds of its neurons."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from foretell.lab.quantize.calibration import LENGTH
from foretell.lab.quantize.job import Source
from foretell.lab.reproduce.preparation.maker import Identity, Maker
from foretell.lab.sparsify.thresholds import calibrate_thresholds
from foretell.model.load.reference import resolve_reference
from foretell.model.offload.sparsity_file import SparsityFile
from foretell.train.exits.job import ExitSettings, fit_exits, save_exits

_EXIT_TOKENS = 30_000
_SPARSITY, _SPARSITY_TOKENS = 0.5, 4096
"""CATS' share of neurons that a token does not read (arXiv 2404.08763); and tokens of calibration."""


class FittedExits(Maker):
    """Linear exits after every tenth of the layers, with classifiers."""

    name = "exits"

    @property
    def _exits(self) -> ExitSettings:
        return ExitSettings(tokens=_EXIT_TOKENS)

    @property
    def identity(self) -> Identity:
        """The texts, and what is fitted."""
        settings = {name: str(value) for name, value in asdict(self._exits).items()}
        return {"texts": self.texts.identity, **settings}

    def make(self, folder: Path) -> str:
        """Fit them in closed form."""
        self.settings.report("fitting exits")
        fitted = fit_exits(self.model, self.texts.dataset(), self._exits)
        save_exits(folder, fitted, self.settings.command)
        return f"exits: fitted in closed form on {fitted.tokens:,} tokens of {self.texts.describe()}"


class CalibratedSparsity(Maker):
    """Thresholds below which a token does not read neurons (CATS)."""

    name = "sparsity"

    @property
    def identity(self) -> Identity:
        """The texts and the share."""
        return {"texts": self.texts.identity, "sparsity": _SPARSITY, "tokens": _SPARSITY_TOKENS}

    def make(self, folder: Path) -> str:
        """Take quantiles of the gates on the texts."""
        self.settings.report("calibrating thresholds of neurons")
        source = Source.open(self.model.name, resolve_reference(self.model.name), "calibrated")
        tokens = np.concatenate([document.tokens for document in self.texts.dataset()])[:_SPARSITY_TOKENS]
        length = min(LENGTH, source.config.context, len(tokens))
        sequences = torch.from_numpy(tokens[: len(tokens) // length * length].astype(np.int64)).view(-1, length)
        SparsityFile(
            method="cats",
            model=self.model.checkpoint.fingerprint(),
            layers=source.config.layers,
            sparsity=_SPARSITY,
            thresholds=calibrate_thresholds(source.config, source.weights, sequences, "cats", _SPARSITY),
            text="text of the model",
            tokens=sequences.numel(),
        ).save(folder)
        return (
            f"sparsity: thresholds (CATS) below which the share {_SPARSITY:g} of the neurons lies, from "
            f"{sequences.numel():,} tokens of {self.texts.describe()}"
        )

    def drafts(self, folder: Path) -> tuple[()]:
        """None: the target drafts."""
        return ()

    def options(self, folder: Path) -> Mapping[str, object]:
        """The directory."""
        return {"sparsity": str(folder)}
