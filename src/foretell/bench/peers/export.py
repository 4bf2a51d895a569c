"""Convert a GGUF file to other precisions, or to a directory, so that peers run the weights that are measured."""

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch

from foretell.load import open_checkpoint
from foretell.model.load.build import build_decoder
from foretell.model.load.gguf_sizes import write_whole
from foretell.model.load.reference import resolve_reference
from foretell.speculator.hf_writer import write_hf
from foretell.utils.unfinished import whole

PRECISIONS = ("bf16", "q8_0", "q4_0")
"""Formats of the matrices. With q4_0 the embedding and the head are q8_0, as in llama.cpp's own small models."""
_BLOCK = 32
"""Values of a quantised block; a matrix whose rows are no multiple of it stays BF16."""


def default_folder() -> Path:
    """Default folder for converted files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretell" / "gguf"


def export(reference: str, precision: str, folder: Path) -> Path:
    """The GGUF file of this model in this precision, converted at the first call.

    Raises:
        ValueError: the model is not a GGUF file.
    """
    source = resolve_reference(reference)
    if source.is_dir():
        raise ValueError(
            f"{reference}: the peer llama.cpp reads GGUF files; give one, or convert the directory with llama.cpp's "
            f"converter first"
        )
    path = folder / f"{name_of(source)}-{precision}.gguf"
    return _made_once(path, lambda part: _write(source, part, precision))


def as_directory(reference: str, folder: Path) -> Path:
    """The directory of this model; of a GGUF file one in bfloat16, written at the first call.

    Raises:
        ValueError: the GGUF file has another architecture than Llama's.
    """
    source = resolve_reference(reference)
    if source.is_dir():
        return source
    opened = open_checkpoint(source)

    def write(part: Path) -> None:
        decoder = build_decoder(opened.config, opened.weights, torch.bfloat16, torch.device("cpu"))
        write_hf(part, decoder, opened.read_codec())

    return _made_once(folder / f"{name_of(source)}-hf", write)


def name_of(source: Path) -> str:
    """The name of a file, and that of its state."""
    state = source.stat()
    key = sha256(f"{source.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
    return f"{source.stem}-{key}"


def _made_once(path: Path, write: Callable[[Path], None]) -> Path:
    """This file or directory, written where it is not there."""
    if not path.exists():
        with whole(path) as part:
            write(part)
    return path


def _write(source: Path, target: Path, precision: str) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    architecture = reader.get_field("general.architecture")
    writer = GGUFWriter(target, architecture.contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
            continue
        wide = precision == "q4_0" and tensor.name in ("token_embd.weight", "output.weight")
        kind = GGMLQuantizationType["Q8_0" if wide else precision.upper()]
        if values.shape[-1] % _BLOCK:
            kind = GGMLQuantizationType.BF16
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    write_whole(writer)
