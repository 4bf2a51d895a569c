"""What the user asked of a training: everything that decides how its curve goes on."""

from pydantic import BaseModel, ConfigDict, Field

_MAY_CHANGE = frozenset({"out", "save_minutes", "features", "cache_gib"})
"""Settings that a training may be resumed with other values of: they do not change what is learned."""


DRAFT_VOCAB = 8192
"""Tokens that a fresh speculator drafts where nothing else is said."""


class DatasetWeight(BaseModel):
    """A data set and how often an epoch shows each of its documents (0.5: every second one, drawn anew)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    weight: float = Field(1.0, gt=0)

    def __str__(self) -> str:
        """As the command line spells it."""
        return self.folder if self.weight == 1 else f"{self.folder}={self.weight:g}"


class TrainingSettings(BaseModel):
    """One training. Sizes in tokens; `steps` 0: as many as the epochs have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str
    model: str
    data: tuple[DatasetWeight, ...]
    out: str
    steps: int = Field(0, ge=0)
    epochs: float = Field(3.0, gt=0)
    batch_tokens: int = Field(512, ge=1)
    """Tokens of a batch, padding included, shared by the processes."""
    sequence: int = Field(512, ge=8)
    """Longest piece of a document."""
    accumulate: int = Field(1, ge=1)
    """Batches of a step."""
    lr: float = Field(1e-3, gt=0)
    warmup: int = Field(50, ge=0)
    """Steps until the learning rate is whole."""
    schedule: str = "cosine"
    weight_decay: float = Field(0.01, ge=0)
    clip: float = Field(1.0, gt=0)
    """Longest gradient, as a norm."""
    ema: float = Field(0.0, ge=0, lt=1)
    """Decay of the moving average of the weights; 0: none."""
    precision: str = "bf16"
    draft_vocab: int | None = Field(None, ge=0)
    """Tokens that the speculator may draft, the most frequent of the data; 0: all; unsaid: those that `begin` drafts,
    or `DRAFT_VOCAB`.
    """
    save_minutes: float = Field(10.0, gt=0)
    measure_every: int = Field(1000, ge=0)
    """Steps between measurements of tokens per pass; 0: at the end only."""
    measure_prompts: int = Field(16, ge=1)
    measure_tokens: int = Field(96, ge=1)
    patience: int = Field(0, ge=0)
    """Measurements without a new best after which training stops; 0: it goes on."""
    seed: int = Field(0, ge=0)
    options: dict[str, str] = Field(default_factory=dict)
    """Of the recipe."""
    init_from: str = ""
    """The speculator whose weights are taken to begin with: its folder, or the kind of an installed one."""
    features: str = "auto"
    cache_gib: float = Field(6.0, ge=0)

    def first_difference(self, other: "TrainingSettings") -> str | None:
        """The first setting, as the command line spells it, in which another training differs; None: it is this one."""
        mine, theirs = self.model_dump(), other.model_dump()
        return next((name for name in mine if name not in _MAY_CHANGE and mine[name] != theirs[name]), None)


OPTION_NAMES = {"begin": "--from", "options": "--set", "recipe": "the recipe"}
"""Settings whose flag is not their own name."""


def option_name(name: str) -> str:
    """How the command line spells a setting."""
    return OPTION_NAMES.get(name, "--" + name.replace("_", "-"))
