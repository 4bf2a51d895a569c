"""Maps safetensors files: tensors are views, whose pages can be returned to the system at any time."""

import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from foretell.model.matrices.mapped_file import MappedFile, what_is_missing

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "U32": torch.uint32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The readable types, by their names in the file."""
_SIZE = struct.Struct("<Q")
"""Size of the header, at the start of a file."""
_MOST_HEADER, _MOST_BYTES = 100_000_000, 1 << 40
"""The first is the limit of safetensors. More is no file of a model but damage."""


def what_is_wrong(path: Path, error: Exception) -> str:
    """A sentence on a file that cannot be opened: it is missing, not complete, or damaged."""
    if not path.is_file():
        return f"{path}: missing safetensors file; download it again"
    with path.open("rb") as file:
        head, size = file.read(_SIZE.size), path.stat().st_size
        header = _SIZE.unpack(head)[0] if len(head) == _SIZE.size else 0
        if head == b"version ":
            return f"{path}: not a safetensors file but a pointer of Git LFS that stands for it: run `git lfs pull`"
        with suppress(ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
            if header > _MOST_HEADER:
                raise ValueError
            end = 0
            if _SIZE.size + header <= size:
                entries = json.loads(file.read(header))
                end = max(e["data_offsets"][1] for name, e in entries.items() if name != "__metadata__")
            if size < _SIZE.size + header + end < _MOST_BYTES:
                return what_is_missing(path, f"the safetensors file has {size:,} bytes and says that more follow")
    return f"{path}: damaged safetensors file ({error}); download it again"


class _Place(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class SafetensorsFile:
    """A safetensors file.

    Raises:
        ValueError: it is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="np"):  # checks the header
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(what_is_wrong(path, error)) from error
        self.mapped = MappedFile(path)
        (size,) = _SIZE.unpack_from(self.mapped)
        first = _SIZE.size + size
        header = json.loads(self.mapped[_SIZE.size : first])
        self.writer = str(header.get("__metadata__", {}).get("format", ""))
        """What wrote the file, by its own word, such as `pt` and `mlx`."""
        self._places = {
            name: _Place(entry["dtype"], tuple(entry["shape"]), first + start, end - start)
            for name, entry in header.items()
            if name != "__metadata__"
            for start, end in [entry["data_offsets"]]
        }

    @property
    def dtypes(self) -> Mapping[str, str]:
        """The types of all tensors, as the file names them."""
        return {name: place.dtype for name, place in self._places.items()}

    def sizes(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Type, shape and bytes of every tensor."""
        return [(place.dtype, place.shape, place.bytes) for place in self._places.values()]

    def tensor(self, name: str) -> Shaped[torch.Tensor, "*shape"]:
        """A view of a tensor.

        Raises:
            ValueError: its type is none that torch has.
        """
        dtype, shape, offset, _ = self._places[name]
        if dtype not in _DTYPES:
            raise ValueError(f"{self.path}: {name} is of type {dtype}, which is not supported")
        if 0 in shape:
            return torch.empty(shape, dtype=_DTYPES[dtype])
        return torch.frombuffer(self.mapped, dtype=_DTYPES[dtype], count=prod(shape), offset=offset).view(shape)
