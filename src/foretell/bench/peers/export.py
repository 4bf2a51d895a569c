"""Convert a GGUF file to other precisions, so that llama.cpp runs the weights that are measured."""

import os
from hashlib import sha256
from pathlib import Path

from foretell.model.load.reference import resolve_reference
from foretell.utils.unfinished import part_of, put_in_place, remove

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
    state = source.stat()
    key = sha256(f"{source.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
    path = folder / f"{source.stem}-{key}-{precision}.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        part = part_of(path)
        try:
            _write(source, part, precision)
            put_in_place(part, path)
        finally:
            remove(part)
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
