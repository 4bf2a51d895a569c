"""Writes the layers of multi-token prediction of a checkpoint as a GGUF file of their own, with the names and the
metadata of llama.cpp's converter (`--mtp`).
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from foretell.model.block.weights import names_of
from foretell.model.config.families import family_of
from foretell.model.config.families.base import PredictionNames
from foretell.model.config.model import ModelConfig
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import gguf_config
from foretell.model.load.gguf_sizes import copy_metadata, write_whole
from foretell.model.load.gguf_weights import gguf_place
from foretell.model.load.mtp import prediction_config, prediction_modules
from foretell.model.load.weights import Weights

Tensor = torch.Tensor
_KINDS = {
    "glm4_moe": "glm4moe", "glm4_moe_lite": "deepseek2", "deepseek_v3": "deepseek2", "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
"""Architectures in GGUF by those of directories. The layers of others (GLM-5, DeepSeek-V3.2) have tensors that choose
tokens, which are not read here.
"""
_PARTS = {
    "combine": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head_norm",
}  # fmt: skip
_COPIES = {"embed_tokens": "embed_tokens", "shared_head.head": "shared_head_head"}
"""The target's embedding and head in the layer, which DeepSeek and GLM publish again."""
_SIZES = {
    "hidden": "the width", "layers": "the number of layers", "vocab": "the size of the vocabulary",
    "heads": "the number of heads", "kv_heads": "the number of heads of keys", "head_dim": "the width of heads",
    "latent": "the form of its latent attention",
}  # fmt: skip
_KEYS_VALUES = "self_attn.kv_b_proj.weight"
_ROUTERS = (".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight")
"""Matrices in float32."""


def write_prediction(config: ModelConfig, weights: Weights, target: Path, path: Path, dtype: torch.dtype) -> int:
    """Write the layers of a checkpoint; their number. Metadata and the tensors outside blocks (embedding, final norm,
    head) are those of the GGUF file `target` of the same model; `dtype`: of the layers' matrices.

    Raises:
        ValueError: the checkpoint has no such layer, its kind is not written, or the file is of another model.
    """
    from gguf import GGMLQuantizationType as Type
    from gguf import GGUFWriter

    file = GGUF(target)
    kind, own, modules = _checked(config, weights, file)
    writer = GGUFWriter(path, kind)
    copy_metadata(writer, file, f"{kind}.block_count", f"{kind}.nextn_predict_layers")
    writer.add_block_count(config.layers + len(modules))
    writer.add_nextn_predict_layers(len(modules))
    for name, info in file.tensors.items():
        if not name.startswith("blk."):
            writer.add_tensor(name, file.stored_rows(name), raw_dtype=Type(info.ggml_type))
    split = any(name.endswith(".attn_k_b.weight") for name in file.tensors)
    layers = (_layer(config, own, weights, names, config.layers + k, split) for k, names in enumerate(modules))
    for name, tensor in chain.from_iterable(layers):
        if tensor.ndim < 2 or dtype == torch.float32 or name.endswith(_ROUTERS):
            wide = tensor.float() + (config.norm_offset if name.endswith("norm.weight") else 0)
            writer.add_tensor(name, wide.contiguous().numpy())
        else:
            rows = tensor.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint8)
            writer.add_tensor(name, rows, raw_dtype=Type.BF16)
    write_whole(writer)
    return len(modules)


def _checked(config: ModelConfig, weights: Weights, file: GGUF) -> tuple[str, ModelConfig, list[PredictionNames]]:
    """The architecture in GGUF, the configuration of the target's file, and the names of the layers' parts."""
    kind, names = _KINDS.get(config.architecture), family_of(config.architecture).prediction
    known = names(config.architecture, config.layers)
    if kind is None or known is None:
        raise ValueError(
            f"{weights.source}: the layer of multi-token prediction of {', '.join(_KINDS)} can be written to GGUF, "
            f"found {config.architecture}"
        )
    own = gguf_config(file)
    found = str(file.metadata["general.architecture"])
    sizes = ((words, getattr(own, name), getattr(config, name)) for name, words in _SIZES.items())
    for what, of_file, wanted in (("the architecture", found, kind), *sizes):
        if of_file != wanted:
            raise ValueError(
                f"{file.path}: the file of another model: {what} is {of_file}, and {wanted} that of {weights.source}"
            )
    return kind, own, prediction_modules(known, weights)


def _layer(
    config: ModelConfig, own: ModelConfig, weights: Weights, names: PredictionNames, block: int, split: bool
) -> Iterator[tuple[str, Float[Tensor, "*shape"]]]:
    """The tensors of a layer by their names in GGUF; `split`: the matrices of keys and of values are two."""
    at, nextn = f"model.layers.{block}.", f"blk.{block}.nextn."
    for part, name in _PARTS.items():
        yield f"{nextn}{name}.weight", _required(weights, f"{getattr(names, part)}.weight")
    for part, name in _COPIES.items():
        tensor = weights.get(f"{names.layer}{part}.weight")
        if tensor is not None:
            yield f"{nextn}{name}.weight", tensor
    inner = prediction_config(config, 1)
    stacked = family_of(config.architecture).stacked_names
    in_one = weights.get(f"{names.layer}{stacked[0]}") is not None
    for name in sorted(names_of(inner, 0)):
        whole = name.removesuffix("_bias")
        if whole in stacked:
            if in_one and name == whole:
                yield from _experts(own, at, name == stacked[0], weights.get(f"{names.layer}{name}"))
        elif "{}" in name:
            if not in_one:
                assert inner.experts is not None
                each = [_required(weights, names.layer + name.format(i)) for i in range(inner.experts.count)]
                yield gguf_place(at + name, own)[0], torch.stack(each)
        elif split and name == _KEYS_VALUES:
            yield from _keys_values(config, f"blk.{block}.", _required(weights, names.layer + name))
        else:
            yield gguf_place(at + name, own)[0], _required(weights, names.layer + name)


def _required(weights: Weights, name: str) -> Tensor:
    """A tensor of the checkpoint."""
    tensor: Tensor | None = weights.get(name)
    if tensor is None:
        raise ValueError(f"{weights.source}: the checkpoint has no {name}; was it published without its layer?")
    return tensor


def _experts(own: ModelConfig, at: str, gate_up: bool, whole: Any) -> Iterator[tuple[str, Tensor]]:
    """The matrices of all experts, of one tensor [experts, outputs, inputs]."""
    parts = zip(("gate", "up"), whole.chunk(2, 1), strict=True) if gate_up else [("down", whole)]
    for name, tensor in parts:
        yield gguf_place(f"{at}mlp.experts.{{}}.{name}_proj.weight", own)[0], tensor


def _keys_values(config: ModelConfig, block: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Keys [heads, rank, width] and values [heads, width, rank] of the matrix that expands latent vectors."""
    c = config.latent
    assert c is not None
    keys, values = torch.split(whole.view(config.heads, -1, c.kv_rank), [c.nope_dim, c.value_dim], 1)
    yield f"{block}attn_k_b.weight", keys.transpose(1, 2)
    yield f"{block}attn_v_b.weight", values
