"""The formats of Medusa heads: FasterDecoding's and vLLM's."""

from pathlib import Path

import torch

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.readers.unread_keys import refuse_other_keys
from foretell.speculator.formats.base import (
    CheckpointFormat,
    ConvertedCheckpoint,
    ExportFormat,
    Verifier,
    dtype_name,
    is_copy,
    refuse_parts,
    sort_draft_vocab,
    target_info,
    target_rows,
    write_checkpoint,
)
from foretell.speculator.formats.files import PublishedCheckpoint, check_shape
from foretell.speculator.formats.keys import LAYER
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


def _fits_authors(files: PublishedCheckpoint) -> bool:
    return "medusa_num_heads" in files.config and not _fits_vllm(files)


def _fits_vllm(files: PublishedCheckpoint) -> bool:
    short = files.strip_prefixes(*_PREFIXES)
    named = files.config.get("model_type") == "medusa" or "MedusaModel" in files.architectures
    return (named and not short.has("0.0.linear.weight")) or short.has("blocks.0.layers.0.weight")


def _read_authors(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    files = files.strip_prefixes(*_PREFIXES)
    # Beside the model that the heads are for, which some configurations describe whole.
    refuse_other_keys(files.fields, LAYER, _KEYS)
    heads, blocks = files.fields.integer("medusa_num_heads"), files.fields.integer("medusa_num_layers", default=1)
    # Heads of text-generation-inference end in the target's output matrix.
    own = not files.has("0.0.linear.weight") or any(files.has(f"{h}.{blocks}.weight") for h in range(heads))
    first = files.require(f"0.{blocks}.weight" if own else "0.0.linear.weight")
    vocab, hidden = first.shape if own and first.ndim == 2 else (target.vocab, first.shape[-1])
    config = MedusaConfig(target=target_info(files, target, hidden, vocab), heads=heads, blocks=blocks, own_head=own)
    names = {o: t for o, t in author_names(heads, blocks).items() if own or not o.startswith("own_heads")}
    return ConvertedCheckpoint(
        config, {ours: _tensor(files, ours, theirs, hidden, vocab) for ours, theirs in names.items()}
    )


def _read_vllm(
    files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    files = files.strip_prefixes(*_PREFIXES)
    refuse_other_keys(files.fields, LAYER, _KEYS, _VLLM_KEYS)
    heads = _count(files, "heads", 5)
    blocks = _count(files, "layers", 1, "num_hidden_layers")
    hidden, vocab = files.fields.integer("hidden_size"), files.fields.integer("vocab_size", default=target.vocab)
    trained_for = target_info(files, target, hidden, vocab)
    kept = files.fields.integer("truncated_vocab_size", default=vocab)
    token_map = files.require("token_map", kept) if kept < vocab else None
    names = vllm_names(heads, blocks)
    tensors = {o: _tensor(files, o, t, hidden, vocab) for o, t in names.items() if not o.startswith("own_heads")}
    matrices = {o: _matrix(files, t, token_map, vocab, hidden) for o, t in names.items() if o.startswith("own_heads")}
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
    files: PublishedCheckpoint, name: str, token_map: torch.Tensor | None, vocab: int, hidden: int
) -> torch.Tensor:
    """A head's output matrix over the draft vocabulary in ascending order.

    A checkpoint may store one matrix for all heads, and rows for the whole vocabulary.
    """
    if files.fields.flag("original_lm_head", default=False):
        name = "lm_head.weight" if files.has("lm_head.weight") else "lm_heads.0.weight"
    matrix = files.require(name)
    if token_map is not None:
        if len(matrix) == vocab:
            matrix = matrix[token_map]
        vocab = len(token_map)
    check_shape(files, name, matrix, vocab, hidden)
    matrix = matrix if token_map is None else matrix[sort_draft_vocab(token_map)[1]]
    scale = files.fields.number("logit_scale", default=1.0)
    return matrix if scale == 1 else matrix * scale


def _count(files: PublishedCheckpoint, what: str, default: int, *first: str) -> int:
    """A count under any of the key names that vLLM accepts."""
    for key in (*first, f"num_{what}", f"medusa_num_{what}", f"num_medusa_{what}"):
        if key in files.config:
            return files.fields.integer(key)
    return default


def _tensor(files: PublishedCheckpoint, ours: str, theirs: str, hidden: int, vocab: int) -> torch.Tensor:
    """A tensor of the residual blocks or an output matrix; missing biases are zero."""
    if ours.startswith("own_heads"):
        return files.require(theirs, vocab, hidden)
    if ours.endswith("bias"):
        return files.require(theirs, hidden) if files.has(theirs) else torch.zeros(hidden)
    return files.require(theirs, hidden, hidden)


def _write_vllm(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, Medusa)
    refuse_parts(network, "vllm-medusa")
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
            tensors[theirs] = _all_rows(network, state[ours] if own else network.lm_head.to(network.dtype))
    target = network.target_info
    layout = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": verifier.name,
        "hidden_size": target.hidden,
        "vocab_size": target.vocab,
        # The loader of a reduced vocabulary maps no matrix.
        "truncated_vocab_size": target.vocab,
        "num_heads": config.heads,
        "num_hidden_layers": config.blocks,
        "medusa_fc_bias": biased,
        "original_lm_head": not own,
        "max_paths": 64,
        "topk": 10,
        "torch_dtype": dtype_name(network),
    }
    write_checkpoint(folder, layout, tensors)


def _all_rows(network: Medusa, rows: torch.Tensor) -> torch.Tensor:
    """A head's output matrix over the target's whole vocabulary; tokens that are not drafted have the target's rows."""
    if network.token_of is None:
        return rows
    out: torch.Tensor = network.full_lm_head.to(rows, copy=True)
    return out.index_copy(0, network.token_of, rows)


AUTHORS = CheckpointFormat("medusa", _fits_authors, _read_authors)
VLLM = CheckpointFormat("vllm-medusa", _fits_vllm, _read_vllm)
TO_VLLM = ExportFormat("vllm-medusa", "medusa", _write_vllm)
