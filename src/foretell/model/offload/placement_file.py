"""What the directory of a sparse model holds for a placement of its neurons: how often each was chosen, and all of
them in one file in that order.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Int
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foretell.model.config.model import ModelConfig
from foretell.model.kernels.linear import float_precision
from foretell.model.kernels.neuron_file import NeuronFile
from foretell.model.kernels.structures import Precision
from foretell.utils.validation import FrozenModel, read_json, validate

FILE = "placement.json"
COUNTS = "neuron_counts.safetensors"
NEURONS = "neurons.bin"
_HINT = "make one with `foretell calibrate placement`"


class PlacementFile(FrozenModel):
    """What `placement.json` holds."""

    kind: Literal["foretell placement"] = "foretell placement"
    layers: int = Field(ge=1)
    neurons: int = Field(ge=1)
    hidden: int = Field(ge=1)
    floats: Literal["float32", "bfloat16"]
    """Of the rows in the file."""
    tokens: int = Field(ge=1)
    """Tokens of the profile."""
    text: str = ""
    """Where its text comes from."""
    thresholds: tuple[tuple[float, ...], ...]
    """Of the sparse model whose neurons were counted; see `SparsityFile`."""
    least_neurons: int = Field(default=0, ge=0)
    """A layer has none in memory, or at least so many."""


def save_counts(folder: Path, file: PlacementFile, counts: Int[torch.Tensor, "l f"]) -> None:
    """Write a profile into a folder."""
    save_file({"counts": counts.to(torch.int32).contiguous()}, folder / COUNTS)
    (folder / FILE).write_text(file.model_dump_json(indent=1) + "\n", "utf-8")


def file_order(counts: Int[torch.Tensor, "l f"]) -> Int[torch.Tensor, "l f"]:
    """Per layer the neurons in the order of the file, the most frequent first."""
    return counts.argsort(dim=1, descending=True, stable=True)


@dataclass(frozen=True)
class NeuronProfile:
    """A profile, and the file with the neurons."""

    file: PlacementFile
    counts: Int[torch.Tensor, "l f"]
    neurons: NeuronFile


def read_placement(
    folder: Path, config: ModelConfig, precision: Precision, thresholds: tuple[tuple[float, ...], ...]
) -> NeuronProfile:
    """Read the profile of a sparse model with these thresholds.

    Raises:
        ValueError: there is none, it is damaged, or it belongs to another model, dtype or calibration.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(
            f"{folder}: a limit of memory was asked for, and it is not known which neurons this model needs most; "
            f"{_HINT}"
        )
    file = validate(PlacementFile, read_json(path, _HINT), str(path))
    expected, sizes = (config.layers, config.ffn, config.hidden), (file.layers, file.neurons, file.hidden)
    if sizes != expected or file.thresholds != thresholds:
        raise ValueError(f"{path}: this profile is of another model or of other thresholds; {_HINT}")
    if file.floats != float_precision(precision):
        raise ValueError(
            f"{path}: its neurons are in {file.floats}, and {precision} was asked for, which needs "
            f"{float_precision(precision)}; {_HINT} and --dtype {precision}"
        )
    neurons = _open(folder / NEURONS, file)
    try:
        with safe_open(folder / COUNTS, "pt") as tensors:
            counts = tensors.get_tensor("counts")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / COUNTS}: the counts cannot be read ({error}); {_HINT}") from error
    if counts.shape != (file.layers, file.neurons):
        raise ValueError(f"{folder / COUNTS}: damaged: it does not count the neurons of {file.layers} layers; {_HINT}")
    return NeuronProfile(file, counts, neurons)


def _open(path: Path, file: PlacementFile) -> NeuronFile:
    try:
        return NeuronFile(path, file.layers, file.neurons, file.hidden, file.floats)
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}; {_HINT}") from error
