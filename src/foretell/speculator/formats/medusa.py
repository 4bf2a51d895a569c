"""Medusa's heads as FasterDecoding and as vLLM lay them out."""

from pathlib import Path

import torch

from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.speculator.formats.base import (
    Export,
    Format,
    Reading,
    Verifier,
    ascending,
    card,
    dtype_name,
    put,
    refuse_softcap,
    same,
)
from foretell.speculator.formats.files import Published, check_shape
from foretell.speculator.network.base import Speculator, TargetCard
from foretell.speculator.network.medusa import Medusa, MedusaConfig

Names = dict[str, str]
_PREFIXES = ("medusa_heads.", "medusa_head.", "heads.")


def names_of_authors(heads: int, blocks: int) -> Names:
    """Our names to those of FasterDecoding: a head is a sequence of residual blocks that ends with its matrix."""
    return _names(heads, blocks, "{head}.{block}.linear.{part}", f"{{head}}.{blocks}.weight")


def names_of_vllm(heads: int, blocks: int) -> Names:
    """Our names to those of vLLM, which keeps blocks and matrices apart."""
    return _names(heads, blocks, "blocks.{head}.layers.{block}.{part}", "lm_heads.{head}.weight")


def _names(heads: int, blocks: int, residual: str, matrix: str) -> Names:
    """Our names to those that two patterns give."""
    out = {}
    for h in range(heads):
        for i in range(blocks):
            for part in ("weight", "bias"):
                out[f"residual.{h}.{i}.{part}"] = residual.format(head=h, block=i, part=part)
        out[f"own_heads.{h}"] = matrix.format(head=h)
    return out


def _fits_authors(found: Published) -> bool:
    return "medusa_num_heads" in found.config and not _fits_vllm(found)


def _fits_vllm(found: Published) -> bool:
    short = found.without(*_PREFIXES)
    says = found.config.get("model_type") == "medusa" or "MedusaModel" in found.architectures
    return (says and not short.has("0.0.linear.weight")) or short.has("blocks.0.layers.0.weight")


def _read_authors(found: Published, target: TargetCard, ends: EmbeddingAndHead) -> Reading:
    found = found.without(*_PREFIXES)
    heads, blocks = found.number("medusa_num_heads"), found.number("medusa_num_layers", 1)
    first = found.need(f"0.{blocks}.weight")
    vocab, hidden = first.shape if first.ndim == 2 else (target.vocab, target.hidden)
    config = MedusaConfig(target=card(found, target, hidden, vocab), heads=heads, blocks=blocks, own_head=True)
    names = names_of_authors(heads, blocks)
    return Reading(config, {ours: _tensor(found, ours, theirs, hidden, vocab) for ours, theirs in names.items()})


def _read_vllm(found: Published, target: TargetCard, ends: EmbeddingAndHead) -> Reading:
    found = found.without(*_PREFIXES)
    heads = _count(found, "heads", 5)
    blocks = _count(found, "layers", 1, "num_hidden_layers")
    hidden, vocab = found.number("hidden_size"), found.number("vocab_size", target.vocab)
    trained_for = card(found, target, hidden, vocab)
    kept = found.number("truncated_vocab_size", vocab)
    token_map = found.need("token_map", kept) if kept < vocab else None
    names = names_of_vllm(heads, blocks)
    tensors = {o: _tensor(found, o, t, hidden, vocab) for o, t in names.items() if not o.startswith("own_heads")}
    matrices = {o: _matrix(found, t, token_map, vocab, hidden) for o, t in names.items() if o.startswith("own_heads")}
    tokens = None if token_map is None else ascending(token_map)[0]
    if tokens is not None:
        tensors["token_of"] = tokens
    lent = ends.head if tokens is None else ends.head[tokens.to(ends.head.device)]
    own = not all(same(m, lent) for m in matrices.values())
    config = MedusaConfig(
        target=trained_for,
        heads=heads,
        blocks=blocks,
        own_head=own,
        draft_vocab=None if tokens is None else kept,
    )
    return Reading(config, tensors | (matrices if own else {}))


def _matrix(found: Published, name: str, token_map: torch.Tensor | None, vocab: int, hidden: int) -> torch.Tensor:
    """A head's output matrix over the drafted tokens in ascending order; one may serve all heads, and have rows for all
    tokens.
    """
    if found.flag("original_lm_head"):
        name = "lm_head.weight" if found.has("lm_head.weight") else "lm_heads.0.weight"
    matrix = found.need(name)
    if token_map is not None:
        if len(matrix) == vocab:
            matrix = matrix[token_map]
        vocab = len(token_map)
    check_shape(found, name, matrix, vocab, hidden)
    matrix = matrix if token_map is None else matrix[ascending(token_map)[1]]
    scale = found.real("logit_scale", 1.0)
    return matrix if scale == 1 else matrix * scale


def _count(found: Published, what: str, default: int, *first: str) -> int:
    """vLLM takes any key that begins with `num` (perhaps after `medusa_`) and ends in what is counted."""
    for key in (*first, f"num_{what}", f"medusa_num_{what}", f"num_medusa_{what}"):
        if key in found.config:
            return found.number(key)
    return default


def _tensor(found: Published, ours: str, theirs: str, hidden: int, vocab: int) -> torch.Tensor:
    """A tensor by our name; biases may be missing, which is zero."""
    if ours.startswith("own_heads"):
        return found.need(theirs, vocab, hidden)
    if ours.endswith("bias"):
        return found.need(theirs, hidden) if found.has(theirs) else torch.zeros(hidden)
    return found.need(theirs, hidden, hidden)


def _write_vllm(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, Medusa)
    refuse_softcap(network, "vllm-medusa")
    config, state = network.config, network.state_dict()
    assert isinstance(config, MedusaConfig)
    own = bool(len(network.own_heads))
    biased = any(bool(t.any()) for n, t in state.items() if n.startswith("residual.") and n.endswith(".bias"))
    tensors = {}
    for ours, theirs in names_of_vllm(config.heads, config.blocks).items():
        if not ours.startswith("own_heads"):
            if biased or not ours.endswith("bias"):
                tensors[theirs] = state[ours]
        elif own or ours == "own_heads.0":
            tensors[theirs] = state[ours] if own else network.output_matrix.to(network.dtype)
    if network.token_of is not None:
        tensors["token_map"] = network.token_of
    card = network.card
    said = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": verifier.name,
        "hidden_size": card.hidden,
        "vocab_size": card.vocab,
        "truncated_vocab_size": card.vocab if network.token_of is None else len(network.token_of),
        "num_heads": config.heads,
        "num_hidden_layers": config.blocks,
        "medusa_fc_bias": biased,
        "original_lm_head": not own,
        "max_paths": 64,
        "topk": 10,
        "torch_dtype": dtype_name(network),
    }
    put(folder, said, tensors)


AUTHORS = Format("medusa", _fits_authors, _read_authors)
VLLM = Format("vllm-medusa", _fits_vllm, _read_vllm)
TO_VLLM = Export("vllm-medusa", "medusa", _write_vllm)
