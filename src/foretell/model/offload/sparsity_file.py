"""The directory that describes a sparse model: how its tokens choose neurons, and what that costs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretell.model.block.sparsity import (
    FirstNeurons,
    GateThreshold,
    InputThresholds,
    NeuronRule,
    PredictedNeurons,
    Predictor,
    check_sparse,
)
from foretell.model.config.model import ModelConfig
from foretell.utils.validation import FrozenModel, read_json, validate

SparsityMethod = Literal["cats", "teal", "deja_vu", "matformer"]
FILE = "sparsity.json"
PREDICTORS = "predictors.safetensors"
_HINT = "make one with `foretell calibrate sparsity` or `foretell train sparsity`"
_THRESHOLDS = {"cats": 1, "teal": 4, "deja_vu": 1}
"""Thresholds of a layer."""


class SparsityLoss(FrozenModel):
    """The sparse model beside the dense one, on text that was held back."""

    tokens: int
    kl: float
    """KL(dense || sparse) of the next token, in nats."""
    same_top: float
    """Share of positions where both find the same token most probable."""
    perplexity: float
    """Of the dense model."""
    sparse_perplexity: float


class SparsityFile(BaseModel):
    """What `sparsity.json` holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    kind: Literal["foretell sparsity"] = "foretell sparsity"
    method: SparsityMethod
    model: str
    """Fingerprint of the target."""
    layers: int = Field(ge=1)
    sparsity: float = Field(ge=0, lt=1)
    """Share that was asked for: of the neurons (of `teal`, of the inputs of every matrix) that are not read."""
    thresholds: tuple[tuple[float, ...], ...] = ()
    """Per layer: of the gate (`cats`); of the inputs of query, key and value, of the attention's output, of gate and
    up, and of down (`teal`); of the predicted scores (`deja_vu`).
    """
    sizes: tuple[int, ...] = ()
    """Neurons of every layer (`matformer`)."""
    text: str = ""
    """Where the calibration text comes from."""
    tokens: int = 0
    """Tokens of it."""
    loss: SparsityLoss | None = Field(default=None, alias="price")
    """On text that was held back; the file names it `price`."""
    recall: tuple[float, ...] = ()
    """Per layer the share of the neurons to read that were predicted (`deja_vu`), on text that was held back."""
    recall_ahead: tuple[float, ...] = ()
    """The same from layer 1 on, of predictors that read the input of the layer before (Deja Vu's look-ahead)."""
    recall_of_fixed_set: tuple[float, ...] = ()
    """The same of a fixed set of as many neurons, those that are needed most often."""
    block: int = Field(default=1, ge=1)
    """Consecutive neurons that are chosen together (`deja_vu`)."""
    look_ahead: bool = False
    """Whether the predictors of a layer read what the layer before reads (`deja_vu`)."""
    head_sparsity: float = Field(default=0.0, ge=0, lt=1)
    """Share of the query heads that was asked to be left out (`deja_vu`); 0: all are read."""
    head_thresholds: tuple[float, ...] = ()
    """Per layer, of the predicted scores of the heads."""
    head_recall: tuple[float, ...] = ()
    """Per layer the share of the heads to read that were predicted, on text that was held back."""
    head_recall_ahead: tuple[float, ...] = ()
    """The same from layer 1 on, of predictors that read the input of the layer before."""
    head_recall_of_fixed_set: tuple[float, ...] = ()
    """The same of a fixed set of as many heads."""

    def save(self, folder: Path) -> None:
        """Write the file into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(self.model_dump_json(indent=1, by_alias=True) + "\n", "utf-8")

    @property
    def label(self) -> str:
        """The method with its loss, in a few words."""
        heads = f", heads {self.head_sparsity:g}" if self.head_sparsity else ""
        words = f"{self.method} {self.sparsity:g}{heads}"
        if self.loss is None:
            return words
        return f"{words}: KL {self.loss.kl:.3f} nats, {self.loss.same_top:.1%} equal top tokens on text held back"


@dataclass(frozen=True)
class SparseModel:
    """The rules of all layers, with the file that they come from."""

    rules: tuple[NeuronRule, ...]
    file: SparsityFile


def directory_of(path: Path) -> Path:
    """The directory of a sparse model, which is named itself or by its file."""
    return path if path.is_dir() else path.parent


def read_sparsity(folder: Path, model: str, config: ModelConfig) -> SparseModel:
    """Read the rules for the model with this fingerprint (empty: unknown, its sizes alone are compared).

    Raises:
        ValueError: there are none, they are damaged, they belong to another model, or the model cannot have them.
    """
    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {_HINT}")
    raw = read_json(path, _HINT)
    if raw.get("kind") != SparsityFile.model_fields["kind"].default:
        raise ValueError(f"{path}: not a description of a sparse model; {_HINT}")
    file = validate(SparsityFile, raw, str(path))
    if file.layers != config.layers or (model and file.model and file.model != model):
        raise ValueError(
            f"{path}: these neurons were chosen for another model ({file.layers} layers, fingerprint {file.model}; "
            f"this one has {config.layers} layers and {model or 'none'}); {_HINT}"
        )
    expected = _THRESHOLDS.get(file.method)
    sizes = [1] * len(file.sizes) if expected is None else [len(t) for t in file.thresholds]
    if sizes != [expected or 1] * file.layers or len(file.head_thresholds) not in (0, file.layers):
        raise ValueError(f"{path}: damaged: it does not describe each of {file.layers} layers; {_HINT}")
    rules = _rules(file, directory_of(path))
    check_sparse(config, rules)
    return SparseModel(rules, file)


def _rules(file: SparsityFile, folder: Path) -> tuple[NeuronRule, ...]:
    if file.method == "matformer":
        return tuple(FirstNeurons(size) for size in file.sizes)
    if file.method == "teal":
        return tuple(InputThresholds(*thresholds) for thresholds in file.thresholds)
    if file.method == "cats":
        return tuple(GateThreshold(*thresholds) for thresholds in file.thresholds)
    return _predictors(folder / PREDICTORS, file)


def _predictors(path: Path, file: SparsityFile) -> tuple[NeuronRule, ...]:
    try:
        with safe_open(path, "pt") as tensors:

            def parts(i: int, kind: str, threshold: float) -> tuple[Tensor, Tensor, float, Tensor, bool]:
                inputs, outputs, bias = (
                    tensors.get_tensor(f"layers.{i}.{kind}{name}") for name in ("inputs", "outputs", "bias")
                )
                return inputs, outputs, threshold, bias, file.look_ahead and i > 0

            return tuple(
                PredictedNeurons(
                    *parts(i, "", threshold),
                    unit=file.block,
                    heads=Predictor(*parts(i, "heads.", file.head_thresholds[i])) if file.head_thresholds else None,
                )
                for i, (threshold,) in enumerate(file.thresholds)
            )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: the predictors cannot be read ({error}); {_HINT}") from error
