"""What the published formats of speculators made of decoder layers share: names, sizes and tensors of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.block.weights import places_of
from foretell.model.config.families.base import read_layer_types
from foretell.model.config.model import ModelConfig, RopeConfig
from foretell.model.config.readers.hf import from_hf
from foretell.speculator.config_file import CONFIG
from foretell.speculator.formats.base import (
    ConvertedCheckpoint,
    is_copy,
    refuse_other_tensors,
    refuse_parts,
    target_rows,
)
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.cached_layers import CachedLayersConfig, CachedLayersNetwork
from foretell.utils.validation import Fields, show

_OTHER_TENSORS = ("rotary_emb", "verifier_lm_head", "verifier_norm", "t2d", "d2t", "lm_head", "embed_tokens", "dummy")
"""Parts of the names of tensors that are read separately, or are not needed."""
_LINEARS = {
    "qkv": "self_attn.qkv_proj", "output": "self_attn.o_proj", "mlp.gate_up": "mlp.gate_up_proj",
    "mlp.down": "mlp.down_proj",
}  # fmt: skip
"""Names of the matrices of a layer, by their fields in the record of a block."""
_SINKS = "layers.{}.self_attn.attention_sink_bias"
_READ = frozenset({
    "architecture", "vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "context",
    "longest_context", "norm_eps", "rope", "tied", "qkv_bias", "output_bias", "qk_norm", "window",
    "window_layers", "bos", "eos", "mask_token",
})  # fmt: skip
"""Properties of a decoder that are read, or that the tensors decide."""
_PLAIN = ModelConfig("llama", vocab=1, hidden=1, layers=1, heads=1, kv_heads=1, head_dim=1, ffn=1, context=1)
"""What the layers have of the others."""


@dataclass(frozen=True)
class TensorSource:
    """The published tensors that form one of Foretell's, concatenated along the rows."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    other_sizes: tuple[int, ...] = ()


def layer_sources(c: CachedLayersConfig, layer: int, fusing: bool, normed: bool) -> dict[str, TensorSource]:
    """The published tensors of a layer."""
    at = f"layers.{layer}."
    out = {f"{at}hidden_norm.weight": TensorSource((f"{at}hidden_norm.weight",), (c.target.hidden,))} if fusing else {}
    for place in places_of(c.decoder_config, layer):
        name = ours = place.name.removeprefix("model.")
        (rows, *rest), linear = place.shape, place.path.removesuffix(".bias")
        if name == f"{at}input_layernorm.weight" and not normed:
            continue
        if linear in _LINEARS:
            ours = f"{at}{_LINEARS[linear]}.{name.rpartition('.')[2]}"
            rest = [n * 2 for n in rest] if fusing and linear == "qkv" else rest
        first = out.get(ours, TensorSource((), ()))
        name = _SINKS.format(layer) if place.path == "sinks" else name
        out[ours] = TensorSource((*first.names, name), (*first.rows, rows), tuple(rest))
    return out


def layer_shape(files: PublishedCheckpoint, raw: Mapping[str, Any], vocab: int) -> ModelConfig:
    """The layer as a decoder's configuration.

    Raises:
        ValueError: a key is missing, or its value is not supported.
    """
    shape = from_hf({"model_type": "llama", **raw, "vocab_size": vocab}, str(files.folder / CONFIG))
    width = raw.get("target_hidden_size") or files.config.get("target_hidden_size")
    if width is not None and width != shape.hidden:
        raise ValueError(
            f"{files.folder}: it drafts in a width of its own ({shape.hidden}; its target's is {width}), which is not "
            f"supported"
        )
    if shape.activation != "silu":
        raise ValueError(f"{files.folder}: its activation is {shape.activation}, and only silu is supported")
    for name in (f.name for f in fields(shape) if f.name not in _READ):
        value, expected = getattr(shape, name), getattr(_PLAIN, name)
        if value != expected and not (name == "local_rope" and value == shape.rope):
            raise ValueError(
                f"{files.folder / CONFIG}: its layers are of the type {shape.architecture}, which has {name} "
                f"({show(value)}); layers of the Llama family are supported"
            )
    return shape


def layer_windows(files: PublishedCheckpoint, raw: Mapping[str, Any], shape: ModelConfig) -> dict[str, Any]:
    """The sliding window of layers and which have it, as values of a `CachedLayersConfig`.

    As in the authors' code and in vLLM, `layer_types` decides; where it is missing, layers of Qwen have those that
    transformers gives them.

    Raises:
        ValueError: the keys contradict each other.
    """
    read, qwen = Fields(raw, str(files.folder / CONFIG)), shape.architecture.startswith("qwen")
    layers, window = read_layer_types(read, shape.layers), read.integer("sliding_window", default=0)
    if layers is None:
        return {"window": shape.window, "window_layers": shape.window_layers} if qwen and shape.window_layers else {}
    if not layers:
        return {}
    # Configurations of Qwen have no window without this flag.
    if not read.flag("use_sliding_window", default=not qwen):
        raise read.wrong("use_sliding_window", "true beside layer_types of sliding_attention", False)
    if not window:
        raise read.wrong("sliding_window", "above 0 beside layer_types of sliding_attention", raw.get("sliding_window"))
    return {"window": window, "window_layers": layers}


def library_layer(files: PublishedCheckpoint) -> Mapping[str, Any]:
    """The layers' configuration in a checkpoint of the `speculators` library.

    Raises:
        ValueError: there is none.
    """
    layer = files.config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"{files.folder / CONFIG}: transformer_layer_config should describe the layers")
    return layer


def check_layers_read(files: PublishedCheckpoint, layers: Sequence[int], target: TargetInfo) -> None:
    """Check that the target has the layers whose hidden states a checkpoint reads.

    Raises:
        ValueError: it has not.
    """
    highest = target.layers + 1
    if not all(0 <= i <= highest for i in layers):
        raise ValueError(
            f"{files.folder / CONFIG}: it reads the layers {list(layers)} of its target, and this target has layers "
            f"0 to {highest}; the checkpoint is for another model"
        )


def check_mask_token_read(files: PublishedCheckpoint, token: int, target: TargetInfo) -> None:
    """Check that the mask token of a checkpoint is one of the target's tokens.

    Raises:
        ValueError: it is not.
    """
    if not 0 <= token < target.vocab:
        raise ValueError(
            f"{files.folder / CONFIG}: its mask token is {token}, and the target has {target.vocab} tokens; the "
            "checkpoint is for another tokenizer, or the target lacks a token that was added for it"
        )


def refuse_parts_of_layers(
    network: CachedLayersNetwork,
    format_name: str,
    parts: Sequence[tuple[str, bool, str]],
    has_sink_bias: bool = False,
) -> None:
    """As `refuse_parts`; `has_sink_bias`: the format has a place for the sinks of attention.

    Raises:
        ValueError: the network has a part that the format does not support.
    """
    sinks = bool(network.config.sink_layers) and not has_sink_bias
    refuse_parts(network, format_name, (*parts, ("attention sinks", sinks, "")))


class OwnTensors(NamedTuple):
    """What a checkpoint may have of its own; None: it uses the target's."""

    token_of: torch.Tensor | None
    """Target token of every token of the draft vocabulary."""
    head: torch.Tensor | None
    embedding: torch.Tensor | None

    @classmethod
    def find(
        cls,
        files: PublishedCheckpoint,
        target: TargetInfo,
        embedding_and_head: EmbeddingAndHead,
        with_head: bool = True,
        mask_token: int | None = None,
    ) -> Self:
        """Those of a checkpoint, copies of the target's left out. `mask_token`: a row of the embedding that is read
        separately and may differ.

        Raises:
            ValueError: one has another shape, or the draft vocabulary is damaged.
        """
        tokens = _draft_vocab(files, target.vocab)
        head = _own_head(files, tokens, target, embedding_and_head) if with_head else None
        return cls(tokens, head, _own_embedding(files, target, embedding_and_head, mask_token))


def layer_values(
    files: PublishedCheckpoint, raw: Mapping[str, Any], shape: ModelConfig, own: OwnTensors
) -> dict[str, Any]:
    """Values of a `CachedLayersConfig`, except the target; `raw`: the layers' configuration."""
    names = ("heads", "kv_heads", "head_dim", "ffn", "context", "layers", "norm_eps")
    return {
        **{name: getattr(shape, name) for name in names},
        **layer_windows(files, raw, shape),
        "sink_layers": tuple(i for i in range(shape.layers) if files.has(_SINKS.format(i))),
        "rope": shape.rope or RopeConfig(),
        "qkv_bias": files.has("layers.0.self_attn.q_proj.bias"),
        "qk_norm": files.has("layers.0.self_attn.q_norm.weight"),
        "own_embedding": own.embedding is not None,
        "own_head": own.head is not None,
        "draft_vocab": None if own.token_of is None else len(own.token_of),
    }


def convert(
    files: PublishedCheckpoint, config: CachedLayersConfig, sources: Mapping[str, TensorSource], own: OwnTensors
) -> ConvertedCheckpoint:
    """The checkpoint with all its tensors under Foretell's names.

    Raises:
        ValueError: a tensor is missing, has another shape, or is not known.
    """
    tensors = {ours: _concatenate(files, source) for ours, source in sources.items()}
    used = {name for part in sources.values() for name in part.names}
    refuse_other_tensors(files, used, lambda name: any(part in name for part in _OTHER_TENSORS))
    return ConvertedCheckpoint(config, tensors | {n: t for n, t in own._asdict().items() if t is not None})


def _concatenate(files: PublishedCheckpoint, source: TensorSource) -> torch.Tensor:
    """One of Foretell's tensors."""
    shapes = zip(source.names, source.rows, strict=True)
    return torch.cat([files.require(name, rows, *source.other_sizes) for name, rows in shapes])


def _draft_vocab(files: PublishedCheckpoint, vocab: int) -> torch.Tensor | None:
    """Target token of every token of the draft vocabulary, from the offsets in `d2t`; None: the whole vocabulary."""
    offsets = files.find("d2t")
    if offsets is None or len(offsets) == vocab:
        return None
    tokens = torch.arange(len(offsets)) + offsets.long()
    ascending = bool((tokens.diff() > 0).all())
    if not ascending or not 0 <= int(tokens[0]) <= int(tokens[-1]) < vocab:
        raise ValueError(
            f"{files.folder}: d2t does not name ascending tokens of a vocabulary of {vocab}; is it damaged?"
        )
    return tokens


def _own_embedding(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead, mask_token: int | None
) -> torch.Tensor | None:
    """The checkpoint's embedding, unless it is a copy of the target's, apart from the row of a mask token."""
    if not files.has("embed_tokens.weight"):
        return None
    own, shared = files.require("embed_tokens.weight", target.vocab, target.hidden), embedding_and_head.embedding
    compared = own
    if mask_token is not None:
        compared = own.clone()
        compared[mask_token] = shared[mask_token].to(own)
    return None if embedding_and_head.embedding_scale == 1 and is_copy(compared, shared) else own


def _own_head(
    files: PublishedCheckpoint, tokens: torch.Tensor | None, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> torch.Tensor | None:
    """The checkpoint's output matrix, unless it is a copy of rows of the target's."""
    if not files.has("lm_head.weight"):
        return None
    shared = target_rows(embedding_and_head, tokens)
    own = files.require("lm_head.weight", len(shared), target.hidden)
    return None if is_copy(own, shared) else own
