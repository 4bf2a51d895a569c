"""Reads the headers of GGUF files: metadata and places of tensors, without torch, since to read them takes less time
than to import it. The `gguf` package's reader takes seconds for a large vocabulary.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from foretell.model.config.families import family_of
from foretell.model.config.families.base import GGUF_NAMES
from foretell.model.config.model import ModelConfig
from foretell.model.config.readers.gguf import from_gguf
from foretell.model.matrices.kinds import BLOCKS, Kind
from foretell.model.matrices.mapped_file import MappedFile, what_is_missing

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_BYTES, _MOST_AXES = 1 << 40, 8
"""Of a tensor or a list. More are no file of a model but damage, where a file that lacks fewer was cut short."""
_LEAST_TENSOR_BYTES, _LEAST_KEY_BYTES = 24, 13
KIND_OF_TYPE: Mapping[int, Kind] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16", 39: "MXFP4",
}  # fmt: skip
"""The known storage types by their numbers in the file; the `gguf` package, which takes time to import, knows more."""


def block_size(ggml_type: int) -> tuple[int, int]:
    """Numbers and bytes of a block.

    Raises:
        ValueError: an unknown type.
    """
    if ggml_type in KIND_OF_TYPE:
        return BLOCKS[KIND_OF_TYPE[ggml_type]]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block: tuple[int, int] = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    return block


def kind_name(ggml_type: int) -> str:
    """Name of a storage type, or its number where no one knows it."""
    if ggml_type in KIND_OF_TYPE:
        return KIND_OF_TYPE[ggml_type]
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(ggml_type).name if ggml_type in list(GGMLQuantizationType) else str(ggml_type)


@dataclass(frozen=True)
class TensorInfo:
    """Location and storage type of a tensor in the file; `shape` in torch's order, outermost first."""

    shape: tuple[int, ...]
    ggml_type: int
    """A `GGMLQuantizationType`."""
    offset: int
    part: int = 0
    """Which of the files it is in."""


class _CutShortError(Exception):
    """The file ends inside its header."""


class _Cursor:
    """Reads consecutive little-endian values; nothing is allocated that the rest of the file cannot hold."""

    def __init__(self, data: MappedFile) -> None:
        self.data, self.position = data, 0

    def require(self, size: int) -> None:
        """Check that so many bytes follow."""
        if size > _MOST_BYTES:
            raise ValueError(f"it asks for {size:.1e} bytes")
        if self.position + size > len(self.data):
            raise _CutShortError

    def scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        self.require(size)
        self.position += size
        return struct.unpack_from("<" + code, self.data, self.position - size)[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Consecutive strings; a vocabulary has many."""
        self.require(8 * count)
        data, position, end, size_of = self.data, self.position, len(self.data), struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            first = position + 8
            if first > end:
                raise _CutShortError
            position = first + size_of(data, position)[0]
            if position > end:
                self.position = first
                self.require(position - first)
            texts.append(data[first:position].decode("utf-8", errors="replace"))
        self.position = position
        return texts

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, size = self.scalar("I"), self.scalar("Q")
        if inner == _STRING:
            return self.strings(size)
        if inner not in _SCALARS:
            raise ValueError("an array of arrays, or of an unknown type")
        form, width = f"<{size}{_SCALARS[inner]}", size * struct.calcsize(_SCALARS[inner])
        self.require(width)
        self.position += width
        return list(struct.unpack_from(form, self.data, self.position - width))


class GGUFHeader:
    """The header of a GGUF file (versions 2 and 3), or of one that is split in parts, by its first: metadata by key,
    tensors by name.

    Raises:
        ValueError: the file is not a GGUF file, cut short or damaged, or a part is missing or of another file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, _parts(path, 1)
        self.mapped = list[MappedFile]()
        self.metadata, self.tensors = self._open(path, 0)
        count = self.metadata.get("split.count", 0)
        if not isinstance(count, int) or count < 2:
            return
        self.files, tensors = _parts(path, count), dict(self.tensors)
        for part, file in enumerate(self.files[1:], 1):
            metadata, more = self._open(file, part)
            if more.keys() & tensors.keys() or metadata.get("split.count", count) != count:
                raise ValueError(f"{file}: a part of another split GGUF file than {path}; download it again")
            tensors |= more
        self.tensors, total = tensors, self.metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise ValueError(
                f"{path}: the file in {count} parts should have {total} tensors and has {len(tensors)}; its parts are "
                "of different files: download them again"
            )

    def _open(self, path: Path, part: int) -> tuple[Mapping[str, Any], Mapping[str, TensorInfo]]:
        """Map one of the files; its metadata and its tensors."""
        size = path.stat().st_size
        if size < 24:
            raise ValueError(f"{path}: not a GGUF file ({size} bytes); is the download complete?")
        data = MappedFile(path)
        self.mapped.append(data)
        cursor = _Cursor(data)
        if data[:4] != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file ({_what_begins_with(bytes(data[:64]))})")
        try:
            metadata, tensors = self._read(cursor, part)
        except _CutShortError:
            missing = f"the GGUF file ends inside its header, after {size:,} bytes"
            raise ValueError(what_is_missing(path, missing)) from None
        except (struct.error, KeyError, ValueError, ZeroDivisionError, OverflowError, MemoryError) as error:
            raise ValueError(
                f"{path}: damaged GGUF file near byte {cursor.position} of {size}: {error}; download it again"
            ) from error
        number = metadata.get("split.no", part)
        if number != part:
            raise ValueError(
                f"{path}: part {part + 1} of a split GGUF file is needed here, and this is part {number + 1}; name "
                "the first part, which ends in -00001-of- and their number"
            )
        self._check(path, size, tensors, metadata)
        return metadata, tensors

    def _read(self, cursor: _Cursor, part: int) -> tuple[Mapping[str, Any], Mapping[str, TensorInfo]]:
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported")
        tensors, keys = cursor.scalar("Q"), cursor.scalar("Q")
        cursor.require(_LEAST_TENSOR_BYTES * tensors + _LEAST_KEY_BYTES * keys)
        meta = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(keys)}
        places = {}
        for _ in range(tensors):
            name, axes = cursor.string(), cursor.scalar("I")
            if axes > _MOST_AXES:
                raise ValueError(f"the tensor {name[:64]!r} has {axes} axes")
            shape = [cursor.scalar("Q") for _ in range(axes)]
            places[name] = TensorInfo(tuple(reversed(shape)), cursor.scalar("I"), cursor.scalar("Q"))
        align = int(meta.get("general.alignment", 32))
        base = -(-cursor.position // align) * align
        return meta, {n: TensorInfo(e.shape, e.ggml_type, base + e.offset, part) for n, e in places.items()}

    def _check(self, path: Path, size: int, tensors: Mapping[str, TensorInfo], meta: Mapping[str, Any]) -> None:
        """Check the places of the tensors of one of the files: one behind the other, as llama.cpp demands."""
        end, align = 0, int(meta.get("general.alignment", 32))
        for name, e in sorted(tensors.items(), key=lambda item: item[1].offset):
            self._check_type(name, e)
            if self.byte_count(e) > _MOST_BYTES:
                raise ValueError(
                    f"{path}: damaged GGUF file: the tensor {name} has {prod(e.shape):.1e} numbers; download it again"
                )
            if end and e.offset != -(-end // align) * align:
                raise ValueError(
                    f"{path}: damaged GGUF file: the tensor {name} begins at byte {e.offset} and the one before it "
                    f"ends at byte {end}; download it again"
                )
            end = e.offset + self.byte_count(e)
        if end > size:
            missing = f"the GGUF file has {end:,} bytes by its header, and {size:,} are here"
            raise ValueError(what_is_missing(path, missing))

    def _check_type(self, name: str, e: TensorInfo) -> None:
        try:
            per_block, _ = block_size(e.ggml_type)
        except (KeyError, ValueError) as error:
            raise self._unsupported(name, e) from error
        if e.shape and e.shape[-1] % per_block:
            raise ValueError(
                f"{self.path}: rows of {e.shape[-1]} numbers in the tensor {name} are no whole blocks of {per_block}, "
                f"as its type {kind_name(e.ggml_type)} needs; download it again"
            )

    def _unsupported(self, name: str, e: TensorInfo) -> ValueError:
        return ValueError(
            f"{self.path}: the tensor {name} has the type {kind_name(e.ggml_type)}, which is not supported; take a "
            f"file of {', '.join(KIND_OF_TYPE.values())}"
        )

    @staticmethod
    def byte_count(e: TensorInfo) -> int:
        """Bytes that a tensor takes in the file."""
        per_block, block_bytes = block_size(e.ggml_type)
        return int(prod(e.shape) // per_block * block_bytes)

    def floats(self, name: str) -> list[float]:
        """The numbers of a small tensor of float32.

        Raises:
            ValueError: it is of another type.
        """
        e = self.tensors[name]
        if KIND_OF_TYPE.get(e.ggml_type) != "F32":
            raise ValueError(f"{self.path}: the tensor {name} should be F32, found {kind_name(e.ggml_type)}")
        numbers: list[float] = np.frombuffer(self.mapped[e.part], np.float32, prod(e.shape), e.offset).tolist()
        return numbers


_PART = re.compile(r"-00001-of-(\d{5})(\.gguf)", re.IGNORECASE)
"""How the name of the first part of a split file ends."""


def _parts(path: Path, count: int) -> list[Path]:
    """The files of a file that is split in `count` parts, of which `path` is the first."""
    if count < 2:
        return [path]
    match = _PART.search(path.name)
    if match is None or int(match[1]) != count:
        raise ValueError(
            f"{path}: the first of {count} parts of a split GGUF file, and its name does not end in "
            f"-00001-of-{count:05}.gguf, by which the others are known; give the parts their own names again"
        )
    files = [
        path.with_name(f"{path.name[: match.start()]}-{i:05}-of-{match[1]}{match[2]}") for i in range(1, count + 1)
    ]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise ValueError(f"{missing}: a part of a split GGUF file is not here; download it, too")
    return files


def _what_begins_with(head: bytes) -> str:
    """What a file is that begins so, as far as that says why it is no GGUF file."""
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS that stands for it: run `git lfs pull`"
    if not any(head):
        return "it begins with zeros: a download has not written its beginning yet"
    return f"it starts with {head[:4]!r}"


_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
ROPE_FACTORS = "rope_freqs", "rope_factors_short", "rope_factors_long"
"""Tensors that are a part of the configuration."""


OUTER_NAMES = (
    "token_embd.weight", "output.weight", "per_layer_token_embd.weight", "per_layer_model_proj.weight",
    "per_layer_proj_norm.weight",
)  # fmt: skip
"""Tensors outside the blocks, beside the final norm."""


def unread_tensors(file: GGUFHeader, config: ModelConfig) -> list[str]:
    """The tensors of a GGUF file that no part of its family is called. `GGUFWeights` asks more: that the blocks of this
    very configuration have them. Layers behind the model's own are those of multi-token prediction.
    """
    family, kind = family_of(config.architecture), str(file.metadata["general.architecture"])
    rows = (part.name for of in family.gguf_rows.values() for part in of(config, kind) or ())
    joined = (name.removesuffix(".weight") for names, _ in family.gguf_joined.values() for name in names)
    modules = {*GGUF_NAMES.values(), *family.gguf_names.values(), *rows, *joined}
    norm = family.gguf_names.get(family.final_norm, "output_norm")
    outer = {*OUTER_NAMES, f"{norm}.weight", *(f"{name}.weight" for name in ROPE_FACTORS)}

    def is_read(name: str) -> bool:
        block = _BLOCK.fullmatch(name)
        if block is None:
            return re.sub(r"(input_)?scale$", "weight", name) in outer
        module = block[2].rpartition(".")[0]
        if block[2].startswith(family.unread):
            return True
        return int(block[1]) >= config.layers or block[2] in modules or module in modules

    return [name for name in file.tensors if not is_read(name)]


def holds_prediction_alone(file: GGUFHeader) -> bool:
    """Whether its only layers are those of multi-token prediction, as in the files `mtp-*.gguf` of llama.cpp's
    converter, which have the embedding, the final norm and the head beside them.
    """
    kind = file.metadata.get("general.architecture")
    count, further = (file.metadata.get(f"{kind}.{key}", 0) for key in ("block_count", "nextn_predict_layers"))
    layers = [int(block[1]) for block in map(_BLOCK.fullmatch, file.tensors) if block]
    return bool(layers and further) and min(layers) >= count - further


def check_model(file: GGUFHeader) -> None:
    """Check that a file has the layers of a model.

    Raises:
        ValueError: it has its layer of multi-token prediction alone.
    """
    if holds_prediction_alone(file):
        raise ValueError(
            f"{file.path}: the file has the layer of multi-token prediction of a model alone; name the model's file "
            "with --model, and this one with --method mtp --draft-model"
        )


def gguf_config(file: GGUFHeader) -> ModelConfig:
    """The configuration of the model in a GGUF file.

    Raises:
        ValueError: see `from_gguf`.
    """
    factors = {name: file.floats(f"{name}.weight") for name in ROPE_FACTORS if f"{name}.weight" in file.tensors}
    return from_gguf(file.metadata, str(file.path), factors, file.tensors)
