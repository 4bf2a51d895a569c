"""The texts that everything is made from: answers of the target to prompts that it writes, or a given set."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from foretell.api import Model
from foretell.train.data.dataset import Dataset, DatasetManifest, DatasetWriter
from foretell.train.data.generate import continue_answers
from foretell.train.loop.job import check_data
from foretell.train.recipe.eagle import fused_layers

TOKENS = 60_000
"""Tokens of answers that the model writes."""
_ROWS = 32
_LONGEST_PROMPT, _LONGEST_ANSWER = 192, 256
_GREEDY_SHARE, _TEMPERATURE = 0.8, 0.8


class Texts:
    """Texts of a target. `given`: a set of `foretell data generate`; None: the model writes one into `folder`."""

    def __init__(self, model: Model, folder: Path, given: Path | None, report: Callable[[str], None]) -> None:
        self._model, self._folder, self._given, self._report = model, folder, given, report
        self._problem = ""

    @cached_property
    def identity(self) -> dict[str, object]:
        """What decides which texts these are."""
        if self._given is None:
            return {"tokens": TOKENS, **self._manifest.model_dump()}
        dataset = Dataset.open(self._given)
        check_data(dataset, self._model)
        return {"tokens": dataset.num_learned_tokens, **dataset.manifest.model_dump()}

    def folder(self) -> Path:
        """The folder of the texts, which are written first if they are not there; once, whether it works or not.

        Raises:
            ValueError: the model cannot write any.
        """
        if self._given is not None:
            return self._given
        if self._problem:
            raise ValueError(self._problem)
        try:
            self._write()
        except ValueError as error:
            self._problem = str(error)
            raise
        return self._folder

    def dataset(self) -> Dataset:
        """The texts.

        Raises:
            ValueError: see `folder`.
        """
        return Dataset.open(self.folder())

    def describe(self) -> str:
        """How many there are, and who wrote them."""
        dataset = self.dataset()
        origin = f"in {self._given}" if self._given is not None else "that the model wrote, prompts and answers"
        return f"{dataset.num_learned_tokens:,} tokens {origin}"

    @property
    def fused_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states are kept beside the texts: those that speculators read; the last makes labels."""
        layers = self._model.config.layers
        return *fused_layers(layers), layers + 1

    @property
    def _manifest(self) -> DatasetManifest:
        model = self._model
        return DatasetManifest.of(
            model,
            "self",
            precision=model.precision,
            greedy_share=_GREEDY_SHARE,
            temperature=_TEMPERATURE,
            max_question=_LONGEST_PROMPT,
            max_answer=_LONGEST_ANSWER,
        )

    def _write(self) -> None:
        model = self._model
        if model.codec.chat_template is None:
            raise ValueError(
                f"{model.name} has no chat template, so it writes no prompts to train on: make a set with `foretell "
                "data generate --text` and name it with --train-data"
            )
        with DatasetWriter(self._folder, self._manifest) as writer:
            if writer.num_learned_tokens < TOKENS:
                self._report(f"{model.name} writes {TOKENS:,} tokens to train on")
                for _ in continue_answers(model, self._manifest, writer, _ROWS, TOKENS, None, self.fused_layers):
                    pass
            writer.seal()
