"""Writes a model as a directory of safetensors, a quantised one in compressed-tensors' format pack-quantized."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, Int32
from safetensors.torch import save_file

from foretell.lab.quantize.grid import QuantizedRows
from foretell.lab.quantize.integer_grid import IntegerGrid
from foretell.model.config.model import ModelConfig
from foretell.model.config.readers.compressed import COMPRESSED_BY
from foretell.speculator.hf_writer import llama_config, write_codec
from foretell.tokenizer.codec import TextCodec
from foretell.utils.validation import read_json

Tensor = torch.Tensor
_SHARD_BYTES = 2 << 30
_WORD = 32
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def written_config(source: Path | None, config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The configuration of a directory that is written: that of the directory `source`, or made from `config`. Ask for
    it before hours of work, to learn whether there is one.

    Raises:
        ValueError: the model is multimodal, or there is no source and it cannot be described as a Llama model.
    """
    raw = llama_config(config, dtype) if source is None else read_json(source / "config.json")
    if "text_config" in raw:
        raise ValueError(f"{source}: a multimodal model; give a directory of its language model alone")
    return raw


class CheckpointDirectory:
    """A directory that is being written.

    `source`: the directory whose configuration and tokenizer are copied, or None, then they are made from `config` and
    `codec`. `further`: keys that are set in the configuration.

    Raises:
        ValueError: as `written_config`.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        source: Path | None,
        codec: TextCodec,
        further: Mapping[str, Any],
    ) -> None:
        self._path, self._offset, self._dtype = path, config.norm_offset, dtype
        raw = written_config(source, config, dtype)
        for key in ("compression_config", "quantization_config", COMPRESSED_BY):
            raw.pop(key, None)
        raw.update(further)
        path.mkdir()
        (path / "config.json").write_text(json.dumps(raw, indent=2) + "\n", "utf-8")
        if source is None:
            write_codec(path, codec)
        for name in _COPIED if source is not None else ():
            if (source / name).is_file():  # type: ignore[operator]
                shutil.copyfile(source / name, path / name)  # type: ignore[operator]
        self._tensors: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._bytes = 0

    def add(self, name: str, tensor: QuantizedRows | Float[Tensor, "*shape"]) -> None:
        """Add a tensor; a full shard is written."""
        self._tensors |= self._stored(name, tensor)
        if sum(t.nbytes for t in self._tensors.values()) >= _SHARD_BYTES:
            self._write_shard()

    def _stored(self, name: str, tensor: QuantizedRows | Float[Tensor, "*shape"]) -> dict[str, Tensor]:
        """The tensors of the file: of a norm without the offset of its architecture."""
        assert isinstance(tensor, Tensor)
        norm = name.endswith("norm.weight")
        return {name: (tensor - self._offset if norm else tensor).to(self._dtype).contiguous()}

    def _write_shard(self) -> None:
        save_file(self._tensors, self._path / f"{len(self._shards)}.part", {"format": "pt"})
        self._bytes += sum(t.nbytes for t in self._tensors.values())
        self._shards.append(list(self._tensors))
        self._tensors = {}

    def finish(self) -> None:
        """Write the last shard and the index."""
        if self._tensors:
            self._write_shard()
        count = len(self._shards)
        if count == 1:
            (self._path / "0.part").rename(self._path / "model.safetensors")
            return
        places: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self._path / f"{i}.part").rename(self._path / file)
            places |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": places}
        (self._path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")

    def abandon(self) -> None:
        """Nothing is open."""


class QuantizedDirectory(CheckpointDirectory):
    """A directory with packed matrices; for the arguments see `CheckpointDirectory`."""

    def __init__(
        self, path: Path, config: ModelConfig, grid: IntegerGrid, source: Path | None, codec: TextCodec
    ) -> None:
        super().__init__(path, config, grid.dtype, source, codec, {"quantization_config": _quantization_config(grid)})

    def _stored(self, name: str, tensor: QuantizedRows | Float[Tensor, "*shape"]) -> dict[str, Tensor]:
        if isinstance(tensor, QuantizedRows):
            return packed_tensors(name.removesuffix(".weight"), tensor)
        return super()._stored(name, tensor)


def _quantization_config(grid: IntegerGrid) -> dict[str, Any]:
    weights = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": grid.symmetric,
        "strategy": "group",
        "group_size": grid.block,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def packed_tensors(module: str, quantized: QuantizedRows) -> dict[str, Tensor]:
    """The tensors of a module in the layout `pack-quantized`."""
    grid, (scale, zero) = quantized.grid, quantized.parameters.fields
    assert isinstance(grid, IntegerGrid)
    tensors = {
        "weight_packed": pack_words(quantized.level.int() - grid.low, grid.bits),
        "weight_scale": scale.contiguous(),
        "weight_shape": torch.tensor(quantized.level.shape),
    }
    if not grid.symmetric:
        tensors["weight_zero_point"] = pack_words(zero.T - grid.low, grid.bits).T.contiguous()
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def pack_words(fields: Int[Tensor, "r n"], bits: int) -> Int32[Tensor, "r w"]:
    """Rows of fields of 4 or 8 bits as 32-bit words, the first field lowest."""
    per_word = _WORD // bits
    padded = torch.nn.functional.pad(fields.to(torch.int64), (0, -fields.shape[1] % per_word))
    words = (padded.view(len(padded), -1, per_word) << torch.arange(0, _WORD, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
