"""Settings of a training, as given on the command line."""

from typing import Annotated

from pydantic import Field

from foretell.utils.options import Option
from foretell.utils.validation import FrozenModel

_MAY_CHANGE = frozenset({"out", "save_minutes", "features", "cache_gib"})
"""Settings that may differ when training resumes, because they do not change its result."""

DRAFT_VOCAB = 8192
"""Default size of a speculator's vocabulary."""


class DatasetWeight(FrozenModel):
    """A data set and how often an epoch shows each of its documents; 0.5: a random half of them."""

    folder: str
    weight: float = Field(1.0, gt=0)

    def __str__(self) -> str:
        """The value of `--data`."""
        return self.folder if self.weight == 1 else f"{self.folder}={self.weight:g}"


class TrainingSettings(FrozenModel):
    """Settings of a training; lengths are in tokens."""

    recipe: str
    model: str
    data: tuple[DatasetWeight, ...]
    out: str
    steps: Annotated[int, Option("Optimizer steps; 0: those of --epochs.", "N")] = Field(0, ge=0)
    epochs: Annotated[float, Option("Passes over the data.", "N")] = Field(3.0, gt=0)
    cpu_minutes: Annotated[
        float, Option("Stop after M minutes of processor time, to compare kinds; 0: no limit.", "M")
    ] = Field(0.0, ge=0)
    """Of all steps together, if `steps` or `epochs` do not end the training before."""
    minutes: Annotated[float, Option("Stop after M minutes, measurements included; 0: no limit.", "M")] = Field(
        0.0, ge=0
    )
    """Since the first step, if `steps` or `epochs` do not end the training before."""
    batch_tokens: Annotated[int, Option("Tokens of a batch over all processes, padding included.", "N")] = Field(
        512, ge=1
    )
    sequence: Annotated[int, Option("Longest chunk of a document.", "N")] = Field(512, ge=8)
    accumulate: Annotated[int, Option("Batches per step (gradient accumulation).", "N")] = Field(1, ge=1)
    lr: Annotated[float, Option("Highest learning rate.", "X")] = Field(1e-3, gt=0)
    warmup: Annotated[int, Option("Steps until --lr is reached.", "N")] = Field(50, ge=0)
    schedule: Annotated[str, Option("cosine (to a tenth) or constant.", "NAME")] = "cosine"
    weight_decay: Annotated[float, Option("Weight decay of AdamW.", "X")] = Field(0.01, ge=0)
    clip: Annotated[float, Option("Maximum norm of the gradient.", "X")] = Field(1.0, gt=0)
    ema: Annotated[float, Option("Decay of a moving average of the weights; 0: none.", "X")] = Field(0.0, ge=0, lt=1)
    precision: Annotated[
        str, Option("bf16 (autocast), no (float32), or auto: bf16 where the processor or GPU has units for it.", "NAME")
    ] = "auto"
    draft_vocab: Annotated[
        int | None,
        Option(f"Draft the N most frequent tokens only; 0: all; default: those of --from, or {DRAFT_VOCAB}.", "N"),
    ] = Field(None, ge=0)
    save_minutes: Annotated[float, Option("Minutes between checkpoints.", "M")] = Field(10.0, gt=0)
    measure_every: Annotated[int, Option("Steps between measurements; 0: at the end only.", "N")] = Field(1000, ge=0)
    measure_prompts: Annotated[int, Option("Held-out prompts to measure on.", "N")] = Field(16, ge=1)
    measure_tokens: Annotated[int, Option("Tokens decoded per prompt.", "N")] = Field(96, ge=1)
    patience: Annotated[int, Option("Stop after K measurements without a new best; 0: never.", "K")] = Field(0, ge=0)
    seed: Annotated[int, Option("Seed of weights, order of the data and random numbers.", "N")] = Field(0, ge=0)
    options: dict[str, str] = Field(default_factory=dict)
    """Options of the recipe (`--set`)."""
    init_from: Annotated[
        str,
        Option(
            "Start from the weights of a trained speculator: its folder, or the kind of an installed one.",
            "DIR",
            "--from",
        ),
    ] = ""
    features: Annotated[
        str, Option("The target's hidden states: cache, stream, or auto (cache what fits).", "NAME")
    ] = "auto"
    cache_gib: Annotated[float, Option("Maximum size of cached hidden states in GiB.", "X")] = Field(6.0, ge=0)

    def first_difference(self, other: "TrainingSettings") -> str | None:
        """Name of the first setting that prevents resuming with the `other` settings; None: there is none."""
        mine, theirs = self.model_dump(), other.model_dump()
        return next((name for name in mine if name not in _MAY_CHANGE and mine[name] != theirs[name]), None)


OPTION_NAMES = {"init_from": "--from", "options": "--set", "recipe": "the recipe"}
"""Settings whose command-line option has another name."""


def option_name(name: str) -> str:
    """The command-line option of a setting."""
    return OPTION_NAMES.get(name, "--" + name.replace("_", "-"))
