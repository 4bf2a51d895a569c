"""Reads EAGLE checkpoints: SafeAILab's formats of EAGLE-1 and EAGLE-3, and that of the `speculators` library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from foretell.model.config import ModelConfig, RopeConfig
from foretell.model.config_readers.hf import from_hf
from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.speculator.checkpoint import CONFIG
from foretell.speculator.formats.base import CheckpointFormat, ConvertedCheckpoint, is_copy, target_info, target_rows
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.cached_layers import CachedLayersConfig
from foretell.speculator.network.eagle import EagleConfig
from foretell.utils.validation import Fields

_OTHER_TENSORS = ("rotary_emb", "verifier_lm_head", "verifier_norm", "t2d", "d2t", "lm_head", "embed_tokens", "dummy")
"""Parts of the names of tensors that are read separately, or are not needed."""


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Options of EAGLE-3 that have the same names here and in configurations."""


@dataclass(frozen=True)
class TensorSource:
    """The published tensors that form one of Foretell's, concatenated along the rows."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    other_sizes: tuple[int, ...] = ()


def tensor_sources(c: EagleConfig) -> dict[str, TensorSource]:
    """The published tensors (`midlayer` renamed to `layers.0`) of every tensor of the network."""
    d, e, eagle3 = c.target.hidden, c.head_dim, c.kind == "eagle3"
    fc_inputs = len(c.recorded_layers) * d if eagle3 else 2 * d
    out = {"fc.weight": TensorSource(("fc.weight",), (d,), (fc_inputs,))}
    if c.fc_bias or (c.fc_bias is None and not eagle3):
        out["fc.bias"] = TensorSource(("fc.bias",), (d,))
    for i in range(c.layers):
        out |= layer_sources(c, f"layers.{i}.", d, e, fusing=eagle3 and i == 0, normed=eagle3 or i > 0)
    if eagle3:
        out["norm.weight"] = TensorSource(("norm.weight",), (d,))
    if c.norm_before_fc:
        out["input_norm.weight"] = TensorSource(("input_norm.weight",), (fc_inputs,))
    for i in range(len(c.recorded_layers) if c.fc_norm else 0):
        out[f"fc_norm.{i}.weight"] = TensorSource((f"fc_norm.{i}.weight",), (d,))
    return out


def layer_sources(
    c: CachedLayersConfig, at: str, d: int, e: int, fusing: bool, normed: bool
) -> dict[str, TensorSource]:
    """The published tensors of a layer whose names begin with `at`."""
    rows = (c.heads * e, c.kv_heads * e, c.kv_heads * e)
    norms = ["post_attention_layernorm"] + ["input_layernorm"] * normed + ["hidden_norm"] * fusing
    out = {f"{at}{n}.weight": TensorSource((f"{at}{n}.weight",), (d,)) for n in norms}
    if c.qk_norm:
        out |= {
            f"{at}self_attn.{n}.weight": TensorSource((f"{at}self_attn.{n}.weight",), (e,))
            for n in ("q_norm", "k_norm")
        }
    for part, rest in (("weight", (2 * d if fusing else d,)), ("bias", ())):
        if part == "weight" or c.qkv_bias:
            names = tuple(f"{at}self_attn.{n}_proj.{part}" for n in "qkv")
            out[f"{at}self_attn.qkv_proj.{part}"] = TensorSource(names, rows, rest)
    out[f"{at}self_attn.o_proj.weight"] = TensorSource((f"{at}self_attn.o_proj.weight",), (d,), (rows[0],))
    gate_up = tuple(f"{at}mlp.{n}_proj.weight" for n in ("gate", "up"))
    out[f"{at}mlp.gate_up_proj.weight"] = TensorSource(gate_up, (c.ffn, c.ffn), (d,))
    return out | {f"{at}mlp.down_proj.weight": TensorSource((f"{at}mlp.down_proj.weight",), (d,), (c.ffn,))}


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
    return _read(found, raw if isinstance(raw, dict) else found.config, "eagle", {}, target, embedding_and_head)


def _read_eagle3(
    found: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    found = _midlayer(found.strip_prefixes("model."))
    # `eagle_config` counts a layer's output; Foretell and vLLM count the input of the next layer.
    hidden_layers = [i + 1 for i in found.fields.fields("eagle_config").integers("eagle_aux_hidden_state_layer_ids")]
    return _read(found, found.config, "eagle3", _flags(found, hidden_layers), target, embedding_and_head)


def _read_speculators(
    found: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> ConvertedCheckpoint:
    kind = found.config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ValueError(
            f"{found.folder}: speculators of the type {kind!r} are not known here; known: eagle3, dflash, dspark"
        )
    layer = found.config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"{found.folder / 'config.json'}: transformer_layer_config should describe the layer")
    library = found.config.get("speculators_config")
    verifier = library.get("verifier") if isinstance(library, dict) else None
    name = str(verifier.get("name_or_path") or "") if isinstance(verifier, dict) else ""
    return _read(_midlayer(found), layer, "eagle3", _flags(found, ()), target, embedding_and_head, name)


def _midlayer(found: PublishedCheckpoint) -> PublishedCheckpoint:
    renamed = {
        n.replace("midlayer.", "layers.0.") if n.startswith("midlayer.") else n: p for n, p in found.names.items()
    }
    return replace(found, names=renamed)


def _flags(found: PublishedCheckpoint, hidden_layers: Sequence[int]) -> dict[str, Any]:
    """The keys that EAGLE-3's two formats share."""
    return {
        "hidden_layers": found.fields.integers("eagle_aux_hidden_state_layer_ids") or tuple(hidden_layers),
        **{name: found.fields.flag(name, default=False) for name in FLAGS},
    }


def _read(
    found: PublishedCheckpoint,
    raw: Mapping[str, Any],
    kind: Literal["eagle", "eagle3"],
    flags: Mapping[str, Any],
    target: TargetInfo,
    embedding_and_head: EmbeddingAndHead,
    name: str = "",
) -> ConvertedCheckpoint:
    shape = layer_shape(found, raw, target.vocab)
    is_drafted = found.find("t2d")
    fields = Fields(raw, str(found.folder / CONFIG))
    vocab = fields.integer("vocab_size", default=target.vocab, least=1) if is_drafted is None else len(is_drafted)
    trained_for = target_info(found, target, shape.hidden, vocab, name)
    tokens = draft_vocab(found, target.vocab)
    embedding = own_embedding(found, target, embedding_and_head)
    head = own_head(found, tokens, target, embedding_and_head) if kind == "eagle3" else None
    config = EagleConfig(
        kind=kind,
        target=trained_for,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        context=shape.context,
        layers=shape.layers,
        norm_eps=shape.norm_eps,
        rope=shape.rope or RopeConfig(),
        qkv_bias=found.has("layers.0.self_attn.q_proj.bias"),
        qk_norm=found.has("layers.0.self_attn.q_norm.weight"),
        fc_bias=found.has("fc.bias"),
        own_embedding=embedding is not None,
        own_head=head is not None,
        draft_vocab=None if tokens is None else len(tokens),
        **flags,
    )
    sources = tensor_sources(config)
    tensors = {ours: concatenate(found, source) for ours, source in sources.items()}
    refuse_other_tensors(found, sources)
    if tokens is not None:
        tensors["token_of"] = tokens
    if head is not None:
        tensors["head"] = head
    if embedding is not None:
        tensors["embedding"] = embedding
    return ConvertedCheckpoint(config, tensors)


def layer_shape(found: PublishedCheckpoint, raw: Mapping[str, Any], vocab: int) -> ModelConfig:
    """The layer as a decoder's configuration.

    Raises:
        ValueError: a key is missing, or its value is not supported.
    """
    shape = from_hf({"model_type": "llama", **raw, "vocab_size": vocab}, str(found.folder / "config.json"))
    width = raw.get("target_hidden_size") or found.config.get("target_hidden_size")
    if width is not None and width != shape.hidden:
        raise ValueError(
            f"{found.folder}: it drafts in a width of its own ({shape.hidden}; its target's is {width}), which is not "
            f"supported"
        )
    if shape.activation != "silu":
        raise ValueError(f"{found.folder}: its activation is {shape.activation}, and only silu is supported")
    return shape


def concatenate(found: PublishedCheckpoint, source: TensorSource) -> torch.Tensor:
    """One of Foretell's tensors."""
    shapes = zip(source.names, source.rows, strict=True)
    return torch.cat([found.require(name, rows, *source.other_sizes) for name, rows in shapes])


def draft_vocab(found: PublishedCheckpoint, vocab: int) -> torch.Tensor | None:
    """Target token of every token of the draft vocabulary, from the offsets in `d2t`; None: the whole vocabulary."""
    offsets = found.find("d2t")
    if offsets is None or len(offsets) == vocab:
        return None
    tokens = torch.arange(len(offsets)) + offsets.long()
    ascending = bool((tokens.diff() > 0).all())
    if not ascending or not 0 <= int(tokens[0]) <= int(tokens[-1]) < vocab:
        raise ValueError(
            f"{found.folder}: d2t does not name ascending tokens of a vocabulary of {vocab}; is it damaged?"
        )
    return tokens


def own_embedding(
    found: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> torch.Tensor | None:
    """The checkpoint's embedding, unless it is a copy of the target's."""
    if not found.has("embed_tokens.weight"):
        return None
    own = found.require("embed_tokens.weight", target.vocab, target.hidden)
    return None if embedding_and_head.embedding_scale == 1 and is_copy(own, embedding_and_head.embedding) else own


def own_head(
    found: PublishedCheckpoint, tokens: torch.Tensor | None, target: TargetInfo, embedding_and_head: EmbeddingAndHead
) -> torch.Tensor | None:
    """The checkpoint's output matrix, unless it is a copy of rows of the target's."""
    if not found.has("lm_head.weight"):
        return None
    shared = target_rows(embedding_and_head, tokens)
    own = found.require("lm_head.weight", len(shared), target.hidden)
    return None if is_copy(own, shared) else own


def refuse_other_tensors(found: PublishedCheckpoint, sources: Mapping[str, TensorSource]) -> None:
    """Refuse unknown tensors.

    Raises:
        ValueError: there is one.
    """
    used = {name for part in sources.values() for name in part.names}
    for name in found.names:
        if name not in used and not any(part in name for part in _OTHER_TENSORS):
            raise ValueError(f"{found.folder}: it holds {name}, which a checkpoint of this configuration does not have")


SPECULATORS = CheckpointFormat("speculators", _fits_speculators, _read_speculators)
EAGLE3 = CheckpointFormat("eagle3", _fits_eagle3, _read_eagle3)
EAGLE1 = CheckpointFormat("eagle", _fits_eagle1, _read_eagle1)
