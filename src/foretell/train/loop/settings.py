"""Settings of a training, as given on the command line."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

_MAY_CHANGE = frozenset({"out", "save_minutes", "features", "cache_gib"})
"""Settings that may differ when training resumes, because they do not change its result."""

DRAFT_VOCAB = 8192
"""Default size of a speculator's vocabulary."""


class DatasetWeight(BaseModel):
    """A data set and how often an epoch shows each of its documents; 0.5: a random half of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    weight: float = Field(1.0, gt=0)

    def __str__(self) -> str:
        """The value of `--data`."""
        return self.folder if self.weight == 1 else f"{self.folder}={self.weight:g}"


class TrainingSettings(BaseModel):
    """Settings of a training; lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str
    model: str
    data: tuple[DatasetWeight, ...]
    out: str
    steps: int = Field(0, ge=0)
    """Optimizer steps; 0: those of `epochs`."""
    epochs: float = Field(3.0, gt=0)
    cpu_minutes: float = Field(0.0, ge=0)
    """Processor time of all steps together after which training stops, if `steps` or `epochs` do not end it before; 0:
    no limit.
    """
    batch_tokens: int = Field(512, ge=1)
    """Tokens of a batch over all processes, padding included."""
    sequence: int = Field(512, ge=8)
    """Longest chunk of a document."""
    accumulate: int = Field(1, ge=1)
    """Batches per step (gradient accumulation)."""
    lr: float = Field(1e-3, gt=0)
    warmup: int = Field(50, ge=0)
    """Steps until the learning rate reaches `lr`."""
    schedule: str = "cosine"
    weight_decay: float = Field(0.01, ge=0)
    clip: float = Field(1.0, gt=0)
    """Maximum norm of the gradient."""
    ema: float = Field(0.0, ge=0, lt=1)
    """Decay of the moving average of the weights; 0: none."""
    precision: str = "bf16"
    draft_vocab: int | None = Field(None, ge=0)
    """Number of tokens that the speculator can draft, the most frequent ones of the data; 0: all; None: those of
    `init_from`, or `DRAFT_VOCAB`.
    """
    save_minutes: float = Field(10.0, gt=0)
    measure_every: int = Field(1000, ge=0)
    """Steps between measurements of tokens per pass; 0: at the end only."""
    measure_prompts: int = Field(16, ge=1)
    measure_tokens: int = Field(96, ge=1)
    patience: int = Field(0, ge=0)
    """Measurements without a new best after which training stops; 0: never."""
    seed: int = Field(0, ge=0)
    options: dict[str, str] = Field(default_factory=dict)
    """Options of the recipe (`--set`)."""
    init_from: str = ""
    """Speculator whose weights training starts from: its folder, or the kind of an installed one."""
    features: str = "auto"
    cache_gib: float = Field(6.0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _accept_old_names(cls, values: Any) -> Any:
        """Read checkpoints in which `init_from` is called `begin`."""
        return rename_key(values, "begin", "init_from")

    def first_difference(self, other: "TrainingSettings") -> str | None:
        """Name of the first setting that prevents resuming with the `other` settings; None: there is none."""
        mine, theirs = self.model_dump(), other.model_dump()
        return next((name for name in mine if name not in _MAY_CHANGE and mine[name] != theirs[name]), None)


OPTION_NAMES = {"init_from": "--from", "options": "--set", "recipe": "the recipe"}
"""Settings whose command-line option has another name."""


def option_name(name: str) -> str:
    """The command-line option of a setting."""
    return OPTION_NAMES.get(name, "--" + name.replace("_", "-"))


def rename_key(values: Any, old: str, new: str) -> Any:
    """A JSON object with a key renamed; other values unchanged."""
    return {new if key == old else key: value for key, value in values.items()} if isinstance(values, dict) else values
