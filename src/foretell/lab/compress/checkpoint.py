"""Writes a compressed model: the tensors of its blocks, and what is around these."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float

from foretell.lab.compress.slicing import rotate_rows, slice_block, sliced_config, sliced_norm
from foretell.lab.quantize.directory import CheckpointDirectory
from foretell.lab.quantize.job import Source
from foretell.lab.quantize.layout import block_tensors
from foretell.load import open_checkpoint
from foretell.model.block.layer import DecoderBlock
from foretell.model.block.linear import Linear
from foretell.model.block.rope import RopeTables
from foretell.model.config.model import ModelConfig
from foretell.model.config.readers.compressed import compressed_keys
from foretell.model.load.build import build_block
from foretell.model.load.weights import EMBEDDING, FINAL_NORM, HEAD
from foretell.utils.validation import read_json

Tensor = torch.Tensor
ChangedBlocks = Callable[[int], Mapping[str, Tensor] | None]
"""The tensors of a block, by its index in the source; None: it stays as it is."""
_CPU = torch.device("cpu")
_FIRST_BASIS, _LAST_BASIS = "basis.first", "basis.last"
"""Bases of a sliced stream, kept with its first and its last block until they are written."""


def unchanged(i: int) -> None:
    """No block is changed."""


def tensors_of(config: ModelConfig, i: int, block: DecoderBlock) -> dict[str, Tensor]:
    """The tensors of a block that becomes block `i`."""
    tensors = {}
    for name, tensor in block_tensors(config, i, block, {}):
        assert isinstance(tensor, Tensor)
        tensors[name] = tensor.float()
    return tensors


def slice_tensors(
    config: ModelConfig, ropes: tuple[RopeTables, RopeTables], i: int, block: DecoderBlock, x: Tensor, width: int
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of block `i`, sliced to `width`, with the bases before the first and after the last, and its output
    before it was sliced.
    """
    sliced = slice_block(config, ropes, i, block, x, width)
    tensors = tensors_of(sliced_config(config, width), i, sliced.block)
    if i == 0:
        tensors[_FIRST_BASIS] = sliced.before
    if i == config.layers - 1:
        tensors[_LAST_BASIS] = sliced.after
    return tensors, sliced.output


def write_checkpoint(source: Source, config: ModelConfig, kept: list[int], changed: ChangedBlocks, part: Path) -> None:
    """Write the model of a configuration, which has the blocks `kept` of the source."""
    dtype = dtype_of(source)
    folder = source.folder
    raw = {} if folder is None else read_json(folder / "config.json")
    further = _further_keys(source.config, config, raw, kept, str(dtype).removeprefix("torch."))
    directory = CheckpointDirectory(part, config, dtype, folder, source.codec, further)
    for key, tensor in _tensors(source, kept, changed):
        directory.add(key, tensor)
    directory.finish()


def _further_keys(
    old: ModelConfig, new: ModelConfig, raw: Mapping[str, Any], kept: list[int], dtype: str
) -> dict[str, Any]:
    """What the configuration says that the source's does not."""
    keys: dict[str, Any] = {"torch_dtype": dtype, "num_hidden_layers": len(kept)}
    keys |= {"dtype": dtype} if "dtype" in raw else {}
    keys |= {
        key: [value[i] for i in kept]
        for key, value in raw.items()
        if isinstance(value, list) and key.startswith("layer") and len(value) == old.layers
    }
    if (new.kv_heads, new.ffn) != (old.kv_heads, old.ffn):
        keys |= {"num_attention_heads": new.heads, "num_key_value_heads": new.kv_heads, "head_dim": new.head_dim}
        keys["intermediate_size"] = new.ffn
    if new.shortcuts:
        keys |= {"hidden_size": new.hidden, "head_dim": new.head_dim, "rms_norm_eps": new.norm_eps}
        keys["tie_word_embeddings"] = False
    return keys | compressed_keys(old.architecture, new.low_rank, new.shortcuts)


def _tensors(source: Source, kept: list[int], changed: ChangedBlocks) -> Iterator[tuple[str, Float[Tensor, "*shape"]]]:
    c, weights = source.config, source.weights
    embedding = weights.require(EMBEDDING, c.vocab, c.hidden)
    norm = weights.require(FINAL_NORM, c.hidden).float() + c.norm_offset
    head = None if c.tied else weights.head(c.vocab, c.hidden)
    first = (changed(kept[0]) or {}).get(_FIRST_BASIS)
    yield EMBEDDING, embedding if first is None else rotate_rows(embedding, first)
    for new, old in enumerate(kept):
        tensors = changed(old)
        if tensors is None:
            tensors = tensors_of(c, new, build_block(c, old, weights, torch.float32, _CPU))
        yield from ((name, tensor) for name, tensor in tensors.items() if not name.startswith("basis."))
        weights.release_pages()
    last = (changed(kept[-1]) or {}).get(_LAST_BASIS)
    if last is not None:
        head = rotate_rows(embedding if head is None else head, last, norm)
        norm = sliced_norm(c, last.shape[1]).weight.data
    yield FINAL_NORM, norm
    if head is not None:
        yield HEAD, head


def dtype_of(source: Source) -> torch.dtype:
    """Dtype of the checkpoint: float32 of a float32 source, else bfloat16."""
    return torch.float32 if source.weights.storage == "float32" else torch.bfloat16


def share_of_zeros(path: Path) -> float:
    """Share of the numbers of the blocks' matrices that are zero."""
    config, weights, _, _ = open_checkpoint(path)
    zeros = total = 0
    for i in range(config.layers):
        block = build_block(config, i, weights, torch.float32, _CPU)
        for linear in block.modules():
            if isinstance(linear, Linear):
                zeros += int((linear.weight == 0).sum())
                total += linear.weight.numel()
    return zeros / total
