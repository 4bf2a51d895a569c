"""Writes DFlash, DSpark, DFlash 2, Domino, XPress and LiLiCorr in the format of their authors and in that of the
`speculators` library.
"""

from pathlib import Path
from typing import Any

import torch

from foretell.speculator.formats.base import ExportFormat, Verifier, dtype_name, write_checkpoint
from foretell.speculator.formats.dflash import tensor_sources
from foretell.speculator.formats.eagle_export import layer_config, library_frame, mask_token, vocabulary
from foretell.speculator.formats.layers import refuse_parts_of_layers
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.corrections import DominoConfig, RefinerConfig, SelectorConfig
from foretell.speculator.network.dflash import DFlash, DFlashConfig
from foretell.speculator.network.lattice import LatticeConfig

_BESIDE = ("selector", "lattice")
"""Corrections beside which other engines read convolutions."""


def check_exported(network: DFlash, format_name: str) -> None:
    """Refuse a network with a part that the format does not support.

    Raises:
        ValueError: it has one.
    """
    c, library = network.config, format_name == "speculators"
    kind = "" if c.correction is None else c.correction.kind
    known_heads = {"speculators": ("selector", "refiner"), "dflash": ("selector", "domino", "lattice")}
    of_dspark = bool(c.markov_rank or c.confidence)
    from_anchor = " (--set predicts_from_anchor=true, or markov_rank=0 and confidence=false)"
    unsupported = (
        ("norms of the fused states", c.fc_norm, " (--set fc_norm=false)"),
        ("layers without norms of queries and keys", not c.qk_norm, " (--set qk_norm=true)"),
        ("the target's state after its final norm", c.target.layers + 1 in c.recorded_layers, ""),
        ("the target's embeddings as a hidden state", 0 in c.recorded_layers, ""),
        ("biases of queries, keys and values", c.qkv_bias, ""),
        (f"a {kind} over tokens", kind not in ("", *known_heads.get(format_name, ("selector",))), ""),
        ("a selector without a convolution", kind == "selector" and not c.convolution, " (--set convolution=true)"),
        ("a convolution over slots", c.convolution and kind not in _BESIDE, " (--set convolution=false)"),
        ("groups of channels of unequal size", c.convolution and c.target.hidden % c.convolution_group > 0, ""),
        ("a first slot that predicts", c.predicts_from_anchor and kind == "selector" and not library, ""),
        (
            "heads of DSpark beside a first slot that predicts nothing",
            of_dspark and not c.predicts_from_anchor and format_name == "dflash",
            from_anchor,
        ),
    )
    refuse_parts_of_layers(network, format_name, unsupported, has_sink_bias=not library)


def published_tensors(network: DFlash, mask_token: int) -> dict[str, torch.Tensor]:
    """The tensors under their published names. A learned mask stands in the row of its token, in an embedding of the
    checkpoint's own.
    """
    c, state, tensors = network.config, network.state_dict(), dict[str, torch.Tensor]()
    for ours, part in tensor_sources(c).items():
        tensors |= dict(zip(part.names, state[ours].split(part.rows), strict=True))
    if c.own_head or c.draft_vocab is not None:
        tensors |= vocabulary(network, always_maps=False)
    if network.mask is not None:
        embedding = network.embed(torch.arange(c.target.vocab, device=network.device)).clone()
        embedding[mask_token] = network.mask.to(embedding)
        tensors["embed_tokens.weight"] = embedding
    elif network.embedding is not None:
        tensors["embed_tokens.weight"] = network.embedding
    return tensors


def head_keys(c: DFlashConfig) -> dict[str, Any]:
    """Keys that describe the correction and the convolution, as the authors' code reads them."""
    out: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": c.convolution_group} if c.convolution else {}
    match c.correction:
        case SelectorConfig() as head:
            out |= {"selector_rank": head.rank, "selector_top_k": head.candidates}
        case DominoConfig() as head:
            out |= {"projector_type": "domino", "shift_label": c.predicts_from_anchor}
            out |= {"pure_draft_prefix_len": head.uncorrected, "gru_hidden_dim": head.inner, "emb_dim": head.rank}
        case RefinerConfig() as head:
            out |= {"xpress_rank": head.rank, "xpress_mlp_ratio": head.ratio, "num_jacobi_passes": head.passes}
        case LatticeConfig() as head:
            width = 0 if head.width == c.target.hidden else head.width
            sizes = {"candidate_topk": head.candidates, "hidden_size": width, "num_layers": head.layers}
            sizes |= {"num_heads": head.heads, "factor_dim": head.factors, "enabled": True}
            same = head.model_dump(include={"mlp_ratio", "vector_eps", "logit_scale"})
            out |= {f"lilicorr_{name}": value for name, value in (sizes | same).items()}
    return out


def _dspark_keys(c: DFlashConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"markov_rank": c.markov_rank, "markov_head_type": "vanilla"} if c.markov_rank else {}
    if c.confidence:
        out |= {"enable_confidence_head": True, "confidence_head_with_markov": bool(c.markov_rank)}
    return out


def _write_authors(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, DFlash)
    check_exported(network, "dflash")
    c, mask = network.config, mask_token(network)
    tensors = published_tensors(network, mask)
    plain = "Qwen3DSparkModel" if c.predicts_from_anchor and c.correction is None else "DFlashDraftModel"
    named = {"selector": "DFlash2DraftModel", "lattice": "LiLiCorrDraftModel"}
    layout = {
        "architectures": [plain if c.correction is None else named.get(c.correction.kind, plain)],
        **layer_config(c.model_copy(update={"window": 0}) if c.causal else c, dtype_name(network)),
        "base_model_name_or_path": verifier.name,
        "num_target_layers": c.target.layers,
        "block_size": c.block_size,
        **({"is_causal": True} if c.causal else {}),  # read by vLLM and SGLang; JetSpec reads `causal_head`
        "dflash_config": {
            "mask_token_id": mask,
            "target_layer_ids": [layer - 1 for layer in c.recorded_layers],
            # Without the flag other engines read windows as causal, with it all layers.
            **({} if not c.window or c.window_causal else {"causal": False}),
            **({"causal": True, "causal_head": True} if c.causal else {}),
            **({"attention_sink_bias": True} if c.sink_layers else {}),
            **head_keys(c),
        },
        **_dspark_keys(c),
    }
    if c.draft_vocab is not None:
        layout["draft_vocab_size"] = c.draft_vocab
    write_checkpoint(folder, layout, tensors)


def _write_speculators(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, DFlash)
    check_exported(network, "speculators")
    c, mask = network.config, mask_token(network)
    named = {"selector": ("dflash2", "DFlash2DraftModel"), "refiner": ("xpress", "XPressSpeculator")}
    plain = ("dspark", "DSparkSpeculator") if c.markov_rank or c.confidence else ("dflash", "DFlashSpeculator")
    kind, architecture = plain if c.correction is None else named[c.correction.kind]
    layout = {
        **library_frame(verifier, kind, architecture, c.depth),
        "transformer_layer_config": layer_config(c, dtype_name(network)),
        "draft_vocab_size": c.draft_vocab or c.target.vocab,
        "block_size": c.block_size,
        "aux_hidden_state_layer_ids": list(c.recorded_layers),
        "mask_token_id": mask,
        "sliding_window_non_causal": not c.window_causal,
        "sample_from_anchor": c.predicts_from_anchor,
        **({"markov_rank": 0, "enable_confidence_head": False} if kind == "dspark" else {}),
        **head_keys(c),
        **_dspark_keys(c),
        "torch_dtype": dtype_name(network),
    }
    write_checkpoint(folder, layout, published_tensors(network, mask))


TO_AUTHORS = ExportFormat("dflash", "dflash", _write_authors)
TO_SPECULATORS = ExportFormat("speculators", "dflash", _write_speculators)
