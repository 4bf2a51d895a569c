"""Finds what a method lacks, and has it made once per folder."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from foretell.api import Model
from foretell.catalogue import find
from foretell.catalogue.speculators import DRAFT_MODEL
from foretell.lab.reproduce.preparation.texts import Texts
from foretell.lab.reproduce.preparation.training import PLANS, PreparationSettings, TrainedSpeculator
from foretell.speculator.installed import find_installed
from foretell.utils.store import write_synced
from foretell.utils.validation import FrozenModel, read_model

_CARD = "made.json"
_TEXTS = "answers"
_KIND = {"hybrid_model": "eagle3"}
"""What methods draft with that take any kind."""


class _Card(FrozenModel):
    """Written when a thing is complete."""

    note: str


@dataclass(frozen=True)
class Prepared:
    """What a method gets. `note`: how it was made."""

    folder: Path
    note: str


def need_of(method: str) -> str:
    """The kind of speculator that can be made for a method; empty: it needs nothing of the kind."""
    entry = find(method)
    kind = DRAFT_MODEL if entry.needs.startswith("draft model") else entry.speculator
    return _KIND.get(method, kind if kind in PLANS else "")


class Preparation:
    """What methods need for a target, made in a folder.

    A thing's folder is named after all that decides what is made, so other settings make another thing. What is
    complete has a card; what is not goes on where it was.
    """

    def __init__(self, model: Model, folder: Path, data: Path | None, settings: PreparationSettings) -> None:
        self._model, self._folder, self._settings = model, folder, settings
        self._texts = Texts(model, folder / _TEXTS, data, settings.report)

    def label(self, method: str) -> str:
        """Name and identity of what a method lacks; empty: nothing.

        Raises:
            ValueError: transformers runs the target, or the texts to train on are of another model.
        """
        maker = self._maker(need_of(method))
        return "" if maker is None else maker.label

    def prepared(self, method: str) -> Prepared | None:
        """What a method lacks, made first if it is not there; None: it lacks nothing.

        Raises:
            ValueError: it cannot be made for this target.
        """
        maker = self._maker(need_of(method))
        if maker is None:
            return None
        return Prepared(self._folder / maker.label, self._make(maker))

    def clean(self) -> None:
        """Delete the hidden states of the texts, which only further trainings read; they would compute them again."""
        shutil.rmtree(self._folder / _TEXTS / "features", ignore_errors=True)

    def _make(self, maker: TrainedSpeculator) -> str:
        folder = self._folder / maker.label
        card = folder / _CARD
        if not card.is_file():
            made = _Card(note=maker.make(folder))
            write_synced(card, made.model_dump_json(indent=1).encode())
            maker.clean(folder)
        return read_model(_Card, card, f"delete {folder}").note

    def _maker(self, need: str) -> TrainedSpeculator | None:
        """None: nothing is needed, or it is installed."""
        if not need or find_installed(need, self._model.checkpoint.fingerprint()) is not None:
            return None
        return TrainedSpeculator(need, self._model, self._texts, self._settings)
