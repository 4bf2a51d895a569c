"""The file format of packed weights: what `NativeDecoder` holds, so that the next start need not pack again.

A preamble of one page, the bytes of every part, and a header in JSON at the end, which the preamble locates. A part is
a few structures and the tensors that they point into; pointers are stored as (object, distance). Pointers to anything
else become null: who restores a part sets them.
"""

import ctypes
import hashlib
import json
import os
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.model.kernels import structures
from foretell.model.kernels.pack import allocate
from foretell.model.kernels.uncached_file import PAGE

FORMAT_VERSION = 1
_MAGIC = b"FORETELL"
_PREAMBLE = struct.Struct("<8sIIQQ32s")
"""Magic, format version, reserved, offset and size of the header, SHA-256 of the header."""
_ALIGN = 64
_PIECE = 8 << 20
"""Bytes that a thread reads at a time."""


class PackedFileError(ValueError):
    """The file is truncated or damaged."""


class PackedPart:
    """Structures and the tensors that they point into."""

    def __init__(self, structs: Sequence[structures.Memory], tensors: Sequence[Tensor]) -> None:
        self.structs, self.tensors = tuple(structs), tuple(tensors)


class PackedWriter:
    """Writes packed parts to an empty file; it is complete after `finish`."""

    def __init__(self, path: Path) -> None:
        # Not truncated: Linux would write such a file to the disk when it is closed.
        self.path, self._file = path, path.open("r+b", buffering=0)
        self._file.write(bytes(PAGE))
        self._offset, self._parts = PAGE, list[Mapping[str, object]]()

    def add(self, part: PackedPart) -> None:
        """Append a part.

        Raises:
            OSError: the disk is full or fails.
        """
        places, total, end = [], 0, 0
        for tensor in part.tensors:
            raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
            self._write(bytes(-end % _ALIGN))
            self._write(raw.data)
            total += checksum(raw)
            end += -end % _ALIGN
            places.append((end, raw.nbytes))
            end += raw.nbytes
        self._write(bytes(-end % PAGE))
        end += -end % PAGE
        self._parts.append(
            {
                "offset": self._offset,
                "bytes": end,
                "sum": total % 2**64,
                "tensors": places,
                "structs": [_describe(s, part) for s in part.structs],
            }
        )
        self._offset += end

    def _write(self, raw: bytes | memoryview) -> None:
        view = memoryview(raw)
        while len(view):
            view = view[self._file.write(view) or 0 :]

    def finish(self, description: Mapping[str, object]) -> None:
        """Write the header, with a description of the whole."""
        header = json.dumps({**description, "parts": self._parts}).encode()
        self._write(header)
        digest = hashlib.sha256(header).digest()
        preamble = _PREAMBLE.pack(_MAGIC, FORMAT_VERSION, 0, self._offset, len(header), digest)
        os.pwrite(self._file.fileno(), preamble, 0)
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def checksum(raw: "np.ndarray[Any, np.dtype[np.uint8]]") -> int:
    """Sum of its 64-bit words: finds pages that never reached the disk."""
    whole = len(raw) // 8 * 8
    words = int(np.add.reduce(raw[:whole].view(np.uint64), dtype=np.uint64)) if whole else 0
    return words + int.from_bytes(raw[whole:].tobytes(), "little")


def _describe(thing: structures.Memory, part: PackedPart) -> Mapping[str, object]:
    objects = [(ctypes.addressof(s), ctypes.sizeof(s)) for s in part.structs]
    objects += [(t.data_ptr(), t.nbytes) for t in part.tensors]
    links = []
    for offset in _pointers(type(thing)):
        value = ctypes.c_void_p.from_address(ctypes.addressof(thing) + offset).value
        targets = (i for i, (start, size) in enumerate(objects) if value and start <= value < start + size)
        target = next(targets, None)
        if target is not None and value is not None:
            links.append((offset, target, value - objects[target][0]))
    kind, count = (type(thing[0]), len(thing)) if isinstance(thing, ctypes.Array) else (type(thing), 0)
    return {"type": kind.__name__, "count": count, "bytes": bytes(thing).hex(), "links": links}


def _pointers(kind: Any, base: int = 0) -> Iterator[int]:
    """Offsets of the pointers in a structure or an array of structures."""
    if issubclass(kind, ctypes.Array):
        for i in range(kind._length_):
            yield from _pointers(kind._type_, base + i * ctypes.sizeof(kind._type_))
        return
    for name, field, *_ in kind._fields_:
        offset = base + getattr(kind, name).offset
        if field is ctypes.c_void_p:
            yield offset
        elif isinstance(field, type) and issubclass(field, ctypes.Structure):
            yield from _pointers(field, offset)


class PackedReader:
    """A complete file of packed parts.

    Raises:
        PackedFileError: the file is truncated or damaged, or of another version of the format.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._file)
        """Closes the file; it is closed with the reader's end, too."""
        try:
            self.header = self._read_header()
            self._parts: list[dict[str, Any]] = self.header["parts"]
            self.nbytes = sum(part["bytes"] for part in self._parts)
        except (struct.error, KeyError, TypeError, ValueError) as error:
            self.close()
            raise PackedFileError(f"{path}: damaged ({error})") from error

    def _read_header(self) -> dict[str, Any]:
        magic, version, _, offset, size, digest = _PREAMBLE.unpack(os.pread(self._file, _PREAMBLE.size, 0))
        if magic != _MAGIC or version != FORMAT_VERSION:
            raise ValueError(f"not packed weights of format {FORMAT_VERSION}")
        if os.fstat(self._file).st_size != offset + size:
            raise ValueError("truncated")
        raw = os.pread(self._file, size, offset)
        if hashlib.sha256(raw).digest() != digest:
            raise ValueError("the header's checksum differs")
        header: dict[str, Any] = json.loads(raw)
        return header

    def __len__(self) -> int:
        """Number of parts."""
        return len(self._parts)

    def read_all(self) -> list[PackedPart]:
        """All parts, in one block of huge pages."""
        return self._read(range(len(self)))

    def read(self, i: int) -> PackedPart:
        """Part `i`."""
        return self._read([i])[0]

    def sizes(self) -> list[int]:
        """Bytes of every part."""
        return [part["bytes"] for part in self._parts]

    def description(self, i: int) -> Mapping[str, Any]:
        """Where part `i` lies, and what is in it."""
        return self._parts[i]

    def _read(self, numbers: Sequence[int]) -> list[PackedPart]:
        parts = [self._parts[i] for i in numbers]
        memory = torch.split(allocate(sum(part["bytes"] for part in parts)), [part["bytes"] for part in parts])
        pieces = [
            (i, at, part["offset"] + at, min(_PIECE, part["bytes"] - at))
            for i, part in enumerate(parts)
            for at in range(0, part["bytes"], _PIECE)
        ]
        arrays = [m.numpy() for m in memory]

        def read_piece(piece: tuple[int, int, int, int]) -> tuple[int, int]:
            i, at, offset, size = piece
            target = arrays[i][at : at + size]
            if os.preadv(self._file, [target.data], offset) != size:
                raise PackedFileError(f"{self.path}: truncated")
            return i, checksum(target)

        totals = [0] * len(parts)
        with ThreadPoolExecutor(max(torch.get_num_threads(), 1)) as pool:
            for i, total in pool.map(read_piece, pieces):
                totals[i] += total
        if any(total % 2**64 != part["sum"] for total, part in zip(totals, parts, strict=True)):
            raise PackedFileError(f"{self.path}: damaged (a part's checksum differs)")
        return [restore(part, m) for part, m in zip(parts, memory, strict=True)]

    def __enter__(self) -> "PackedReader":
        """The reader itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def restore(part: Mapping[str, Any], memory: Tensor) -> PackedPart:
    """A part from its description and its bytes."""
    return restore_tensors(part, [memory[start : start + size] for start, size in part["tensors"]])


def restore_tensors(part: Mapping[str, Any], tensors: Sequence[Tensor]) -> PackedPart:
    """A part from its description and its tensors; what points into an empty tensor is null."""
    single = [getattr(structures, s["type"]) for s in part["structs"]]
    kinds = [k * s["count"] if s["count"] else k for k, s in zip(single, part["structs"], strict=True)]
    made = [k.from_buffer_copy(bytes.fromhex(s["bytes"])) for k, s in zip(kinds, part["structs"], strict=True)]
    starts = [*(ctypes.addressof(s) for s in made), *(t.data_ptr() for t in tensors)]
    for thing, described in zip(made, part["structs"], strict=True):
        links = {offset: starts[target] + distance for offset, target, distance in described["links"]}
        for offset in _pointers(type(thing)):
            ctypes.c_void_p.from_address(ctypes.addressof(thing) + offset).value = links.get(offset)
    return PackedPart(made, tensors)
