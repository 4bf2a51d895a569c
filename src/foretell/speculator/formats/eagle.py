"""Reads EAGLE checkpoints: SafeAILab's formats of EAGLE-1 and EAGLE-3, and that of the `speculators` library."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.checkpoint import CONFIG
from foretell.speculator.formats.base import CheckpointFormat, ConvertedCheckpoint, target_info
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.formats.keys import LAYER, refuse_other_keys, refuse_other_library_keys
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
    d, e, eagle3 = c.target.hidden, c.head_dim, c.kind != "eagle"
    fc_inputs = len(c.recorded_layers) * d if eagle3 else 2 * d
    out = {"fc.weight": TensorSource(("fc.weight",), (d,), (fc_inputs,))}
    if c.fc_bias or (c.fc_bias is None and not eagle3):
        out["fc.bias"] = TensorSource(("fc.bias",), (d,))
    for i in range(c.layers):
        out |= layer_sources(c, i, d, e, fusing=eagle3 and i == 0, normed=eagle3 or i > 0)
    if eagle3:
        out["norm.weight"] = TensorSource(("norm.weight",), (d,))
    if c.norm_before_fc:
        out["input_norm.weight"] = TensorSource(("input_norm.weight",), (fc_inputs,))
    for i in range(len(c.recorded_layers) if c.fc_norm else 0):
        out[f"fc_norm.{i}.weight"] = TensorSource((f"fc_norm.{i}.weight",), (d,))
    return out


def _fits_speculators(found: PublishedCheckpoint) -> bool:
    return found.config.get("speculators_model_type") is not None or "Eagle3Speculator" in found.architectures


def _fits_eagle3(found: PublishedCheckpoint) -> bool:
    named = any("Eagle3" in a for a in found.architectures)
    return not _fits_speculators(found) and (named or found.has("midlayer.hidden_norm.weight"))


def _fits_eagle1(found: PublishedCheckpoint) -> bool:
    named = any(a in ("EAGLEModel", "EagleLlamaForCausalLM", "EAGLE") for a in found.architectures)
    # Most checkpoints name the class of a language model, which has a first norm and no `fc`.
    bare = found.has("fc.weight") and found.has("layers.0.self_attn.q_proj.weight")
    return not _fits_eagle3(found) and (named or found.config.get("model_type") == "eagle" or bare)


def _read_eagle1(
    found: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    found = found.strip_prefixes("model.")
    raw = found.config.get("model")
    if isinstance(raw, dict):
        refuse_other_keys(found.fields, LAYER, ("model",))
        refuse_other_keys(found.fields.fields("model"), LAYER)
    else:
        raw = found.config
        refuse_other_keys(found.fields, LAYER)
    return convert_layers(found, raw, EagleConfig, {"kind": "eagle"}, target, embedding_and_head)


def _read_eagle3(
    found: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    refuse_other_keys(found.fields, LAYER, EAGLE3_KEYS, ("eagle_config",))
    found, values = read_flat(found)
    return convert_layers(found, found.config, EagleConfig, {"kind": "eagle3", **values}, target, embedding_and_head)


def read_flat(found: PublishedCheckpoint) -> tuple[PublishedCheckpoint, dict[str, Any]]:
    """A checkpoint of EAGLE-3's authors or SpecForge with plain names of its tensors, and its options."""
    own = found.fields.fields("eagle_config")
    refuse_other_keys(own, ("use_aux_hidden_state", _AUX), _OF_MODELOPT, ("parallel_draft_heads_num_layers",))
    for name, plain in _OF_MODELOPT.items():
        if own.raw.get(name) not in (None, plain):
            raise own.wrong(name, f"{plain}: nothing else is supported for EAGLE-3 here", own.raw[name])
    if not own.flag("use_aux_hidden_state", default=True):
        raise own.wrong("use_aux_hidden_state", "true: a draft of the last hidden state alone is not supported", False)
    # `eagle_config` counts a layer's output; Foretell and vLLM count the input of the next layer.
    hidden_layers = [i + 1 for i in own.integers(_AUX)]
    values = _flags(found, hidden_layers)
    # In SpecForge up to 0.2.0 the flag says that the head reads normed states; those that are fed back are not.
    if _SPECFORGE in found.architectures and not found.fields.has("norm_before_residual"):
        values["norm_output"] = False
    return _midlayer(found.strip_prefixes("model.")), values


def _read_speculators(
    found: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    kind = found.config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ValueError(
            f"{found.folder}: speculators of the type {kind!r} are not known here; known: eagle3, peagle, dflash, "
            "dspark"
        )
    layer = library_layer(found)
    refuse_other_library_keys(found.fields, layer, EAGLE3_KEYS)
    found, values = read_library(found)
    return convert_layers(found, layer, EagleConfig, {"kind": "eagle3", **values}, target, embedding_and_head)


def read_library(found: PublishedCheckpoint) -> tuple[PublishedCheckpoint, dict[str, Any]]:
    """A checkpoint of the `speculators` library with plain names of its tensors, and its options."""
    return _midlayer(found), _flags(found, ())


def _midlayer(found: PublishedCheckpoint) -> PublishedCheckpoint:
    renamed = {
        n.replace("midlayer.", "layers.0.") if n.startswith("midlayer.") else n: p for n, p in found.names.items()
    }
    return replace(found, names=renamed)


def _flags(found: PublishedCheckpoint, hidden_layers: Sequence[int]) -> dict[str, Any]:
    """The keys that EAGLE-3's two formats share."""
    return {
        "hidden_layers": found.fields.integers(_AUX) or tuple(hidden_layers),
        **{name: found.fields.flag(name, default=False) for name in FLAGS},
    }


def _verifier(found: PublishedCheckpoint) -> str:
    """The target's name in a checkpoint of the `speculators` library; empty: there is none."""
    library = found.config.get("speculators_config")
    verifier = library.get("verifier") if isinstance(library, dict) else None
    return str(verifier.get("name_or_path") or "") if isinstance(verifier, dict) else ""


def convert_layers(
    found: PublishedCheckpoint,
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
    check_layers_read(found, values.get("hidden_layers", ()), target)
    shape = layer_shape(found, raw, target.vocab)
    is_drafted = found.find("t2d")
    fields = Fields(raw, str(found.folder / CONFIG))
    vocab = fields.integer("vocab_size", default=target.vocab, least=1) if is_drafted is None else len(is_drafted)
    trained_for = target_info(found, target, shape.hidden, vocab, _verifier(found))
    own = OwnTensors.find(found, target, embedding_and_head, values["kind"] != "eagle", mask_token)
    config = config_type(
        target=trained_for, fc_bias=found.has("fc.bias"), **layer_values(found, raw, shape, own), **values
    )
    return convert(found, config, tensor_sources(config), own)


SPECULATORS = CheckpointFormat("speculators", _fits_speculators, _read_speculators)
EAGLE3 = CheckpointFormat("eagle3", _fits_eagle3, _read_eagle3)
EAGLE1 = CheckpointFormat("eagle", _fits_eagle1, _read_eagle1)
