"""EAGLE-3 and DFlash in GGUF files, as llama.cpp reads them: a file is read as the published checkpoint that its
converters take, and written from the tensors of one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretell.model.config.families.base import GGUF_NAMES
from foretell.model.config.model import RopeConfig
from foretell.model.load.assistant import GGUF_KIND
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import GGUFHeader, holds_prediction_alone
from foretell.model.load.gguf_sizes import write_whole
from foretell.speculator.formats import dflash_export, eagle_export
from foretell.speculator.formats.base import ExportFormat, Verifier
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.cached_layers import CachedLayersConfig
from foretell.speculator.network.dflash import DFlash
from foretell.speculator.network.eagle import Eagle3
from foretell.utils.validation import Fields

_EAGLE3, _DFLASH = "eagle3", "dflash"
FILE = "model.gguf"
_OFFSETS = "d2t"
"""Target tokens of a draft vocabulary; in published checkpoints less the index of each."""
_I64 = 27
_OF_LAYERS = {
    **{f"{i}.weight": f"{name}.weight" for name, i in GGUF_NAMES.items() if not i.endswith(("_exps", "_inp"))},
    "attn_norm_2.weight": "hidden_norm.weight", "attn_sinks.weight": "self_attn.attention_sink_bias",
    "attn_conv_base": "attention_conv.base_kernel", "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel", "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}  # fmt: skip
_OTHERS = {
    "fc.weight": "fc.weight", "output_norm.weight": "norm.weight", "enc.output_norm.weight": "hidden_norm.weight",
    "output.weight": "lm_head.weight", "token_embd.weight": "embed_tokens.weight", _OFFSETS: _OFFSETS,
    "markov_w1.weight": "markov_head.markov_w1.weight", "markov_w2.weight": "markov_head.markov_w2.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}  # fmt: skip
_SIZES = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "context_length": "max_position_embeddings", "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "vocab_size": "vocab_size",
    "target_hidden_size": "target_hidden_size", "block_size": "block_size",
    "attention.sliding_window": "sliding_window", "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
}  # fmt: skip
_OPTIONS = {
    "conv_kernel_size": "conv_kernel_size", "conv_group_size": "conv_group_size", "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k", "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
_READ_APART = (
    "target_layers", "extract_layers", "sample_from_anchor", "attention.sliding_window_pattern",
    "attention.value_length", "rope.dimension_count", "rope.dimension_sections", "markov_rank",
)  # fmt: skip


@dataclass(frozen=True)
class GGUFCheckpoint(PublishedCheckpoint):
    """A GGUF file under the names of a published checkpoint."""

    file: GGUF | None = None
    heads: tuple[int, int] = (0, 0)
    """Heads of queries and of keys whose rows are in llama.cpp's order; 0: they are not."""

    def find(self, name: str) -> torch.Tensor | None:
        """The tensor of this name, dequantised; None: there is none."""
        if name not in self.names:
            return None
        assert self.file is not None
        inside = self.names[name][1]
        if self.file.tensors[inside].ggml_type == _I64:
            tokens: torch.Tensor = self.file.integers(inside)
            return tokens - torch.arange(len(tokens))
        tensor: torch.Tensor = self.file.load_tensor(inside)
        of_keys = inside.endswith("attn_k.weight")
        heads = self.heads[of_keys] if of_keys or inside.endswith("attn_q.weight") else 0
        return _reorder(tensor, heads, (-1, 2)) if heads else tensor


def is_drafter(path: Path) -> bool:
    """Whether a GGUF file holds a drafter of a known architecture, or what `mtp` drafts with."""
    if not path.is_file():
        return False
    file = GGUFHeader(path)
    kind = file.metadata.get("general.architecture")
    return kind in (_EAGLE3, _DFLASH, GGUF_KIND) or holds_prediction_alone(file)


def open_gguf(path: Path) -> PublishedCheckpoint:
    """A drafter's file as the checkpoint that it was converted from.

    Raises:
        ValueError: it is damaged, or has a key or a tensor that is not known.
    """
    file = GGUF(path)
    if holds_prediction_alone(file):
        raise ValueError(f"{path}: a layer of multi-token prediction, with which --method mtp drafts alone")
    kind = str(file.metadata.get("general.architecture"))
    own = {key.removeprefix(f"{kind}."): v for key, v in file.metadata.items() if key.startswith(f"{kind}.")}
    fields = Fields(own, str(path), f"{kind}.")
    other = next((key for key in own if key not in {*_SIZES, *_OPTIONS, *_READ_APART}), None)
    if other is not None:
        raise fields.wrong(other, "left out: this key is not known here", own[other])
    names = {_published(path, name): (path, name) for name in file.tensors}
    config = {published: own[key] for key, published in _SIZES.items() if key in own}
    config.setdefault("vocab_size", len(file.metadata.get("tokenizer.ggml.tokens", ())))
    layers = [layer - 1 for layer in fields.integers("target_layers" if "target_layers" in own else "extract_layers")]
    if kind == _EAGLE3:
        eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers}
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "eagle_config": eagle}
        config.setdefault("norm_before_residual", False)
        heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
        return GGUFCheckpoint(path, config, names, file, heads)
    first = fields.flag("sample_from_anchor", default="markov_w1.weight" in file.tensors)
    options = {published: own[key] for key, published in _OPTIONS.items() if key in own}
    options |= {"target_layer_ids": layers, "mask_token_id": file.metadata.get("tokenizer.ggml.mask_token_id", -1)}
    config |= {"architectures": ["Qwen3DSparkModel" if first else "DFlashDraftModel"], "model_type": "qwen3"}
    if config.get("sliding_window"):
        windows = own.get("attention.sliding_window_pattern") or [True] * config["num_hidden_layers"]
        types = ["sliding_attention" if sliding else "full_attention" for sliding in windows]
        config |= {"layer_types": types, "use_sliding_window": True}
        # llama.cpp lets all slots of a block see each other.
        options["causal"] = False
    return GGUFCheckpoint(path, {**config, "dflash_config": options}, names, file)


def _published(path: Path, name: str) -> str:
    """The published name of a tensor."""
    block, _, part = name.removeprefix("blk.").partition(".")
    inside = name.startswith("blk.")
    known = _OF_LAYERS.get(part) if inside else _OTHERS.get(name)
    if known is None:
        raise ValueError(f"{path}: it holds {name}, which a drafter of this architecture does not have")
    return f"layers.{block}.{known}" if inside else known


def _reorder(rows: torch.Tensor, heads: int, order: tuple[int, int]) -> torch.Tensor:
    """Rows of heads from one order of rotated pairs to the other."""
    return rows.view(heads, *order, *rows.shape[1:]).transpose(1, 2).flatten(0, 2)


def _write_eagle3(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, Eagle3)
    network = eagle_export.before_final_norm(network, verifier)
    eagle_export.check_exported(network, "gguf")
    c = network.config
    _refuse(
        ("more than one layer", c.layers > 1),
        ("hidden states of other than three layers", len(c.recorded_layers) != 3),
        ("norms of the hidden states", c.fc_norm or c.norm_before_fc),
        ("a normed output that is fed back", c.norm_output),
        ("norms of queries and keys", c.qk_norm),
        ("a sliding window", bool(c.window)),
    )
    keys = {"target_layers": list(c.recorded_layers), "target_hidden_size": c.target.hidden}
    keys |= {"norm_before_residual": c.norm_before_residual}
    tensors = eagle_export.weights(network) | eagle_export.vocabulary(network, always_maps=False)
    _write(folder, _EAGLE3, c, keys, tensors, verifier, (c.heads, c.kv_heads))


def _write_dflash(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, DFlash)
    dflash_export.check_exported(network, "gguf")
    c, mask = network.config, eagle_export.mask_token(network)
    _refuse(
        ("a confidence head", c.confidence),
        ("a window within which a slot sees no later slots", c.window_causal),
    )
    of_head = dflash_export.head_keys(c)
    keys = {key: of_head[published] for key, published in _OPTIONS.items() if published in of_head}
    keys |= {"block_size": c.block_size, "target_layers": list(c.recorded_layers)}
    keys |= {"sample_from_anchor": c.predicts_from_anchor}
    if c.window:
        pattern = [c.window_of(i) > 0 for i in range(c.layers)]
        keys |= {"attention.sliding_window": c.window, "attention.sliding_window_pattern": pattern}
    _write(folder, _DFLASH, c, keys, dflash_export.published_tensors(network, mask), verifier, (0, 0), mask)


def _refuse(*parts: tuple[str, bool]) -> None:
    what = next((name for name, present in parts if present), None)
    if what is not None:
        raise ValueError(
            f"the format gguf has no place for {what}, which this speculator has; use another format for vLLM or SGLang"
        )


def _write(
    folder: Path,
    kind: str,
    c: CachedLayersConfig,
    keys: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    verifier: Verifier,
    heads: Sequence[int],
    mask_token: int | None = None,
) -> None:
    """Write the file, with the tokenizer of the target's."""
    if verifier.gguf is None:
        raise ValueError(
            "a drafter in a GGUF file has the tokenizer of its target's file, and the target is no GGUF file; name one "
            "with --model"
        )
    _refuse(("scaled positions", c.rope != RopeConfig(theta=c.rope.theta, original_context=c.rope.original_context)))
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(folder / FILE, kind)
    sizes = {"embedding_length": c.target.hidden, "block_count": c.layers, "feed_forward_length": c.ffn}
    sizes |= {"attention.head_count": c.heads, "attention.head_count_kv": c.kv_heads, "context_length": c.context}
    sizes |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    sizes |= {"rope.dimension_count": c.head_dim, "vocab_size": c.target.vocab}
    numbers = {"rope.freq_base": c.rope.theta, "attention.layer_norm_rms_epsilon": c.norm_eps}
    for key, value in {**sizes, **numbers, **keys}.items():
        _add(writer, f"{kind}.{key}", value)
    source = GGUF(verifier.gguf).metadata
    tokenizer = {key: value for key, value in source.items() if key.startswith("tokenizer.")}
    tokenizer |= {} if mask_token is None else {"tokenizer.ggml.mask_token_id": mask_token}
    for key, value in tokenizer.items():
        _add(writer, key, value)
    inside = {published: name for name, published in _OTHERS.items()}
    of_layers = {published: name for name, published in _OF_LAYERS.items()}
    for name, tensor in tensors.items():
        if name == "t2d":
            continue
        if name == _OFFSETS:
            tokens = (tensor + torch.arange(len(tensor))).numpy()
            writer.add_tensor(_OFFSETS, tokens, raw_dtype=GGMLQuantizationType.I64)
            continue
        layer, _, part = name.removeprefix("layers.").partition(".")
        stored = f"blk.{layer}.{of_layers[part]}" if name.startswith("layers.") else inside[name]
        count = heads["k_proj" in name] if "q_proj" in name or "k_proj" in name else 0
        wide = tensor.detach().float().cpu()
        wide = _reorder(wide, count, (2, -1)) if count else wide
        half = wide.ndim == 2 and tensor.dtype != torch.float32
        writer.add_tensor(stored, (wide.half() if half else wide).contiguous().numpy())
    write_whole(writer)


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a key with the type of its value."""
    from gguf import GGUFValueType as Type

    def type_of(one: Any) -> Any:
        known = ((bool, Type.BOOL), (int, Type.UINT32), (float, Type.FLOAT32), (str, Type.STRING))
        return next(t for python, t in known if isinstance(one, python))

    if not isinstance(value, list):
        writer.add_key_value(key, value, type_of(value))
    elif value:
        inner = type_of(value[0])
        writer.add_key_value(key, value, Type.ARRAY, sub_type=Type.INT32 if inner == Type.UINT32 else inner)


TO_EAGLE3 = ExportFormat("gguf", "eagle3", _write_eagle3)
TO_DFLASH = ExportFormat("gguf", "dflash", _write_dflash)
