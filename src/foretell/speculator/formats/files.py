"""A published checkpoint as its files say it: the configuration, and tensors that are asked for by name and shape."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from foretell.model.config import quantization
from foretell.model.load.weights import UNQUANTIZED, refuse_quantized
from foretell.speculator.checkpoint import CONFIG, read_config
from foretell.utils.validation import Fields

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True)
class PublishedCheckpoint:
    """What lies in a directory.

    Tensors are looked up under one name here, whatever prefix a publisher put before it.
    """

    folder: Path
    config: Mapping[str, Any]
    names: Mapping[str, tuple[Path, str]] = field(repr=False)
    """File and name in it of every tensor."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
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
        """The tensor of this name, None where there is none."""
        if name not in self.names:
            return None
        file, inside = self.names[name]
        with safe_open(file, framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(inside)
        return tensor

    def strip_prefixes(self, *prefixes: str) -> "PublishedCheckpoint":
        """The same under names without these prefixes."""
        short = {_cut(name, prefixes): place for name, place in self.names.items()}
        return replace(self, names=short)

    def number(self, key: str, default: int | None = None) -> int:
        """An integer of the configuration.

        Raises:
            ValueError: it is missing, or something else.
        """
        return self.fields.integer(key, default=default)

    def real(self, key: str, default: float) -> float:
        """A number of the configuration.

        Raises:
            ValueError: it is something else.
        """
        return self.fields.number(key, default=default)

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value of the configuration.

        Raises:
            ValueError: it is something else.
        """
        return self.fields.flag(key, default=default)

    @property
    def fields(self) -> Fields:
        """The configuration with typed access."""
        return Fields(self.config, str(self.folder / CONFIG))

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of network classes, which some publishers write as a string and most as a list."""
        said = self.config.get("architectures")
        return (said,) if isinstance(said, str) else self.fields.texts("architectures")


def open_checkpoint(folder: Path) -> PublishedCheckpoint:
    """Look into a directory, reading the headers of its tensors only; a directory of pickles has none.

    Raises:
        ValueError: there is no configuration, a file is damaged, or the checkpoint is quantised.
    """
    files, config = sorted(folder.glob("*.safetensors")), read_config(folder)
    kind = quantization(config)
    if kind is not None:
        raise ValueError(f"{folder}: a checkpoint quantised with {kind}, which is not supported; {UNQUANTIZED}")
    return PublishedCheckpoint(folder, config, {name: (file, name) for file in files for name in _names(file)})


def check_shape(found: PublishedCheckpoint, name: str, tensor: torch.Tensor, *shape: int) -> None:
    """Refuse a tensor of another shape.

    Raises:
        ValueError: with both shapes.
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{found.folder}: {name} has the shape {list(tensor.shape)}, and its configuration asks for {list(shape)}"
        )


def missing_weights(folder: Path) -> str:
    """The sentence about a directory without safetensors: how to convert the pickle in it, if there is one."""
    pickles = [f.name for f in sorted(folder.iterdir()) if f.suffix in _PICKLES]
    if not pickles:
        return f"{folder}: no weights here (*.safetensors); is the download complete?"
    name = pickles[0]
    return (
        f"{folder / name}: a pickle, and unpickling can run code; convert it once where you trust it: "
        f'python -c "import torch, safetensors.torch as s; '
        f"s.save_file(torch.load('{name}', map_location='cpu', weights_only=True), '{Path(name).stem}.safetensors')\""
    )


def _names(file: Path) -> Iterator[str]:
    try:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                refuse_quantized(file, name, handle.get_slice(name).get_dtype())
                yield name
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: damaged safetensors file ({error}); download it again") from error


def _cut(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name
