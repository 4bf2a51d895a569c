"""Skip sets of self-speculative decoding: the default, and the file that `foretell tune skip` writes."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from foretell.model.block.decoder import SkipSet
from foretell.model.config.model import ModelConfig
from foretell.model.config.read_weights import attention_weights, mlp_weights
from foretell.utils.paths import replace_file
from foretell.utils.validation import Fields, read_json

_KIND = "foretell skip set"


def default_skip(layers: int) -> SkipSet:
    """The attention of every second block except in the first and last fifth.

    Searches on different models agree on this. The skip sets published with Draft & Verify (arXiv 2309.08168) have
    twice as many attention as feed-forward sub-layers, mostly in the upper middle.
    """
    edge = layers // 5
    return SkipSet(attention=frozenset(range(edge, layers - edge, 2)))


def kept_weight_share(config: ModelConfig, skip: SkipSet) -> float:
    """Share of the weights of a one-token pass, head included, that is read without the skipped sub-layers."""
    total = kept = config.vocab * config.hidden
    for i in range(config.layers):
        attention, mlp = attention_weights(config, i), mlp_weights(config, i)
        total += attention + mlp
        kept += attention * (i not in skip.attention) + mlp * (i not in skip.mlp)
    return kept / total


@dataclass(frozen=True)
class SkipTrial:
    """A skip set and its objective value."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    value: float

    @property
    def skip_set(self) -> SkipSet:
        """The skip set of this trial."""
        return SkipSet(frozenset(self.attention), frozenset(self.mlp))

    @staticmethod
    def from_skip_set(skip: SkipSet, value: float) -> "SkipTrial":
        """The trial of a skip set."""
        return SkipTrial(tuple(sorted(skip.attention)), tuple(sorted(skip.mlp)), value)


@dataclass(frozen=True)
class SkipFile:
    """All trials of a search; `model` is the `Checkpoint.fingerprint`, `workload` names the prompts, `objective` the
    quantity that was maximised.
    """

    model: str
    layers: int
    objective: str
    workload: str
    trials: tuple[SkipTrial, ...] = field(default=())

    @property
    def best(self) -> SkipTrial:
        """The best trial, the earliest of equals."""
        return max(self.trials, key=lambda t: t.value)

    def add(self, trial: SkipTrial) -> "SkipFile":
        """The file with one more trial."""
        return replace(self, trials=(*self.trials, trial))

    def save(self, path: Path) -> None:
        """Write the file atomically, so that an interrupted search loses nothing."""
        values = {"kind": _KIND, **asdict(self), "best": asdict(self.best) if self.trials else None}
        replace_file(path, json.dumps(values, indent=1) + "\n")

    @staticmethod
    def read(path: Path, model: str, layers: int) -> "SkipFile":
        """Read a file that was tuned on the model with this fingerprint (empty: unknown, compare the layers only).

        Raises:
            ValueError: there is no such file, it is not a skip set, or it belongs to another model.
        """
        raw = read_json(path, "make one with `foretell tune skip`")
        if raw.get("kind") != _KIND:
            raise ValueError(f"{path}: not a skip set; make one with `foretell tune skip`")
        file = _parse(raw, path)
        if file.layers != layers or (model and file.model != model):
            raise ValueError(
                f"{path}: this skip set was tuned on another model ({file.layers} layers, fingerprint {file.model}; "
                f"this one has {layers} layers and {model or 'none'}); run `foretell tune skip` for this model"
            )
        return file


def _parse(raw: dict[str, Any], path: Path) -> SkipFile:
    read = Fields(raw, f"{path}: damaged skip set")
    trials = tuple(
        SkipTrial(t.integers("attention"), t.integers("mlp"), t.number("value")) for t in read.objects("trials")
    )
    file = SkipFile(
        read.text("model"), read.integer("layers", least=1), read.text("objective"), read.text("workload"), trials
    )
    if any(not 0 <= i < file.layers for t in trials for i in (*t.attention, *t.mlp)):
        raise ValueError(
            f"{path}: damaged skip set: it names a layer outside 0..{file.layers - 1}; delete it and tune again"
        )
    return file


def read_skip(path: Path, model: str, layers: int) -> SkipSet:
    """The best skip set of a tuning file; see `SkipFile.read`.

    Raises:
        ValueError: the file is not a skip set of this model, or holds no trial yet.
    """
    file = SkipFile.read(path, model, layers)
    if not file.trials:
        raise ValueError(f"{path}: the search was stopped before its first trial; run `foretell tune skip` again")
    return file.best.skip_set
