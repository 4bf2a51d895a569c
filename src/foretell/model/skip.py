"""Which sub-layers a self-drafting target leaves out: a sensible default, and the tuning file of one model."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from foretell.model.config import ModelConfig
from foretell.model.decoder import Skip
from foretell.model.runner import Network

_KIND = "foretell skip set"


def default_skip(layers: int) -> Skip:
    """The attention of every second block, first and last fifth apart: what searches on unlike models agree on.

    Draft & Verify's published sets (arXiv 2309.08168) skip twice as many attention as feed-forward parts, mostly in the upper middle.
    """
    edge = layers // 5
    return Skip(attention=frozenset(range(edge, layers - edge, 2)))


def fingerprint(network: Network) -> str:
    """A name of the weights that is the same in every precision: the configuration and the signs of up to 512 embeddings."""
    vocab = network.config.vocab
    tokens = torch.arange(0, vocab, max(1, vocab // 512))
    signs = (network.embed(tokens) > 0).cpu().numpy().tobytes()
    return hashlib.sha256(repr(network.config).encode() + signs).hexdigest()[:16]


def kept_share(config: ModelConfig, skip: Skip) -> float:
    """Share of the weights of a one-token pass that is still read without the skipped parts (final head included)."""
    heads = config.heads + 2 * config.kv_heads
    attention = config.hidden * config.head_dim * (heads + config.heads)
    total = kept = config.vocab * config.hidden
    for i in range(config.layers):
        mlp = 3 * config.hidden * config.ffn
        if config.experts is not None and i in config.experts.layers:
            mlp = 3 * config.hidden * (config.experts.active * config.experts.ffn + config.experts.shared_ffn)
        total += attention + mlp
        kept += attention * (i not in skip.attention) + mlp * (i not in skip.mlp)
    return kept / total


@dataclass(frozen=True)
class SkipTrial:
    """A skip set and how good it was."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    value: float

    @property
    def skip(self) -> Skip:
        """As the decoder takes it."""
        return Skip(frozenset(self.attention), frozenset(self.mlp))

    @staticmethod
    def of(skip: Skip, value: float) -> "SkipTrial":
        """The trial of this set."""
        return SkipTrial(tuple(sorted(skip.attention)), tuple(sorted(skip.mlp)), value)


@dataclass(frozen=True)
class SkipFile:
    """All trials of a search on one model; `workload` names the prompts and `objective` what was maximised."""

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
        """With one trial more."""
        return replace(self, trials=(*self.trials, trial))

    def save(self, path: Path) -> None:
        """Write the file in one stroke, so that an interrupted search loses nothing."""
        values = {"kind": _KIND, **asdict(self), "best": asdict(self.best) if self.trials else None}
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(values, indent=1) + "\n")
        part.replace(path)

    @staticmethod
    def read(path: Path, network: Network) -> "SkipFile":
        """Read a file that was tuned on this model.

        Raises:
            ValueError: no such file, not a skip set, or one of another model.
        """
        try:
            raw = json.loads(path.read_text())
        except OSError as error:
            raise ValueError(
                f"{path}: cannot read the skip set ({error.strerror}); make one with `foretell tune skip`"
            ) from error
        except ValueError as error:
            raise ValueError(f"{path}: not a skip set ({error}); make one with `foretell tune skip`") from error
        if not isinstance(raw, dict) or raw.get("kind") != _KIND:
            raise ValueError(f"{path}: not a skip set; make one with `foretell tune skip`")
        found = _parse(raw, path)
        if found.model != fingerprint(network):
            raise ValueError(
                f"{path}: this skip set was tuned on another model ({found.layers} layers, fingerprint {found.model}; this one has "
                f"{network.config.layers} layers and {fingerprint(network)}); run `foretell tune skip` for this model"
            )
        return found


def _parse(raw: dict[str, Any], path: Path) -> SkipFile:
    try:
        trials = tuple(SkipTrial(tuple(t["attention"]), tuple(t["mlp"]), float(t["value"])) for t in raw["trials"])
        found = SkipFile(str(raw["model"]), int(raw["layers"]), str(raw["objective"]), str(raw["workload"]), trials)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: damaged skip set ({error!r}); delete it and run `foretell tune skip` again"
        ) from error
    if any(not 0 <= i < found.layers for t in trials for i in (*t.attention, *t.mlp)):
        raise ValueError(
            f"{path}: damaged skip set: it names a layer outside 0..{found.layers - 1}; delete it and tune again"
        )
    return found


def read_skip(path: Path, network: Network) -> Skip:
    """The best skip set of a tuning file.

    Raises:
        ValueError: the file is not a skip set of this model, or holds no trial yet.
    """
    found = SkipFile.read(path, network)
    if not found.trials:
        raise ValueError(f"{path}: the search was stopped before its first trial; run `foretell tune skip` again")
    return found.best.skip
