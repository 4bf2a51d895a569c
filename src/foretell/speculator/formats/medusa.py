"""Medusa's heads as FasterDecoding and as vLLM lay them out."""

import torch

from foretell.draft.network.base import TargetCard
from foretell.draft.network.medusa import MedusaConfig
from foretell.model.ends import Ends
from foretell.speculator.formats.base import Format, Reading, ascending, card
from foretell.speculator.formats.files import Published

Names = dict[str, str]
_PREFIXES = ("medusa_heads.", "medusa_head.", "heads.")


def names_of_authors(heads: int, blocks: int) -> Names:
    """Our names to those of FasterDecoding: a head is a sequence of residual blocks that ends with its matrix."""
    out = {}
    for h in range(heads):
        for i in range(blocks):
            for part in ("weight", "bias"):
                out[f"residual.{h}.{i}.{part}"] = f"{h}.{i}.linear.{part}"
        out[f"own_heads.{h}"] = f"{h}.{blocks}.weight"
    return out


def names_of_vllm(heads: int, blocks: int) -> Names:
    """Our names to those of vLLM, which keeps blocks and matrices apart."""
    out = {}
    for h in range(heads):
        for i in range(blocks):
            for part in ("weight", "bias"):
                out[f"residual.{h}.{i}.{part}"] = f"blocks.{h}.layers.{i}.{part}"
        out[f"own_heads.{h}"] = f"lm_heads.{h}.weight"
    return out


def _fits_authors(found: Published) -> bool:
    return "medusa_num_heads" in found.config and not _fits_vllm(found)


def _fits_vllm(found: Published) -> bool:
    short = found.without(*_PREFIXES)
    says = found.config.get("model_type") == "medusa" or "MedusaModel" in found.architectures
    return (says and not short.has("0.0.linear.weight")) or short.has("blocks.0.layers.0.weight")


def _read_authors(found: Published, target: TargetCard, ends: Ends) -> Reading:
    found = found.without(*_PREFIXES)
    heads, blocks = found.number("medusa_num_heads"), found.number("medusa_num_layers", 1)
    vocab, hidden = found.need(f"0.{blocks}.weight").shape
    config = MedusaConfig(target=card(found, target, hidden, vocab), heads=heads, blocks=blocks, own_head=True)
    names = names_of_authors(heads, blocks)
    return Reading(config, {ours: _tensor(found, ours, theirs, hidden, vocab) for ours, theirs in names.items()})


def _read_vllm(found: Published, target: TargetCard, ends: Ends) -> Reading:
    found = found.without(*_PREFIXES)
    heads = _count(found, "heads", 5)
    blocks = _count(found, "layers", 1, "num_hidden_layers")
    hidden, vocab = found.number("hidden_size"), found.number("vocab_size", target.vocab)
    kept = found.number("truncated_vocab_size", vocab)
    mapped = kept < vocab
    tokens, order = ascending(found.need("token_map", kept)) if mapped else (None, slice(None))
    shared = found.flag("original_lm_head")
    tensors = {}
    for ours, theirs in names_of_vllm(heads, blocks).items():
        if not ours.startswith("own_heads"):
            tensors[ours] = _tensor(found, ours, theirs, hidden, vocab)
            continue
        matrix = found.need(_shared_head(found) if shared else theirs)
        if mapped and len(matrix) == vocab:
            matrix = matrix[found.need("token_map")]
        if tuple(matrix.shape) != (kept, hidden):
            raise ValueError(
                f"{found.folder}: {theirs} has the shape {list(matrix.shape)}, and its configuration asks for {[kept, hidden]}"
            )
        tensors[ours] = matrix[order] * found.real("logit_scale", 1.0)
    if tokens is not None:
        tensors["token_of"] = tokens
    config = MedusaConfig(
        target=card(found, target, hidden, vocab),
        heads=heads,
        blocks=blocks,
        own_head=True,
        draft_vocab=kept if mapped else None,
    )
    return Reading(config, tensors)


def _count(found: Published, what: str, default: int, *first: str) -> int:
    """vLLM takes any key that begins with `num` (perhaps after `medusa_`) and ends in what is counted."""
    for key in (*first, f"num_{what}", f"medusa_num_{what}", f"num_medusa_{what}"):
        if key in found.config:
            return found.number(key)
    return default


def _shared_head(found: Published) -> str:
    return "lm_head.weight" if found.has("lm_head.weight") else "lm_heads.0.weight"


def _tensor(found: Published, ours: str, theirs: str, hidden: int, vocab: int) -> torch.Tensor:
    """A tensor by our name; biases may be missing, which is zero."""
    if ours.startswith("own_heads"):
        return found.need(theirs, vocab, hidden)
    if ours.endswith("bias"):
        return found.need(theirs, hidden) if found.has(theirs) else torch.zeros(hidden)
    return found.need(theirs, hidden, hidden)


AUTHORS = Format("medusa", _fits_authors, _read_authors)
VLLM = Format("vllm-medusa", _fits_vllm, _read_vllm)
