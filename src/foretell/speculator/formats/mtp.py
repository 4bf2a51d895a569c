"""Layers of multi-token prediction that were trained apart: with the names of their target's checkpoints, and those of
the `speculators` library.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.block.modules import to_weights
from foretell.model.block.weights import tensors_of
from foretell.model.config.families import family_of
from foretell.model.config.families.base import PredictionNames
from foretell.model.config.model import RopeConfig
from foretell.model.config.readers.hf import from_hf
from foretell.model.config.readers.unread_keys import refuse_other_keys
from foretell.model.load.mtp import layers_like, predicting_kinds, read_layers
from foretell.model.load.weights import SafetensorsWeights
from foretell.speculator.checkpoint import write_weights
from foretell.speculator.config_file import CONFIG
from foretell.speculator.formats.base import (
    CheckpointFormat,
    ConvertedCheckpoint,
    ExportFormat,
    Verifier,
    dtype_name,
    refuse_other_tensors,
    rope_config,
    target_info,
    write_checkpoint,
)
from foretell.speculator.formats.eagle_export import library_frame
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.formats.keys import LIBRARY
from foretell.speculator.formats.layers import library_layer
from foretell.speculator.network.base import Speculator, TargetInfo
from foretell.speculator.network.mtp import NORMS, AssistantNetwork, MTPConfig, MTPNetwork

_AT = "mtp_layers.0."
_LIBRARY = PredictionNames(
    _AT, f"{_AT}final_layernorm", f"{_AT}input_proj", f"{_AT}token_layernorm", f"{_AT}hidden_layernorm"
)
_UNUSED = ("embed_tokens", "lm_head", "t2d", "d2t")
"""What tensors of the library begin with that are copies of the target's."""
_PROPOSED = 3
"""Tokens of a draft that the library's configuration proposes, its trainer's."""
_FILE = "mtp.safetensors"


def _tensors(network: MTPNetwork, names: PredictionNames) -> dict[str, Float[torch.Tensor, "*shape"]]:
    """The tensors of all layers under their published names."""
    c, out = network.config.model, dict[str, torch.Tensor]()
    for k, (block, part) in enumerate(zip(network.blocks, network.parts, strict=True)):
        each, at = names.of_module(k), f"model.layers.{k}."
        out |= {name.replace(at, each.layer, 1): t for name, t in tensors_of(c, k, to_weights(block)).items()}
        out[f"{each.combine}.weight"] = part.combine.weight
        out |= {f"{getattr(each, name)}.weight": getattr(part, name).weight - c.norm_offset for name in NORMS}
    return {name: tensor.detach().to("cpu", network.dtype).clone() for name, tensor in out.items()}


def _write_hf(network: Speculator, verifier: Verifier, folder: Path) -> None:
    """The file that stands beside those of the target, or in place of its layers."""
    assert isinstance(network, MTPNetwork)
    kind, layers = verifier.config.architecture, verifier.config.layers
    names = family_of(kind).prediction(kind, layers)
    if names is None or names.before_norm:
        raise ValueError(
            f"checkpoints of {kind} have no names for layers of multi-token prediction such as these; those of "
            f"{predicting_kinds(trained=True)} have"
        )
    if network.layers > 1 and not names.several:
        raise ValueError(
            f"checkpoints of {kind} have one layer of multi-token prediction, and here are {network.layers}"
        )
    tensors = _tensors(network, names)
    if names.several:
        embedding, head = (network.get_buffer("_embedding"), network.full_lm_head)
        for k in range(network.layers):
            at = names.of_module(k).layer
            tensors |= {f"{at}{name}.weight": t.detach().to("cpu", network.dtype).clone()
                        for name, t in (("embed_tokens", embedding), ("shared_head.head", head))}  # fmt: skip
    write_weights(folder, tensors, _FILE)


def _write_library(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, MTPNetwork)
    c = verifier.config
    if c.architecture != "qwen3" or network.layers > 1:
        raise ValueError(
            f"the format speculators is written for one layer of multi-token prediction of qwen3, and here are "
            f"{network.layers} of {c.architecture}; the library converts those of Qwen3-Next and Qwen3.5 from their "
            "checkpoints (--format hf)"
        )
    layer: dict[str, Any] = {
        "model_type": c.architecture, "vocab_size": c.vocab, "hidden_size": c.hidden, "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim,
        "intermediate_size": c.ffn, "max_position_embeddings": c.context, "rms_norm_eps": c.norm_eps,
        "attention_bias": c.qkv_bias, "tie_word_embeddings": c.tied, **rope_config(c.rope or RopeConfig()),
    }  # fmt: skip
    layout = library_frame(verifier, "mtp", "MTPDraftModel", _PROPOSED)
    more = {"transformer_layer_config": layer, "num_nextn_predict_layers": 1, "torch_dtype": dtype_name(network)}
    write_checkpoint(folder, layout | more, _tensors(network, _LIBRARY))


def _read_library(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    refuse_other_keys(files.fields, LIBRARY, ("num_nextn_predict_layers",))
    count = files.fields.integer("num_nextn_predict_layers", default=1)
    if count != 1:
        raise files.fields.wrong("num_nextn_predict_layers", "1, as the library has it", count)
    whole = from_hf(dict(library_layer(files)), str(files.folder / CONFIG))
    layers = read_layers(whole, SafetensorsWeights(files.folder), _LIBRARY)
    if not layers:
        raise ValueError(f"{files.folder}: the checkpoint lacks {_LIBRARY.combine}.weight; is it complete?")
    config = MTPConfig(target=target_info(files, target, whole.hidden, whole.vocab), model=layers_like(whole, 1))
    network = MTPNetwork(config, embedding_and_head)
    network.init_from_layers(layers)
    stacked = [f"{_AT}{name}" for name in family_of(whole.architecture).stacked_names]
    refuse_other_tensors(files, {*_tensors(network, _LIBRARY), *stacked}, lambda name: name.startswith(_UNUSED))
    return ConvertedCheckpoint(config, network.state_dict())


def _rope(rope: RopeConfig | None) -> dict[str, Any]:
    if rope is None or rope.divisors or rope.factor != 1:
        raise ValueError("the rotary positions of a target in GGUF, or scaled ones, have no place in this format")
    return {"rope_type": rope.kind, "rope_theta": rope.theta, "partial_rotary_factor": rope.fraction}


def _write_assistant(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, AssistantNetwork)
    c, full, sliding = network.model, "full_attention", "sliding_attention"
    text = {
        "model_type": c.architecture, "vocab_size": c.vocab, "hidden_size": c.hidden, "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers, "num_kv_shared_layers": c.layers, "num_attention_heads": c.heads,
        "num_key_value_heads": c.local_kv_heads, "num_global_key_value_heads": c.kv_heads, "head_dim": c.local_head_dim,
        "global_head_dim": c.head_dim, "attention_k_eq_v": c.values_are_keys, "attention_bias": c.qkv_bias,
        "rms_norm_eps": c.norm_eps, "sliding_window": c.window, "max_position_embeddings": c.context,
        "layer_types": [sliding if c.window_of(i) else full for i in range(c.layers)],
        "rope_parameters": {full: _rope(c.rope), sliding: _rope(c.local_rope)}, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "bos_token_id": c.bos, "eos_token_id": list(c.eos),
    }  # fmt: skip
    raw = {
        "architectures": [f"Gemma4{'Unified' * ('unified' in c.architecture)}AssistantForCausalLM"],
        "model_type": c.architecture.replace("_text", "_assistant"), "text_config": text, "tie_word_embeddings": True,
        "backbone_hidden_size": network.target_info.hidden, "torch_dtype": dtype_name(network),
    }  # fmt: skip
    write_checkpoint(folder, raw, network.tensors())


SPECULATORS = CheckpointFormat(
    "speculators-mtp", lambda files: files.config.get("speculators_model_type") == "mtp", _read_library
)
TO_SPECULATORS = ExportFormat("speculators", "mtp", _write_library)
HF = ExportFormat("hf", "mtp", _write_hf)
ASSISTANT = ExportFormat("hf", "assistant", _write_assistant)
