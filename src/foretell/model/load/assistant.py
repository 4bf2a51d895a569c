"""Loads Gemma 4's assistant, a checkpoint of its own, for its target: a directory, or a GGUF file of llama.cpp."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from foretell.model.block.decoder import BlockRange, Decoder, decoder_rope_tables
from foretell.model.block.layer import RMSNorm
from foretell.model.block.linear import Linear
from foretell.model.cache.state_store import plan_stores
from foretell.model.config.model import ModelConfig
from foretell.model.config.readers.hf import from_hf
from foretell.model.config.readers.unread_keys import refuse_other_keys
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.stack import NativeStack
from foretell.model.load.build import build_block
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import GGUFHeader, gguf_config
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.native import packable_block, weight_dtype
from foretell.model.load.weights import EMBEDDING, FINAL_NORM, HEAD, SafetensorsWeights, Weights
from foretell.model.run.assistant import Assistant, Blocks, CentroidHead
from foretell.model.run.network import Network
from foretell.utils.validation import Fields, read_json

_CONFIG = "config.json"
_KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
GGUF_KIND, _TARGETS_KIND = "gemma4-assistant", "gemma4"
"""Architectures of llama.cpp: the assistant's, and that whose blocks it has."""
_KEYS = (
    "model_type", "text_config", "backbone_hidden_size", "use_ordered_embeddings", "num_centroids",
    "centroid_intermediate_top_k",
)  # fmt: skip
"""Keys of its configuration that are read; `text_config` is read as of any model."""
_PROJECTIONS = {f"nextn.{name}.weight": f"{name}.weight" for name in ("pre_projection", "post_projection")}
_GROUPS = ("masked_embd_centroids.weight", "masked_embd_ordering")
"""Tensors in GGUF that llama.cpp leaves: it scores all tokens. How many groups are chosen is not in the file."""
Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]


def is_assistant(folder: Path) -> bool:
    """Whether a directory or a GGUF file holds an assistant."""
    if folder.is_file():
        return bool(GGUFHeader(folder).metadata.get("general.architecture") == GGUF_KIND)
    return (folder / _CONFIG).is_file() and read_json(folder / _CONFIG).get("model_type") in _KINDS


def load_assistant(folder: Path, target: Network) -> Assistant:
    """Load an assistant.

    Raises:
        ValueError: it is damaged or of another target, or this is not in memory as a whole.
    """
    weights: Weights
    if folder.is_file():
        file = _AssistantFile(folder)
        read = Fields({"backbone_hidden_size": file.metadata.get(f"{_TARGETS_KIND}.embedding_length_out")}, str(folder))
        config = assistant_config(read, gguf_config(file), target.config)
        weights = _AssistantWeights(file, config)
    else:
        read = Fields(read_json(folder / _CONFIG), str(folder / _CONFIG))
        refuse_other_keys(read, _KEYS)
        text = {"hidden_size_per_layer_input": 0, **read.fields("text_config").raw, "num_kv_shared_layers": 0}
        config = assistant_config(read, from_hf(text, read.source), target.config)
        weights = stored = SafetensorsWeights(folder)
        stored.check_layers(config.layers)
        stored.check_tensors(config)
    return run_assistant(read, config, weights, target)


def run_assistant(read: Fields, config: ModelConfig, weights: Weights, target: Network) -> Assistant:
    """The assistant of these weights; `read`: its configuration as published.

    Raises:
        ValueError: a tensor is missing, or the target is not in memory as a whole.
    """
    sources = tuple(layer - config.layers for layer in config.kv_layers)
    norm = RMSNorm(weights.require(FINAL_NORM, config.hidden).to(target.device), config.norm_eps)
    if not isinstance(target, NativeDecoder | Decoder):
        raise ValueError("mtp needs the whole model in memory; run it without a memory limit, or use another method")

    def matrix(name: str, outputs: int, inputs: int) -> Function:
        stored = weights.matrix(f"{name}.weight", outputs, inputs)
        if isinstance(target, NativeDecoder):
            return NativeLinear(stored, None, target.precision)
        return Linear(stored.widen().to(target.device, target.embedding.dtype))

    width, build = target.config.hidden, _native if isinstance(target, NativeDecoder) else _torch
    return Assistant(
        target.embed,
        matrix("pre_projection", config.hidden, 2 * width),
        build(config, weights, target, sources),
        norm,
        matrix("post_projection", width, config.hidden),
        _head(read, config, weights, matrix, target),
        sources,
        target.config,
    )


class _AssistantFile(GGUF):
    """A GGUF file of an assistant as one of its target's architecture, whose layers have keys and values."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        own = {key.replace(GGUF_KIND, _TARGETS_KIND, 1): value for key, value in self.metadata.items()}
        none = dict.fromkeys(("gemma4.nextn_predict_layers", "gemma4.attention.shared_kv_layers"), 0)
        self.metadata = own | none | {"general.architecture": _TARGETS_KIND}
        self.tensors = {_PROJECTIONS.get(name, name): info for name, info in self.tensors.items()}


class _AssistantWeights(GGUFWeights):
    """Its tensors."""

    def _can_be_left(self, name: str) -> bool:
        return name in (*_PROJECTIONS.values(), *_GROUPS) or super()._can_be_left(name)


def assistant_config(read: Fields, own: ModelConfig, target: ModelConfig) -> ModelConfig:
    """The configuration of layers with the sizes of `own`. Each reads the keys and values of the target's last layer of
    its kind that has its own.

    Raises:
        ValueError: they are of another target.
    """
    folder = read.source.removesuffix(f"/{_CONFIG}")
    if target.local_head_dim == 0:
        raise ValueError(
            f"{folder}: an assistant of Gemma 4, and the target is {target.architecture}; use it with its own target"
        )
    last = {target.window_of(i) > 0: target.kv_layer_of(i) for i in range(target.layers)}
    for of_file, of_model, what in (
        (read.integer("backbone_hidden_size", default=1536), target.hidden, "the width"),
        (own.vocab, target.vocab, "the size of the vocabulary"),
        ((own.head_dim, own.local_head_dim), (target.head_dim, target.local_head_dim), "the width of the heads"),
        (own.layer_inputs.width if own.layer_inputs else 0, 0, "the width of the inputs of each layer"),
    ):
        if of_file != of_model:
            raise ValueError(f"{folder}: an assistant of another model: {what} is {of_file}, and {of_model} is needed")
    kinds = [own.window_of(i) > 0 for i in range(own.layers)]
    if not set(kinds) <= set(last):
        raise ValueError(f"{folder}: an assistant of another model: the target has no layers of one of its kinds")
    return replace(
        own,
        kv_heads=target.kv_heads,
        local_kv_heads=target.local_kv_heads,
        kv_layers=tuple(own.layers + last[kind] for kind in kinds),
        context=target.context,
        cache_dtype=target.cache_dtype,
    )


def _native(config: ModelConfig, weights: Weights, target: Network, sources: tuple[int, ...]) -> Blocks:
    assert isinstance(target, NativeDecoder)
    empty, precision = NativeStack(config, [], target.precision, *decoder_rope_tables(config)), target.precision
    packed = [empty.pack_block(i, packable_block(config, i, weights, precision)) for i in range(config.layers)]
    places = plan_stores(target.config)[1]
    for block, source in zip(packed, sources, strict=True):
        block.struct.store = places[source][1]
    stack = empty.with_blocks(packed)
    return lambda x, layout, cache: stack(x, layout, cache, 0, config.layers)


def _torch(config: ModelConfig, weights: Weights, target: Network, sources: tuple[int, ...]) -> Blocks:
    assert isinstance(target, Decoder)
    table = target.embedding.new_empty(0, config.hidden)
    blocks = [build_block(config, i, weights, table.dtype, table.device) for i in range(config.layers)]
    decoder = Decoder(config, table, blocks, RMSNorm(table.new_ones(config.hidden), config.norm_eps))
    return lambda x, layout, cache: decoder.run(x, layout, cache, BlockRange(0, config.layers)).hidden_states[-1]


def _head(
    read: Fields,
    config: ModelConfig,
    weights: Weights,
    matrix: Callable[[str, int, int], Function],
    target: NativeDecoder | Decoder,
) -> Function:
    is_own = not read.flag("tie_word_embeddings", default=True) or weights.get(HEAD) is not None
    name = "lm_head" if is_own else EMBEDDING.removesuffix(".weight")
    if not read.flag("use_ordered_embeddings", default=False):
        return matrix(name, config.vocab, config.hidden)
    groups = read.integer("num_centroids", default=2048, least=1, most=config.vocab)
    chosen = read.integer("centroid_intermediate_top_k", default=32, least=1, most=groups)
    order = weights.integers("masked_embedding.token_ordering", config.vocab).long()
    if config.vocab % groups or not torch.equal(order.sort().values, torch.arange(config.vocab)):
        raise ValueError(
            f"{weights.source}: masked_embedding.token_ordering: no order of {config.vocab} tokens in {groups} groups "
            "of equal size; is it damaged?"
        )
    dtype = weight_dtype(target.precision) if isinstance(target, NativeDecoder) else target.embedding.dtype
    table = weights.require(f"{name}.weight", config.vocab, config.hidden).to(dtype)[order].to(target.device)
    centroids = matrix("masked_embedding.centroids", groups, config.hidden)
    tokens = order.view(groups, -1).to(target.device)
    return CentroidHead(centroids, table.view(groups, -1, config.hidden), tokens, chosen)
