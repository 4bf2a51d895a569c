"""Variants of decoding by family. A new variant is an entry of its family, a new family a function and a line below."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import get_args

from foretell.bench.competitor import PLAIN, MethodSpec
from foretell.catalogue import catalogue
from foretell.catalogue.config import SpeculativeConfig
from foretell.lab.frontier.predict import CheckpointKind, Predictor
from foretell.load import open_checkpoint
from foretell.model.cache.policy import target_policies
from foretell.model.config.model import CacheDtype
from foretell.model.config.readers.compressed import CARD
from foretell.model.load.reference import resolve_reference
from foretell.model.offload.sparsity_file import FILE, SparsityFile
from foretell.speculator.exit_calibration import ExitCalibration
from foretell.utils.validation import read_json, validate

Predict = Callable[[Predictor], float | None]
"""The predicted gain in time of a variant; None: the roofline does not model it."""


@dataclass(frozen=True)
class ModelOptions:
    """How the model of a variant is loaded."""

    model: str
    dtype: str
    kv_cache_dtype: str = "auto"
    kv_cache_policy: str | None = None
    sparsity: str | None = None


@dataclass(frozen=True)
class Variant:
    """A variant of decoding: a model as it is loaded, a method that decodes with it, and what is predicted of it."""

    name: str
    family: str
    options: ModelOptions
    predict: Predict
    spec: MethodSpec = field(default_factory=lambda: MethodSpec.parse(PLAIN))
    drafts: tuple[str, ...] = ()

    @property
    def competitor(self) -> str:
        """Its name in a run, which no variant of another family has."""
        return f"{self.name}/{self.family}"


@dataclass(frozen=True)
class VariantInputs:
    """What variants are made of. `exact`: the model that all are compared with."""

    exact: ModelOptions
    dtypes: tuple[str, ...] = ()
    budgets: tuple[int, ...] = ()
    checkpoints: tuple[Path, ...] = ()
    exits: tuple[Path, ...] = ()
    sparsity: tuple[Path, ...] = ()
    drafts: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()


def _dtypes(inputs: VariantInputs) -> Iterator[Variant]:
    for name in inputs.dtypes:
        if name != inputs.exact.dtype:
            yield Variant(name, "weights", replace(inputs.exact, dtype=name), partial(Predictor.dtype, name=name))


def _kv_dtypes(inputs: VariantInputs) -> Iterator[Variant]:
    for name in get_args(CacheDtype):
        if name not in ("auto", "fp8"):  # which is for GPUs
            options = replace(inputs.exact, kv_cache_dtype=name)
            yield Variant(f"kv-{name}", "kv-dtype", options, partial(Predictor.kv_dtype, name=name))


def _kv_policies(inputs: VariantInputs) -> Iterator[Variant]:
    for budget in inputs.budgets:
        for name in (policy.name for policy in target_policies()):
            text = f"{name}@{budget}"
            options = replace(inputs.exact, kv_cache_policy=text)
            yield Variant(text, "kv-policy", options, partial(Predictor.kv_policy, text=text))


def _checkpoints(inputs: VariantInputs) -> Iterator[Variant]:
    for path in inputs.checkpoints:
        opened = open_checkpoint(resolve_reference(str(path)))
        kind = _kind(path, opened.weights.storage)
        if kind == "dense" and not (path / CARD).is_file():
            raise ValueError(
                f"{path}: neither a card of `foretell compress` nor quantised weights are here, so it is unknown what "
                "was done to it; give a directory that `foretell compress` or `foretell quantize` wrote"
            )
        options = replace(inputs.exact, model=str(path), dtype="auto" if kind == "quantized" else inputs.exact.dtype)
        yield Variant(path.stem, "checkpoint", options, partial(Predictor.checkpoint, config=opened.config, kind=kind))


def _kind(path: Path, storage: str) -> CheckpointKind:
    card = path / CARD
    if storage == "quantized":
        return "quantized"
    return "2:4" if card.is_file() and read_json(card).get("two_of_four") else "dense"


def _exits(inputs: VariantInputs) -> Iterator[Variant]:
    for folder in inputs.exits:
        files = sorted(folder.glob("*.json"))
        calibrations = [f for f in files if read_json(f).get("kind") == ExitCalibration.model_fields["kind"].default]
        if not calibrations:
            raise ValueError(f"{folder}: no calibration of exits is here; make one with `foretell calibrate exits`")
        for file in calibrations:
            known = validate(ExitCalibration, read_json(file), str(file))
            config = SpeculativeConfig(calibration=str(file))
            yield Variant(
                f"exits@{known.disagreement:g}",
                "exits",
                inputs.exact,
                partial(Predictor.exits, depth=known.depth, layers=known.layers),
                MethodSpec("early_exit_lossy", "early_exit_lossy", config),
                (str(folder),),
            )


def _sparsity(inputs: VariantInputs) -> Iterator[Variant]:
    for folder in inputs.sparsity:
        file = folder / FILE if folder.is_dir() else folder
        known = validate(SparsityFile, read_json(file, "make one with `foretell calibrate sparsity`"), str(file))
        options = replace(inputs.exact, sparsity=str(folder))
        predict = partial(Predictor.sparsity, method=known.method, share=known.sparsity)
        yield Variant(f"{known.method}@{known.sparsity:g}", "sparsity", options, predict)


def _lossy_methods(inputs: VariantInputs) -> Iterator[Variant]:
    for entry in catalogue().values():
        if not entry.lossless and entry.name not in ("early_exit_lossy", "synthetic_lossy"):
            yield _method(inputs, entry.name, "lossy-method")


def _lossless_methods(inputs: VariantInputs) -> Iterator[Variant]:
    for name in inputs.methods:
        yield _method(inputs, name, "lossless-method")


def _method(inputs: VariantInputs, text: str, family: str) -> Variant:
    spec = MethodSpec.parse(text)
    return Variant(spec.label, family, inputs.exact, partial(Predictor.method, name=spec.method), spec, inputs.drafts)


FAMILIES: Mapping[str, Callable[[VariantInputs], Iterator[Variant]]] = {
    "weights": _dtypes,
    "kv-dtype": _kv_dtypes,
    "kv-policy": _kv_policies,
    "checkpoint": _checkpoints,
    "exits": _exits,
    "sparsity": _sparsity,
    "lossy-method": _lossy_methods,
    "lossless-method": _lossless_methods,
}
"""Every family of variants by its name."""


def all_variants(inputs: VariantInputs) -> list[Variant]:
    """The variants of all families, in their order.

    Raises:
        ValueError: an input is not what its family reads.
    """
    return [variant for family in FAMILIES.values() for variant in family(inputs)]
