"""Writes a quantised model as a GGUF file, tensor after tensor."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from foretell.lab.quantize.gguf_grids import GGUFGrid
from foretell.lab.quantize.gguf_metadata import write_metadata
from foretell.lab.quantize.grid import QuantizedRows
from foretell.lab.quantize.layout import TensorEntry, entries
from foretell.model.config.model import ModelConfig
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_sizes import copy_metadata
from foretell.model.load.gguf_weights import gguf_place
from foretell.model.matrices.kinds import BLOCKS, Kind
from foretell.tokenizer.codec import TextCodec

_FREQUENCIES = "rope_freqs.weight"
_FILE_TYPES: Mapping[str, str] = {"Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S"}
"""Names of file types that differ from those of their matrices."""


class GGUFFile:
    """A GGUF file that is being written; tensors come in the order of `entries`.

    `source`: the GGUF file whose metadata is copied, or None, then they are made from `config` and `codec`.

    Raises:
        ValueError: the model or its tokenizer cannot be described in GGUF.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        grid_of: Callable[[TensorEntry], GGUFGrid],
        kind: str,
        source: GGUF | None,
        codec: TextCodec,
        eos: Sequence[int],
        name: str,
    ) -> None:
        from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

        architecture = gguf_architecture(config)
        self._config, self._permute, self._grid_of = config, architecture == "llama", grid_of
        self._writer = GGUFWriter(path, architecture)
        self._expected = {gguf_place(e.name, config)[0]: e for e in entries(config)}
        divisors: Sequence[float] = ()
        if source is None:
            divisors = write_metadata(self._writer, config, codec, eos, name)
        else:
            _require_known(source, self._expected)
            copy_metadata(self._writer, source, "general.file_type", "general.quantization_version")
            if _FREQUENCIES in source.tensors:
                divisors = source.load_tensor(_FREQUENCIES).flatten().tolist()
        self._writer.add_file_type(LlamaFileType[f"MOSTLY_{_FILE_TYPES.get(kind, kind)}"])
        self._writer.add_quantization_version(2)
        if divisors:
            self._writer.add_tensor_info(_FREQUENCIES, [len(divisors)], np.dtype(np.float32), 4 * len(divisors))
        for stored, entry in self._expected.items():
            if len(entry.shape) == 1:
                self._writer.add_tensor_info(stored, entry.shape, np.dtype(np.float32), 4 * entry.shape[0])
                continue
            grid = self._grid_of(entry)
            per_block, size = BLOCKS[grid.kind]
            shape = [entry.shape[0], entry.shape[1] // per_block * size]
            self._writer.add_tensor_info(
                stored, shape, np.dtype(np.uint8), shape[0] * shape[1], GGMLQuantizationType[grid.kind]
            )
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()
        if divisors:
            self._writer.write_tensor_data(np.array(divisors, np.float32))
        self._order = iter(self._expected.values())

    def add(self, name: str, tensor: QuantizedRows | Float[torch.Tensor, "*shape"]) -> None:
        """Write the next tensor."""
        entry = next(self._order)
        assert entry.name == name, f"{entry.name} was expected, found {name}"
        permuted = self._permute and name.split(".")[-2] in ("q_proj", "k_proj")
        if isinstance(tensor, QuantizedRows):
            grid = self._grid_of(entry)
            data = grid.stored(tensor).data
            self._writer.write_tensor_data(np.ascontiguousarray((self._interleave(data) if permuted else data).numpy()))
        else:
            values = self._interleave(tensor) if permuted else tensor
            self._writer.write_tensor_data(np.ascontiguousarray(values.float().numpy()))

    def _interleave(self, rows: torch.Tensor) -> torch.Tensor:
        """llama.cpp's order of rows: rotary pairs side by side."""
        half = self._config.head_dim // 2
        return rows.view(-1, 2, half, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()

    def abandon(self) -> None:
        """Close what was written so far."""
        self._writer.close()


def gguf_architecture(config: ModelConfig) -> str:
    """The architecture's name in GGUF."""
    return {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.architecture, config.architecture)


def _require_known(source: GGUF, expected: Mapping[str, Any]) -> None:
    """Refuse a file with a tensor that would not be written."""
    unknown = next((n for n in source.tensors if n not in expected and n != _FREQUENCIES), None)
    if unknown is not None:
        raise ValueError(f"{source.path}: the tensor {unknown} is not known, and the new file would lack it")


def embedding_kind(kind: Kind) -> Kind:
    """Type of embedding and head beside matrices of a type: more bits, as llama.cpp gives them."""
    return "Q8_0" if kind != "Q6_K" else "Q6_K"
