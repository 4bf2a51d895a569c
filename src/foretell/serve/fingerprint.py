"""`system_fingerprint`: equal fingerprints and equal requests with a seed give equal answers."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from foretell.model.block.backend import Backend

_SUFFIXES = (".gguf", ".safetensors", ".json")
_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Pieces of a file that its hash includes, spread over it; files of gigabytes are not read whole."""
_DIGITS = 12


def system_fingerprint(path: Path, adapters: Sequence[Path], backend: Backend) -> str:
    """Name of the weights, of their adapters, of the kernels and the arithmetic."""
    weights = "+".join(weights_digest(each) for each in (path, *adapters))
    kernels = "-".join(part for part in (backend.name, backend.instructions, backend.device) if part)
    cache = "" if backend.cache_dtype == "auto" else f"+{backend.cache_dtype}-cache"
    return f"fp_{weights}_{kernels}_{backend.precision}{cache}".replace(" ", "-")


def weights_digest(path: Path) -> str:
    """A hash of the names, the sizes and samples of the files of a model."""
    digest = hashlib.sha256()
    for file in _files(path):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with file.open("rb") as data:
            for i in range(_SAMPLES):
                data.seek(size * i // _SAMPLES)
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:_DIGITS]


def file_bytes(path: Path) -> int:
    """Size of the files of a model."""
    return sum(file.stat().st_size for file in _files(path))


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in _SUFFIXES)
