"""Reads EAGLE checkpoints: SafeAILab's formats of EAGLE-1 and EAGLE-3, and that of the `speculators` library."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.readers.unread_keys import refuse_other_keys
from foretell.speculator.config_file import CONFIG
from foretell.speculator.formats.base import CheckpointFormat, ConvertedCheckpoint, target_info
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.formats.keys import IN_LAYER, LAYER, refuse_other_library_keys
from foretell.speculator.formats.layers import (
    OwnTensors,
    TensorSource,
    check_layers_read,
    convert,
    layer_shape,
    layer_sources,
    layer_values,
    library_layer,
)
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.eagle import EagleConfig
from foretell.utils.validation import Fields

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Options of EAGLE-3 that have the same names here and in configurations."""
_SPECFORGE = "LlamaForCausalLMEagle3"
_AUX = "eagle_aux_hidden_state_layer_ids"
_OF_MODELOPT: Mapping[str, object] = {
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    "next_layer_regular": True, "parallel_draft_step": 1,
}  # fmt: skip
"""Options of NVIDIA's Model Optimizer in `eagle_config`, and their values in plain EAGLE-3."""
EAGLE3_KEYS = (*FLAGS, _AUX)
"""Keys that EAGLE-3's formats share beside those of its layers."""


def tensor_sources(c: EagleConfig) -> dict[str, TensorSource]:
    """The published tensors (`midlayer` renamed to `layers.0`) of every tensor of the network."""
    d, eagle3 = c.target.hidden, c.kind != "eagle"
    fc_inputs = len(c.recorded_layers) * d if eagle3 else 2 * d
    out = {"fc.weight": TensorSource(("fc.weight",), (d,), (fc_inputs,))}
    if c.fc_bias or (c.fc_bias is None and not eagle3):
        out["fc.bias"] = TensorSource(("fc.bias",), (d,))
    for i in range(c.layers):
        out |= layer_sources(c, i, fusing=eagle3 and i == 0, normed=eagle3 or i > 0)
    if eagle3:
        out["norm.weight"] = TensorSource(("norm.weight",), (d,))
    if c.norm_before_fc:
        out["input_norm.weight"] = TensorSource(("input_norm.weight",), (fc_inputs,))
    for i in range(len(c.recorded_layers) if c.fc_norm else 0):
        out[f"fc_norm.{i}.weight"] = TensorSource((f"fc_norm.{i}.weight",), (d,))
    return out


def _fits_speculators(files: PublishedCheckpoint) -> bool:
    return files.config.get("speculators_model_type") is not None or "Eagle3Speculator" in files.architectures


def _fits_eagle3(files: PublishedCheckpoint) -> bool:
    named = any("Eagle3" in a for a in files.architectures)
    return not _fits_speculators(files) and (named or files.has("midlayer.hidden_norm.weight"))


def _fits_eagle1(files: PublishedCheckpoint) -> bool:
    named = any(a in ("EAGLEModel", "EagleLlamaForCausalLM", "EAGLE") for a in files.architectures)
    # Most checkpoints name the class of a language model, which has a first norm and no `fc`.
    bare = files.has("fc.weight") and files.has("layers.0.self_attn.q_proj.weight")
    return not _fits_eagle3(files) and (named or files.config.get("model_type") == "eagle" or bare)


def _read_eagle1(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    files = files.strip_prefixes("model.")
    raw = files.config.get("model")
    if isinstance(raw, dict):
        refuse_other_keys(files.fields, LAYER, ("model",))
        refuse_other_keys(files.fields.fields("model"), LAYER)
    else:
        raw = files.config
        refuse_other_keys(files.fields, LAYER)
    return convert_layers(files, raw, EagleConfig, {"kind": "eagle"}, target, embedding_and_head)


def _read_eagle3(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    refuse_other_keys(files.fields, LAYER, EAGLE3_KEYS, ("eagle_config",))
    files, values = read_flat(files)
    return convert_layers(files, files.config, EagleConfig, {"kind": "eagle3", **values}, target, embedding_and_head)


def read_flat(files: PublishedCheckpoint) -> tuple[PublishedCheckpoint, dict[str, Any]]:
    """A checkpoint of EAGLE-3's authors or SpecForge with plain names of its tensors, and its options."""
    own = files.fields.fields("eagle_config")
    refuse_other_keys(own, ("use_aux_hidden_state", _AUX), _OF_MODELOPT, ("parallel_draft_heads_num_layers",))
    for name, plain in _OF_MODELOPT.items():
        if own.raw.get(name) not in (None, plain):
            raise own.wrong(name, f"{plain}: nothing else is supported for EAGLE-3 here", own.raw[name])
    if not own.flag("use_aux_hidden_state", default=True):
        raise own.wrong("use_aux_hidden_state", "true: a draft of the last hidden state alone is not supported", False)
    # `eagle_config` counts a layer's output; Foretell and vLLM count the input of the next layer.
    hidden_layers = [i + 1 for i in own.integers(_AUX)]
    values = _flags(files, hidden_layers)
    # In SpecForge up to 0.2.0 the flag says that the head reads normed states; those that are fed back are not.
    if _SPECFORGE in files.architectures and not files.fields.has("norm_before_residual"):
        values["norm_output"] = False
    return _midlayer(files.strip_prefixes("model.")), values


def _read_speculators(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    kind = files.config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ValueError(
            f"{files.folder}: speculators of the type {kind!r} are not known here; known: eagle3, peagle, dflash, "
            "dspark, dflash2, xpress"
        )
    layer = library_layer(files)
    refuse_other_library_keys(files.fields, layer, EAGLE3_KEYS)
    files, values = read_library(files)
    return convert_layers(files, layer, EagleConfig, {"kind": "eagle3", **values}, target, embedding_and_head)


def read_library(files: PublishedCheckpoint) -> tuple[PublishedCheckpoint, dict[str, Any]]:
    """A checkpoint of the `speculators` library with plain names of its tensors, and its options."""
    beside = Fields(library_layer(files), files.fields.source, "transformer_layer_config.")
    values = _flags(files, ())
    return _midlayer(files), values | {name: values[name] or beside.flag(name, default=False) for name in IN_LAYER}


def _midlayer(files: PublishedCheckpoint) -> PublishedCheckpoint:
    renamed = {
        n.replace("midlayer.", "layers.0.") if n.startswith("midlayer.") else n: p for n, p in files.names.items()
    }
    return replace(files, names=renamed)


def _flags(files: PublishedCheckpoint, hidden_layers: Sequence[int]) -> dict[str, Any]:
    """The keys that EAGLE-3's two formats share."""
    return {
        "hidden_layers": files.fields.integers(_AUX) or tuple(hidden_layers),
        **{name: files.fields.flag(name, default=False) for name in FLAGS},
    }


def _verifier(files: PublishedCheckpoint) -> str:
    """The target's name in a checkpoint of the `speculators` library; empty: there is none."""
    library = files.config.get("speculators_config")
    verifier = library.get("verifier") if isinstance(library, dict) else None
    return str(verifier.get("name_or_path") or "") if isinstance(verifier, dict) else ""


def convert_layers(
    files: PublishedCheckpoint,
    raw: Mapping[str, Any],
    config_type: type[EagleConfig],
    values: Mapping[str, Any],
    target: TargetInfo,
    embedding_and_head: EmbeddingAndHead,
    mask_token: int | None = None,
) -> ConvertedCheckpoint:
    """EAGLE's layers as `raw` describes them. `values`: options of the configuration that its keys do not give.

    Raises:
        ValueError: the checkpoint is damaged, for another target, or has a part that is not supported.
    """
    check_layers_read(files, values.get("hidden_layers", ()), target)
    shape = layer_shape(files, raw, target.vocab)
    is_drafted = files.find("t2d")
    fields = Fields(raw, str(files.folder / CONFIG))
    vocab = fields.integer("vocab_size", default=target.vocab, least=1) if is_drafted is None else len(is_drafted)
    trained_for = target_info(files, target, shape.hidden, vocab, _verifier(files))
    own = OwnTensors.find(files, target, embedding_and_head, values["kind"] != "eagle", mask_token)
    config = config_type(
        target=trained_for, fc_bias=files.has("fc.bias"), **layer_values(files, raw, shape, own), **values
    )
    return convert(files, config, tensor_sources(config), own)


SPECULATORS = CheckpointFormat("speculators", _fits_speculators, _read_speculators)
EAGLE3 = CheckpointFormat("eagle3", _fits_eagle3, _read_eagle3)
EAGLE1 = CheckpointFormat("eagle", _fits_eagle1, _read_eagle1)
