"""P-EAGLE checkpoints: those of the `speculators` library, and those of AWS and NVIDIA in EAGLE-3's layout."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.readers.unread_keys import refuse_other_keys
from foretell.speculator.formats.base import (
    CheckpointFormat,
    ConvertedCheckpoint,
    ExportFormat,
    Verifier,
    write_checkpoint,
)
from foretell.speculator.formats.eagle import EAGLE3_KEYS, convert_layers, read_flat, read_library
from foretell.speculator.formats.eagle_export import (
    before_final_norm,
    check_exported,
    library_config,
    mask_token,
    vocabulary,
    weights,
)
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.formats.keys import LAYER, refuse_other_library_keys
from foretell.speculator.formats.layers import check_mask_token_read, library_layer
from foretell.speculator.network.base import Speculator, TargetInfo
from foretell.speculator.network.p_eagle import PEagle, PEagleConfig
from foretell.utils.validation import Fields

_ARCHITECTURES = ("PEagleSpeculator", "PEagleDraftModel")
_MASK_STATES = "mask_hidden"
_MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_PARALLEL = "parallel_drafting"
_DEPTHS = ("num_depths", "num_speculative_tokens")
_DEFAULT_DEPTH = 8
"""Tokens of a draft where a checkpoint does not say for how many it was trained: the fewest of AWS's models."""


def _fits_library(files: PublishedCheckpoint) -> bool:
    named = any(a in _ARCHITECTURES for a in files.architectures) and "transformer_layer_config" in files.config
    return named or files.config.get("speculators_model_type") == "peagle"


def _fits_flat(files: PublishedCheckpoint) -> bool:
    return files.has(_MASK_STATES) or files.has(f"model.{_MASK_STATES}")


def _read_library(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    refuse_other_library_keys(files.fields, library_layer(files), EAGLE3_KEYS, _MASK_TOKEN_KEYS)
    files, values = read_library(files)
    depth = _proposed_tokens(files)
    return _read(files, library_layer(files), values | {"depth": depth}, target, embedding_and_head)


def _read_flat(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    refuse_other_keys(files.fields, LAYER, EAGLE3_KEYS, ("eagle_config", _PARALLEL), _MASK_TOKEN_KEYS, _DEPTHS)
    if not files.fields.flag(_PARALLEL, default=True):
        raise files.fields.wrong(_PARALLEL, f"true in a checkpoint with {_MASK_STATES}", False)
    files, values = read_flat(files)
    depth = files.fields.integer(*_DEPTHS, default=_DEFAULT_DEPTH)
    return _read(files, files.config, values | {"depth": depth}, target, embedding_and_head)


def _proposed_tokens(files: PublishedCheckpoint) -> int:
    """Tokens that the library proposes, which is what it was trained for."""
    library = files.config.get("speculators_config")
    methods = library.get("proposal_methods") if isinstance(library, dict) else None
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    return Fields(first, files.fields.source, "speculators_config.proposal_methods[0].").integer(
        "speculative_tokens", default=_DEFAULT_DEPTH
    )


def _read(
    files: PublishedCheckpoint,
    raw: Mapping[str, Any],
    values: Mapping[str, Any],
    target: TargetInfo,
    embedding_and_head: EmbeddingAndHead,
) -> ConvertedCheckpoint:
    """The layers, and the mask's embedding and hidden states under Foretell's names."""
    mask_token = files.fields.integer(*_MASK_TOKEN_KEYS)
    check_mask_token_read(files, mask_token, target)
    states = files.require(_MASK_STATES).flatten()
    layers = replace(files, names={name: place for name, place in files.names.items() if name != _MASK_STATES})
    values = {"kind": "p_eagle", "mask_token": mask_token, **values}
    read = convert_layers(layers, raw, PEagleConfig, values, target, embedding_and_head, mask_token)
    assert isinstance(read.config, PEagleConfig)
    width = len(read.config.recorded_layers) * target.hidden
    if len(states) != width:
        raise ValueError(
            f"{files.folder}: {_MASK_STATES} has {len(states)} numbers, and its configuration asks for {width}"
        )
    own = files.find("embed_tokens.weight")
    shared = embedding_and_head.embedding[mask_token] * embedding_and_head.embedding_scale
    mask = shared if own is None else own[mask_token]
    return ConvertedCheckpoint(read.config, {**read.tensors, "mask": mask, "mask_states": states})


def _write(network: Speculator, verifier: Verifier, folder: Path) -> None:
    """The mask's embedding stands in the row of its token, so the checkpoint has an embedding of its own."""
    assert isinstance(network, PEagle)
    network = before_final_norm(network, verifier)
    check_exported(network, "speculators")
    c, token = network.config, mask_token(network)
    tensors = weights(network, always_embedding=True) | vocabulary(network, always_maps=False)
    embedding = tensors["embed_tokens.weight"].clone()
    embedding[token] = network.mask.to(embedding)
    tensors |= {"embed_tokens.weight": embedding, _MASK_STATES: network.mask_states[None, None]}
    layout = library_config(network, verifier, "peagle", _ARCHITECTURES[0], c.depth)
    write_checkpoint(folder, layout | {"mask_token_id": token, "embed_requires_grad": True}, tensors)


LIBRARY = CheckpointFormat("speculators-peagle", _fits_library, _read_library)
FLAT = CheckpointFormat("p-eagle", _fits_flat, _read_flat)
TO_SPECULATORS = ExportFormat("speculators", "p_eagle", _write)
