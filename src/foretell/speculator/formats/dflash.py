"""Reads DFlash checkpoints, those of DSpark, DFlash 2, Domino, XPress and LiLiCorr, which add heads, and
JetSpec's, whose blocks are causal: in their authors' format and in that of the `speculators` library.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.readers.unread_keys import refuse_other_keys
from foretell.speculator.config_file import CONFIG
from foretell.speculator.formats.base import (
    CheckpointFormat,
    ConvertedCheckpoint,
    target_info,
)
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.formats.keys import LAYER, refuse_other_library_keys
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
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.cached_layers import EXTRA_POSITIONS
from foretell.speculator.network.corrections import make_correction
from foretell.speculator.network.dflash import DFlashConfig
from foretell.utils.validation import Fields

ARCHITECTURES = (
    "DFlashDraftModel", "Qwen3DSparkModel", "DSparkDraftModel", "DFlash2DraftModel", "DFlash2BeamDraftModel",
    "MiniMaxDFlash2DraftModel", "LiLiCorrDraftModel",
)  # fmt: skip
_TYPES = ("dflash", "dspark", "dflash2", "xpress")
_MARKOV_IN, _MARKOV_OUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_CONFIDENCE = "confidence_head.proj"
_SLIDING = "sliding_attention"
_LIBRARY_KEYS = (
    "aux_hidden_state_layer_ids", "sample_from_anchor", "sliding_window_non_causal", "mask_token_id", "block_size",
)  # fmt: skip
_HEAD_KEYS = (
    "markov_rank", "markov_head_type", "confidence_head_with_markov", "conv_group_size", "selector_top_k",
    "xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes", "gru_hidden_dim", "emb_dim", "lilicorr_enabled",
    "lilicorr_candidate_topk", "lilicorr_hidden_size", "lilicorr_num_layers", "lilicorr_num_heads",
    "lilicorr_mlp_ratio", "lilicorr_factor_dim", "lilicorr_vector_eps", "lilicorr_logit_scale",
)  # fmt: skip
"""Keys of heads; the tensors say most of what they say."""
_OPTIONS = (
    "is_causal", "causal", "causal_head", "use_swa", "attention_sink_bias", "add_swa_attention_sink_bias",
    "is_neox_style", "projector_type", "shift_label", "pure_draft_prefix_len", "selector_rank", "conv_kernel_size",
    "output_multiplier", "input_embedding_scale", "final_logit_softcapping",
)  # fmt: skip
"""Options that are checked; see `_check_options`."""
_HEADS = {"selector": "candidate_selector.", "domino": "", "refiner": "refiner_head.", "lattice": "lilicorr."}
"""What the names of a correction's tensors begin with."""
_DOMINO = "prefix_gru.weight_hh_l0"
_CONVOLUTION = "layers.{}.{}_conv.{}"


def tensor_sources(c: DFlashConfig) -> dict[str, TensorSource]:
    """The published tensors of every tensor of the network."""
    d, count = c.target.hidden, len(c.recorded_layers)
    outputs = c.draft_vocab or c.target.vocab
    out = {"fc.weight": TensorSource(("fc.weight",), (d,), (count * d,))}
    out |= {f"{n}.weight": TensorSource((f"{n}.weight",), (d,)) for n in ("hidden_norm", "norm")}
    for i in range(c.layers):
        out |= layer_sources(c, i, fusing=False, normed=True)
    if c.markov_rank:
        out["markov_in.weight"] = TensorSource((_MARKOV_IN,), (c.target.vocab,), (c.markov_rank,))
        out["markov_out.weight"] = TensorSource((_MARKOV_OUT,), (outputs,), (c.markov_rank,))
    if c.confidence:
        out["confidence.weight"] = TensorSource((f"{_CONFIDENCE}.weight",), (1,), (d + c.markov_rank,))
        out["confidence.bias"] = TensorSource((f"{_CONFIDENCE}.bias",), (1,))
    for i in range(c.layers if c.convolution else 0):
        for part in ("attention", "mlp"):
            names = [_CONVOLUTION.format(i, part, n) for n in ("base_kernel", "kernel_projection.weight")]
            at, groups = f"layers.{i}.{part}_convolution", -(-d // c.convolution_group)
            out[f"{at}.base"] = TensorSource((names[0],), (2,), (2, d))
            out[f"{at}.dynamic.weight"] = TensorSource((names[1],), (4 * groups,), (d,))
    if c.correction is not None:
        with torch.device("meta"):
            head = make_correction(c.correction, d, c.target.vocab, outputs, c.block_size, c.norm_eps)
        for name, (rows, *rest) in ((name, p.shape) for name, p in head.named_parameters()):
            published = (_HEADS[c.correction.kind] + name,)
            out[f"correction.{name}"] = TensorSource(published, (rows,), tuple(rest))
    return out


def _correction(files: PublishedCheckpoint, own: Fields) -> dict[str, Any] | None:
    """The configuration of the head that the tensors show; `own`: the keys that describe it.

    Raises:
        ValueError: a key is missing that the shapes do not say.
    """

    def shape(name: str) -> torch.Size:
        return files.require(name).shape

    if files.has("candidate_selector.predecessor_codebook"):
        rank = shape("candidate_selector.predecessor_codebook")[1]
        return {"kind": "selector", "rank": rank, "candidates": own.integer("selector_top_k", least=1)}
    if files.has(_DOMINO):
        inner, rank = shape(_DOMINO)[1], shape("embed_proj.0.weight")[0]
        return {"kind": "domino", "inner": inner, "rank": rank, "uncorrected": own.integer("pure_draft_prefix_len")}
    if files.has("refiner_head.token_embed.weight"):
        inner, rank = shape("refiner_head.mlp_gate.weight")
        passes = own.integer("num_jacobi_passes", default=6, least=1)
        return {"kind": "refiner", "rank": rank, "ratio": inner // rank, "passes": passes}
    if files.has("lilicorr.rank_embedding"):
        *_, candidates, width = shape("lilicorr.rank_embedding")
        values = {name: own.number(f"lilicorr_{name}") for name in ("mlp_ratio", "vector_eps", "logit_scale")}
        heads, factors = shape("lilicorr.relative_slot_bias")[0], shape("lilicorr.out_head.weight")[0]
        layers = sum(
            name.startswith("lilicorr.layers.") and name.endswith(".attn.in_proj_bias") for name in files.names
        )
        sizes = {"candidates": candidates, "width": width, "layers": layers, "heads": heads, "factors": factors}
        return {"kind": "lattice", **sizes, **values}
    return None


def _fits_speculators(files: PublishedCheckpoint) -> bool:
    return files.config.get("speculators_model_type") in _TYPES


def _fits_authors(files: PublishedCheckpoint) -> bool:
    return any(a in ARCHITECTURES for a in files.architectures) or "dflash_config" in files.config


def _read_authors(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    files = files.strip_prefixes("model.")
    # LiLiCorr's feed-forward networks, whose parts PyTorch numbers.
    parts = {n.replace("mlp.0.", "mlp.up_proj.").replace("mlp.2.", "mlp.down_proj."): p for n, p in files.names.items()}
    files = replace(files, names=parts)
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
    if files.has(_DOMINO):
        values["predicts_from_anchor"] = Fields({**files.config, **own.raw}, own.source).flag("shift_label")
    # In vLLM and SpecForge the type of a layer decides, unless a flag does; JetSpec has a flag of its own.
    places = [(fields, name) for name in ("is_causal", "causal", "causal_head") for fields in (files.fields, own)]
    flags = [fields.flag(name) for fields, name in places if fields.has(name)]
    values["window_causal"] = flags[0] if flags else _SLIDING in files.fields.texts("layer_types")
    read = _read(files, files.config, values, target, embedding_and_head)
    keys = (*_HEAD_KEYS, *_OPTIONS, "target_layer_ids", "mask_token_id", "block_size")
    refuse_other_keys(files.fields, LAYER, ("dflash_config", "num_target_layers"), keys)
    refuse_other_keys(own, ("attention_mode",), keys)
    return read


def _read_speculators(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    layer = library_layer(files)
    kind = files.config.get("speculators_model_type")
    sliding = _SLIDING in Fields(layer, files.fields.source).texts("layer_types")
    values = {
        "window_from_anchor": sliding,
        "window_causal": sliding and not files.fields.flag("sliding_window_non_causal", default=kind == "dflash2"),
        "hidden_layers": files.fields.integers("aux_hidden_state_layer_ids"),
        "mask_token": files.fields.integer("mask_token_id"),
        "block_size": files.fields.integer("block_size"),
        "predicts_from_anchor": files.fields.flag("sample_from_anchor", default=kind == "dspark"),
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
    if not values["hidden_layers"]:
        raise ValueError(f"{files.folder / CONFIG}: it names no layers of its target that it reads; is it complete?")
    check_layers_read(files, values["hidden_layers"], target)
    check_mask_token_read(files, values["mask_token"], target)
    markov = files.find(_MARKOV_IN)
    trained_for = target_info(files, target, shape.hidden, target.vocab if markov is None else len(markov))
    own = OwnTensors.find(files, target, embedding_and_head)
    keys = Fields({**files.config, **files.fields.fields("dflash_config").raw}, files.fields.source)
    convolution = files.has(_CONVOLUTION.format(0, "attention", "base_kernel"))
    layers = layer_values(files, raw, shape, own)
    if values["window_causal"] and not layers.get("window_layers"):
        layers |= {"window": shape.context + EXTRA_POSITIONS, "window_layers": tuple(range(shape.layers))}
    config = DFlashConfig(
        target=trained_for,
        markov_rank=0 if markov is None else markov.shape[1],
        confidence=files.has(f"{_CONFIDENCE}.weight"),
        convolution=convolution,
        convolution_group=keys.integer("conv_group_size", least=1) if convolution else 16,
        correction=_correction(files, keys),
        **layers,
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
    """
    own = {**raw, **files.config, **files.fields.fields("dflash_config").raw}
    markov, types = files.has(_MARKOV_IN), Fields(raw, files.fields.source).texts("layer_types")
    domino = files.has(_DOMINO)
    library = "speculators_model_type" in files.config
    mixed = len(set(types)) > 1 or (library and _SLIDING not in types) or (not types and own.get("use_sliding_window"))
    causal = (False,) if mixed else (False, True)
    with_bias = any(name.endswith("attention_sink_bias") for name in files.names)
    selector = files.find("candidate_selector.predecessor_codebook")
    supported: dict[str, tuple[object, ...]] = {
        "is_causal": causal,
        "causal": causal,
        "causal_head": causal,
        "use_swa": (False,),
        "attention_sink_bias": (with_bias,),
        "add_swa_attention_sink_bias": (with_bias,),
        "is_neox_style": (True,),
        "projector_type": ("domino",) if domino else _TYPES,
        "shift_label": (values["predicts_from_anchor"],),
        "pure_draft_prefix_len": (own.get("pure_draft_prefix_len"),) if domino else (0,),
        "selector_rank": (0,) if selector is None else (selector.shape[1],),
        "conv_kernel_size": (2,) if files.has(_CONVOLUTION.format(0, "attention", "base_kernel")) else (0,),
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


AUTHORS = CheckpointFormat("dflash", _fits_authors, _read_authors)
SPECULATORS = CheckpointFormat("speculators-dflash", _fits_speculators, _read_speculators)
