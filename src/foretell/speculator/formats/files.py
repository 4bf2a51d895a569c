"""The files of a published checkpoint: its configuration, and its tensors by name and shape."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from foretell.model.load.quantization_config import refuse_quantization
from foretell.model.load.safetensors_file import what_is_wrong
from foretell.model.load.weights import refuse_quantized
from foretell.speculator.config_file import CONFIG, read_config
from foretell.utils.validation import Fields

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_OF_TRAINING = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")
"""Pickles beside weights that hold none."""


@dataclass(frozen=True)
class PublishedCheckpoint:
    """The configuration and the tensors of a directory."""

    folder: Path
    config: Mapping[str, Any]
    names: Mapping[str, tuple[Path, str]] = field(repr=False)
    """File of every tensor, and its name in that file, by the name used here (see `strip_prefixes`)."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.names

    def require(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of this name.

        Raises:
            ValueError: it is missing, or of another shape.
        """
        if name not in self.names:
            raise ValueError(f"{self.folder}: the checkpoint lacks {name}; is it complete?")
        tensor = self.find(name)
        assert tensor is not None
        if shape:
            check_shape(self, name, tensor, *shape)
        return tensor

    def find(self, name: str) -> torch.Tensor | None:
        """The tensor of this name; None: there is none."""
        if name not in self.names:
            return None
        file, inside = self.names[name]
        with safe_open(file, framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(inside)
        return tensor

    def strip_prefixes(self, *prefixes: str) -> "PublishedCheckpoint":
        """The checkpoint with these prefixes removed from its tensor names."""
        short = {_strip(name, prefixes): place for name, place in self.names.items()}
        return replace(self, names=short)

    @property
    def fields(self) -> Fields:
        """The configuration with typed access."""
        return Fields(self.config, str(self.folder / CONFIG))

    @property
    def architectures(self) -> tuple[str, ...]:
        """Class names of the network; the configuration holds a list, in some checkpoints a string."""
        names = self.config.get("architectures")
        return (names,) if isinstance(names, str) else self.fields.texts("architectures")


def open_checkpoint(folder: Path) -> PublishedCheckpoint:
    """Open the checkpoint in a directory, reading the tensor headers only; a directory of pickles has no tensors.

    Raises:
        ValueError: there is no configuration, or a file is damaged.
    """
    files, config = sorted(folder.glob("*.safetensors")), read_config(folder)
    return PublishedCheckpoint(folder, config, {name: (file, name) for file in files for name in _dtypes(file)})


def refuse_quantized_checkpoint(files: PublishedCheckpoint) -> None:
    """Refuse a checkpoint that is quantised by its configuration or its tensors.

    Raises:
        ValueError: it is.
    """
    refuse_quantization(files.config, str(files.folder))
    for file in sorted({file for file, _ in files.names.values()}):
        for name, dtype in _dtypes(file).items():
            refuse_quantized(file, name, dtype)


def check_shape(files: PublishedCheckpoint, name: str, tensor: torch.Tensor, *shape: int) -> None:
    """Refuse a tensor of another shape.

    Raises:
        ValueError: the shape is another.
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{files.folder}: {name} has the shape {list(tensor.shape)}, and its configuration asks for {list(shape)}"
        )


def missing_weights(folder: Path) -> str:
    """Error message for a directory without safetensors: how to convert the pickles in it, if there are any."""
    pickles = [f.name for f in sorted(folder.iterdir()) if f.suffix in _PICKLES and f.name not in _OF_TRAINING]
    if not pickles:
        return (
            f"{folder}: no weights here (*.safetensors); is the download complete? (Of a hub id, pickles are not "
            "downloaded.)"
        )
    # One file for a speculator and for a language model; clones, since safetensors refuses tensors that share memory.
    code = (
        f"import pathlib, torch, safetensors.torch as s; d = pathlib.Path({json.dumps(str(folder.absolute()))}); "
        f"s.save_file({{k: t.clone() for f in {json.dumps(pickles)} "
        'for k, t in torch.load(d / f, map_location="cpu", weights_only=True).items()}, d / "model.safetensors")'
    )
    return (
        f"{folder / pickles[0]}: a pickle, and unpickling can run code; convert it once where you trust it: "
        f"python -c {shlex.quote(code)}"
    )


def _dtypes(file: Path) -> dict[str, str]:
    """The dtype of every tensor, as safetensors names it."""
    try:
        with safe_open(file, framework="pt") as handle:
            return {name: handle.get_slice(name).get_dtype() for name in handle.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(what_is_wrong(file, error)) from error


def _strip(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name
