"""Reads and writes DFlash checkpoints: those of its authors (and DSpark's, which add heads), and the `speculators`
library's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.formats.base import (
    CheckpointFormat,
    ConvertedCheckpoint,
    ExportFormat,
    Verifier,
    dtype_name,
    refuse_softcap,
    target_info,
    write_checkpoint,
)
from foretell.speculator.formats.eagle_export import layer_config, vocabulary
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.formats.keys import LAYER, refuse_other_keys, refuse_other_library_keys
from foretell.speculator.formats.layers import (
    OwnTensors,
    TensorSource,
    check_layers_read,
    check_mask_token_read,
    convert,
    layer_shape,
    layer_sources,
    layer_values,
    library_layer,
)
from foretell.speculator.network.base import Speculator, TargetInfo
from foretell.speculator.network.dflash import DFlash, DFlashConfig
from foretell.utils.validation import Fields

ARCHITECTURES = ("DFlashDraftModel", "Qwen3DSparkModel", "DSparkDraftModel")
_TYPES = ("dflash", "dspark")
_MARKOV_IN, _MARKOV_OUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_CONFIDENCE = "confidence_head.proj"
_SLIDING = "sliding_attention"
_LIBRARY_KEYS = (
    "aux_hidden_state_layer_ids", "sample_from_anchor", "sliding_window_non_causal", "mask_token_id", "block_size",
)  # fmt: skip
_HEAD_KEYS = ("markov_rank", "markov_head_type", "confidence_head_with_markov")
_OPTIONS = (
    "is_causal", "causal", "use_swa", "attention_sink_bias", "add_swa_attention_sink_bias", "is_neox_style",
    "projector_type", "shift_label", "pure_draft_prefix_len", "selector_rank", "conv_kernel_size", "output_multiplier",
    "input_embedding_scale", "final_logit_softcapping",
)  # fmt: skip
"""Options that are checked; see `_check_options`."""


def tensor_sources(c: DFlashConfig) -> dict[str, TensorSource]:
    """The published tensors of every tensor of the network."""
    d, count, e = c.target.hidden, len(c.recorded_layers), c.head_dim
    outputs = c.draft_vocab or c.target.vocab
    out = {"fc.weight": TensorSource(("fc.weight",), (d,), (count * d,))}
    out |= {f"{n}.weight": TensorSource((f"{n}.weight",), (d,)) for n in ("hidden_norm", "norm")}
    for i in range(c.layers):
        out |= layer_sources(c, i, d, e, fusing=False, normed=True)
    if c.markov_rank:
        out["markov_in.weight"] = TensorSource((_MARKOV_IN,), (c.target.vocab,), (c.markov_rank,))
        out["markov_out.weight"] = TensorSource((_MARKOV_OUT,), (outputs,), (c.markov_rank,))
    if c.confidence:
        out["confidence.weight"] = TensorSource((f"{_CONFIDENCE}.weight",), (1,), (d + c.markov_rank,))
        out["confidence.bias"] = TensorSource((f"{_CONFIDENCE}.bias",), (1,))
    return out


def _fits_speculators(files: PublishedCheckpoint) -> bool:
    return files.config.get("speculators_model_type") in _TYPES


def _fits_authors(files: PublishedCheckpoint) -> bool:
    return any(a in ARCHITECTURES for a in files.architectures) or "dflash_config" in files.config


def _read_authors(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    files = files.strip_prefixes("model.")
    own = files.fields.fields("dflash_config")
    # The configuration counts a block's output; Foretell counts the input of the next block.
    layers = tuple(i + 1 for i in own.integers("target_layer_ids") or files.fields.integers("target_layer_ids"))
    mask = own.integer("mask_token_id", default=-1, least=-1)
    size = own.integer("block_size", default=files.fields.integer("block_size", default=16))
    known = files.fields.integer("num_target_layers", default=target.layers)
    if known != target.layers:
        raise ValueError(
            f"{files.folder}: it reads a target of {known} layers (num_target_layers), and this one has {target.layers}"
        )
    values = {
        "hidden_layers": layers,
        "mask_token": files.fields.integer("mask_token_id", least=0) if mask < 0 else mask,
        "block_size": size,
        "predicts_from_anchor": any("DSpark" in a for a in files.architectures),
    }
    if files.fields.texts("layer_types"):
        # In vLLM and SpecForge the type of a layer decides, unless a flag does.
        flag = files.fields.flag("is_causal", default=own.flag("causal", default=True))
        values["window_causal"] = flag and _SLIDING in files.fields.texts("layer_types")
    read = _read(files, files.config, values, target, embedding_and_head)
    keys = (*_HEAD_KEYS, *_OPTIONS, "target_layer_ids", "mask_token_id", "block_size")
    refuse_other_keys(files.fields, LAYER, ("dflash_config", "num_target_layers"), keys)
    refuse_other_keys(own, ("attention_mode",), keys)
    return read


def _read_speculators(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    layer = library_layer(files)
    sliding = _SLIDING in Fields(layer, files.fields.source).texts("layer_types")
    values = {
        "window_from_anchor": sliding,
        "window_causal": sliding and not files.fields.flag("sliding_window_non_causal", default=False),
        "hidden_layers": files.fields.integers("aux_hidden_state_layer_ids"),
        "mask_token": files.fields.integer("mask_token_id"),
        "block_size": files.fields.integer("block_size"),
        "predicts_from_anchor": files.fields.flag(
            "sample_from_anchor", default=files.config.get("speculators_model_type") == "dspark"
        ),
    }
    read = _read(files, layer, values, target, embedding_and_head)
    refuse_other_library_keys(files.fields, layer, _LIBRARY_KEYS, _HEAD_KEYS, _OPTIONS)
    return read


def _read(
    files: PublishedCheckpoint,
    raw: Mapping[str, Any],
    values: Mapping[str, Any],
    target: TargetInfo,
    embedding_and_head: EmbeddingAndHead,
) -> ConvertedCheckpoint:
    _check_options(files, raw, values, embedding_and_head)
    shape = layer_shape(files, raw, target.vocab)
    _check(files, values, target)
    markov = files.find(_MARKOV_IN)
    trained_for = target_info(files, target, shape.hidden, target.vocab if markov is None else len(markov))
    own = OwnTensors.find(files, target, embedding_and_head)
    config = DFlashConfig(
        target=trained_for,
        markov_rank=0 if markov is None else markov.shape[1],
        confidence=files.has(f"{_CONFIDENCE}.weight"),
        **layer_values(files, raw, shape, own),
        **values,
    )
    return convert(files, config, tensor_sources(config), own)


def _check_options(
    files: PublishedCheckpoint,
    raw: Mapping[str, Any],
    values: Mapping[str, Any],
    embedding_and_head: EmbeddingAndHead,
) -> None:
    """Refuse options of other drafters of this family, which their authors' code reads.

    `raw`: the layers' configuration.

    Raises:
        ValueError: one is set.
    """
    own = {**raw, **files.config, **files.fields.fields("dflash_config").raw}
    markov, types = files.has(_MARKOV_IN), Fields(raw, files.fields.source).texts("layer_types")
    causal = (False, True) if types and set(types) == {_SLIDING} else (False,)
    sinks = any(name.endswith("attention_sink_bias") for name in files.names)
    supported: dict[str, tuple[object, ...]] = {
        "is_causal": causal,
        "causal": causal,
        "use_swa": (False,),
        "attention_sink_bias": (sinks,),
        "add_swa_attention_sink_bias": (sinks,),
        "is_neox_style": (True,),
        "projector_type": _TYPES,
        "shift_label": (values["predicts_from_anchor"],),
        "pure_draft_prefix_len": (0,),
        "selector_rank": (0,),
        "conv_kernel_size": (0,),
        "output_multiplier": (1,),
        "input_embedding_scale": (embedding_and_head.embedding_scale,),
        "final_logit_softcapping": (embedding_and_head.softcap,),
        "markov_head_type": ("vanilla",) if markov else (own.get("markov_head_type"),),
        "confidence_head_with_markov": (markov,) if files.has(f"{_CONFIDENCE}.weight") else (False, True),
    }
    assert set(supported) <= {*_OPTIONS, *_HEAD_KEYS}
    for name, known in supported.items():
        if own.get(name) not in (None, *known):
            wanted = " or ".join(map(str, known))
            raise files.fields.wrong(name, f"{wanted}: nothing else is supported for DFlash here", own[name])


def _check(files: PublishedCheckpoint, values: Mapping[str, Any], target: TargetInfo) -> None:
    """Refuse what would draft wrongly.

    Raises:
        ValueError: a layer that the target does not have, or a mask token outside its vocabulary.
    """
    place = files.folder / "config.json"
    if not values["hidden_layers"]:
        raise ValueError(f"{place}: it names no layers of its target whose hidden states it reads; is it complete?")
    check_layers_read(files, values["hidden_layers"], target)
    check_mask_token_read(files, values["mask_token"], target)


def _check_exported(network: DFlash, format_name: str) -> None:
    """Refuse a network with a part that the format does not support.

    Raises:
        ValueError: it has one.
    """
    refuse_softcap(network, format_name)
    c = network.config
    unsupported = (
        ("a learned mask vector", c.mask_token is None, " (--set mask_token=N)"),
        ("norms of the fused states", c.fc_norm, " (--set fc_norm=false)"),
        ("the target's state after its final norm", c.target.layers + 1 in c.recorded_layers, ""),
        ("the target's embeddings as a hidden state", 0 in c.recorded_layers, ""),
        ("biases of queries, keys and values", c.qkv_bias, ""),
        ("a convolution over slots", c.convolution, " (--set convolution=false)"),
        (
            "heads of DSpark beside a first slot that predicts nothing",
            bool(c.markov_rank or c.confidence) and not c.predicts_from_anchor,
            " (--set predicts_from_anchor=true, or markov_rank=0 and confidence=false)",
        ),
    )
    for what, present, how in unsupported:
        if present:
            raise ValueError(
                f"the format {format_name} has no place for {what}, which this speculator has; train one without{how} "
                "to export it"
            )


def _write(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, DFlash)
    _check_exported(network, "dflash")
    c, state, tensors = network.config, network.state_dict(), dict[str, torch.Tensor]()
    for ours, part in tensor_sources(c).items():
        tensors |= dict(zip(part.names, state[ours].split(part.rows), strict=True))
    if c.own_head or c.draft_vocab is not None:
        tensors |= vocabulary(network, always_maps=False)
    if network.embedding is not None:
        tensors["embed_tokens.weight"] = network.embedding
    layout = {
        "architectures": [ARCHITECTURES[1 if c.predicts_from_anchor else 0]],
        **layer_config(c, dtype_name(network)),
        "base_model_name_or_path": verifier.name,
        "num_target_layers": c.target.layers,
        "block_size": c.block_size,
        "dflash_config": {
            "mask_token_id": c.mask_token,
            "target_layer_ids": [layer - 1 for layer in c.recorded_layers],
            # Without the flag other engines read windows as causal, with it all layers.
            **({} if not c.window or c.window_causal else {"causal": False}),
            **({"attention_sink_bias": True} if c.sink_layers else {}),
        },
    }
    if c.draft_vocab is not None:
        layout["draft_vocab_size"] = c.draft_vocab
    if c.markov_rank:
        layout |= {"markov_rank": c.markov_rank, "markov_head_type": "vanilla"}
    if c.confidence:
        layout |= {"enable_confidence_head": True, "confidence_head_with_markov": bool(c.markov_rank)}
    write_checkpoint(folder, layout, tensors)


AUTHORS = CheckpointFormat("dflash", _fits_authors, _read_authors)
SPECULATORS = CheckpointFormat("speculators-dflash", _fits_speculators, _read_speculators)
TO_AUTHORS = ExportFormat("dflash", "dflash", _write)
