"""The formats of Medusa heads: FasterDecoding's and vLLM's."""

from pathlib import Path

import torch

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.formats.base import (
    CheckpointFormat,
    ConvertedCheckpoint,
    ExportFormat,
    Verifier,
    dtype_name,
    is_copy,
    refuse_softcap,
    sort_draft_vocab,
    target_info,
    target_rows,
    write_checkpoint,
)
from foretell.speculator.formats.files import PublishedCheckpoint, check_shape
from foretell.speculator.formats.keys import LAYER, refuse_other_keys
from foretell.speculator.network.base import Speculator, TargetInfo
from foretell.speculator.network.medusa import Medusa, MedusaConfig

Names = dict[str, str]
_KEYS = ("medusa_num_heads", "medusa_num_layers", "version", "medusa_choices")
"""Keys of the authors; the last two describe their code and its trees."""
_VLLM_KEYS = (
    "num_heads", "num_medusa_heads", "num_layers", "num_medusa_layers", "logit_scale", "original_lm_head",
    "medusa_fc_bias", "max_paths", "topk", "max_seq_len",
)  # fmt: skip
"""The last three and `medusa_fc_bias`, which the tensors say, too, change no prediction."""
_PREFIXES = ("medusa_heads.", "medusa_head.", "heads.")


def author_names(heads: int, blocks: int) -> Names:
    """Foretell's tensor names to FasterDecoding's: a head is a sequence of residual blocks and an output matrix."""
    return _names(heads, blocks, "{head}.{block}.linear.{part}", f"{{head}}.{blocks}.weight")


def vllm_names(heads: int, blocks: int) -> Names:
    """Foretell's tensor names to vLLM's, which stores blocks and output matrices separately."""
    return _names(heads, blocks, "blocks.{head}.layers.{block}.{part}", "lm_heads.{head}.weight")


def _names(heads: int, blocks: int, residual: str, matrix: str) -> Names:
    """Foretell's tensor names to those of two patterns."""
    out = {}
    for h in range(heads):
        for i in range(blocks):
            for part in ("weight", "bias"):
                out[f"residual.{h}.{i}.{part}"] = residual.format(head=h, block=i, part=part)
        out[f"own_heads.{h}"] = matrix.format(head=h)
    return out


def _fits_authors(found: PublishedCheckpoint) -> bool:
    return "medusa_num_heads" in found.config and not _fits_vllm(found)


def _fits_vllm(found: PublishedCheckpoint) -> bool:
    short = found.strip_prefixes(*_PREFIXES)
    named = found.config.get("model_type") == "medusa" or "MedusaModel" in found.architectures
    return (named and not short.has("0.0.linear.weight")) or short.has("blocks.0.layers.0.weight")


def _read_authors(
    found: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    found = found.strip_prefixes(*_PREFIXES)
    # Beside the model that the heads are for, which some configurations describe whole.
    refuse_other_keys(found.fields, LAYER, _KEYS)
    heads, blocks = found.fields.integer("medusa_num_heads"), found.fields.integer("medusa_num_layers", default=1)
    # Heads of text-generation-inference end in the target's output matrix.
    own = not found.has("0.0.linear.weight") or any(found.has(f"{h}.{blocks}.weight") for h in range(heads))
    first = found.require(f"0.{blocks}.weight" if own else "0.0.linear.weight")
    vocab, hidden = first.shape if own and first.ndim == 2 else (target.vocab, first.shape[-1])
    config = MedusaConfig(target=target_info(found, target, hidden, vocab), heads=heads, blocks=blocks, own_head=own)
    names = {o: t for o, t in author_names(heads, blocks).items() if own or not o.startswith("own_heads")}
    return ConvertedCheckpoint(
        config, {ours: _tensor(found, ours, theirs, hidden, vocab) for ours, theirs in names.items()}
    )


def _read_vllm(
    found: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    found = found.strip_prefixes(*_PREFIXES)
    refuse_other_keys(found.fields, LAYER, _KEYS, _VLLM_KEYS)
    heads = _count(found, "heads", 5)
    blocks = _count(found, "layers", 1, "num_hidden_layers")
    hidden, vocab = found.fields.integer("hidden_size"), found.fields.integer("vocab_size", default=target.vocab)
    trained_for = target_info(found, target, hidden, vocab)
    kept = found.fields.integer("truncated_vocab_size", default=vocab)
    token_map = found.require("token_map", kept) if kept < vocab else None
    names = vllm_names(heads, blocks)
    tensors = {o: _tensor(found, o, t, hidden, vocab) for o, t in names.items() if not o.startswith("own_heads")}
    matrices = {o: _matrix(found, t, token_map, vocab, hidden) for o, t in names.items() if o.startswith("own_heads")}
    tokens = None if token_map is None else sort_draft_vocab(token_map)[0]
    if tokens is not None:
        tensors["token_of"] = tokens
    shared = target_rows(embedding_and_head, tokens)
    own = not all(is_copy(m, shared) for m in matrices.values())
    config = MedusaConfig(
        target=trained_for,
        heads=heads,
        blocks=blocks,
        own_head=own,
        draft_vocab=None if tokens is None else kept,
    )
    return ConvertedCheckpoint(config, tensors | (matrices if own else {}))


def _matrix(
    found: PublishedCheckpoint, name: str, token_map: torch.Tensor | None, vocab: int, hidden: int
) -> torch.Tensor:
    """A head's output matrix over the draft vocabulary in ascending order.

    A checkpoint may store one matrix for all heads, and rows for the whole vocabulary.
    """
    if found.fields.flag("original_lm_head", default=False):
        name = "lm_head.weight" if found.has("lm_head.weight") else "lm_heads.0.weight"
    matrix = found.require(name)
    if token_map is not None:
        if len(matrix) == vocab:
            matrix = matrix[token_map]
        vocab = len(token_map)
    check_shape(found, name, matrix, vocab, hidden)
    matrix = matrix if token_map is None else matrix[sort_draft_vocab(token_map)[1]]
    scale = found.fields.number("logit_scale", default=1.0)
    return matrix if scale == 1 else matrix * scale


def _count(found: PublishedCheckpoint, what: str, default: int, *first: str) -> int:
    """A count under any of the key names that vLLM accepts."""
    for key in (*first, f"num_{what}", f"medusa_num_{what}", f"num_medusa_{what}"):
        if key in found.config:
            return found.fields.integer(key)
    return default


def _tensor(found: PublishedCheckpoint, ours: str, theirs: str, hidden: int, vocab: int) -> torch.Tensor:
    """A tensor of the residual blocks or an output matrix; missing biases are zero."""
    if ours.startswith("own_heads"):
        return found.require(theirs, vocab, hidden)
    if ours.endswith("bias"):
        return found.require(theirs, hidden) if found.has(theirs) else torch.zeros(hidden)
    return found.require(theirs, hidden, hidden)


def _write_vllm(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, Medusa)
    refuse_softcap(network, "vllm-medusa")
    config, state = network.config, network.state_dict()
    assert isinstance(config, MedusaConfig)
    own = bool(len(network.own_heads))
    biased = any(bool(t.any()) for n, t in state.items() if n.startswith("residual.") and n.endswith(".bias"))
    tensors = {}
    for ours, theirs in vllm_names(config.heads, config.blocks).items():
        if not ours.startswith("own_heads"):
            if biased or not ours.endswith("bias"):
                tensors[theirs] = state[ours]
        elif own or ours == "own_heads.0":
            tensors[theirs] = state[ours] if own else network.lm_head.to(network.dtype)
    if network.token_of is not None:
        tensors["token_map"] = network.token_of
    target = network.target_info
    layout = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": verifier.name,
        "hidden_size": target.hidden,
        "vocab_size": target.vocab,
        "truncated_vocab_size": target.vocab if network.token_of is None else len(network.token_of),
        "num_heads": config.heads,
        "num_hidden_layers": config.blocks,
        "medusa_fc_bias": biased,
        "original_lm_head": not own,
        "max_paths": 64,
        "topk": 10,
        "torch_dtype": dtype_name(network),
    }
    write_checkpoint(folder, layout, tensors)


AUTHORS = CheckpointFormat("medusa", _fits_authors, _read_authors)
VLLM = CheckpointFormat("vllm-medusa", _fits_vllm, _read_vllm)
TO_VLLM = ExportFormat("vllm-medusa", "medusa", _write_vllm)
