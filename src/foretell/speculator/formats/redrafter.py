"""The format of Apple's ReDrafter checkpoints (ml-recurrent-drafter), which TensorRT-LLM converts."""

from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import pad

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.readers.unread_keys import refuse_other_keys
from foretell.speculator.formats.base import (
    CheckpointFormat,
    ConvertedCheckpoint,
    ExportFormat,
    Verifier,
    dtype_name,
    is_copy,
    refuse_other_tensors,
    refuse_parts,
    target_info,
    write_checkpoint,
)
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.network.base import Speculator, TargetInfo
from foretell.speculator.network.redrafter import ReDrafter, ReDrafterConfig

_TYPE = "recurrent_drafting_drafter"
_PREFIX = "drafter."
_OTHER_NAMES = {"input_projs.": "input_proj.", "lm_heads.": "lm_head.", "0.": "lm_head."}
"""Beginnings of names in older checkpoints, and the present ones."""
_DEFAULT_STAGES = 5
"""Tokens that the authors' trainer teaches; only a key of Foretell's exports says it."""
_STAGES = "drafter_predict_n_tokens"
_MORE = (_STAGES, "emb_norm", "num_lookback_tokens")
"""The last two are not used by the authors' code."""
_UNUSED = "emb_norm."
"""A norm that some checkpoints have and that the authors' code does not apply."""


def _fits(files: PublishedCheckpoint) -> bool:
    return files.config.get("model_type") == _TYPE or {"exit_dim", "num_draft_layers"} <= set(files.config)


def _read(files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead) -> ConvertedCheckpoint:
    files, fields = _present_names(files.strip_prefixes(_PREFIX)), files.fields
    refuse_other_keys(fields, ("model_type", "hidden_size", "vocab_size", "exit_dim", "num_draft_layers", "rnn"), _MORE)
    hidden, vocab = fields.integer("hidden_size", least=1), fields.integer("vocab_size", least=1)
    width, layers = fields.integer("exit_dim", least=1), fields.integer("num_draft_layers")
    combined, recurrent = width != 2 * hidden, fields.flag("rnn", default=False)
    trained_for, scale = target_info(files, target, hidden, vocab), embedding_and_head.embedding_scale
    if not recurrent and scale != 1:
        raise ValueError(
            f"{files.folder}: a ReDrafter without rnn is not supported for a target that scales embeddings"
        )
    head = files.require(f"lm_head.{layers}.weight", vocab, width)
    own_head = width != hidden or not is_copy(head, embedding_and_head.head)
    config = ReDrafterConfig(
        target=trained_for,
        stages=fields.integer(_STAGES, default=_DEFAULT_STAGES),
        inner=hidden,
        layers=layers,
        recurrent=recurrent,
        exit_width=None if width == hidden else width,
        combined=combined,
        combine_bias=combined,
        own_head=own_head,
    )
    names = _published_names(config)
    known = {*names.values(), f"lm_head.{layers}.weight"}
    refuse_other_tensors(files, known, lambda name: name.startswith(_UNUSED))
    shapes = {"combine": (width, 2 * hidden), "recur": (hidden, hidden), "token": (hidden, hidden)}
    tensors = {"head": head} if own_head else {}
    for ours, theirs in names.items():
        module, part = ours.rsplit(".", 1)
        rows, columns = shapes.get(module, (width, width))
        tensors[ours] = files.require(theirs, *((rows, columns) if part == "weight" else (rows,)))
    if recurrent:
        tensors["token.weight"] = tensors["token.weight"] / scale
    return ConvertedCheckpoint(config, tensors)


def _present_names(files: PublishedCheckpoint) -> PublishedCheckpoint:
    """The checkpoint with the present names in place of older ones."""

    def present(name: str) -> str:
        old = next((old for old in _OTHER_NAMES if name.startswith(old)), "")
        return _OTHER_NAMES.get(old, "") + name.removeprefix(old)

    return replace(files, names={present(name): place for name, place in files.names.items()})


def _published_names(c: ReDrafterConfig) -> dict[str, str]:
    """Foretell's tensor names to the published ones, without the output matrix."""
    out = dict[str, str]()
    if c.combined:
        out |= {f"combine.{part}": f"input_proj.{part}" for part in ("weight", "bias")}
    if c.recurrent:
        # Both are added, so that it does not matter which of them has the bias.
        out |= {"recur.weight": "rnn_u.weight", "token.weight": "rnn_w.weight", "token.bias": "rnn_u.bias"}
    return out | {
        f"layers.{i}.{part}": f"lm_head.{i}.linear.{part}" for i in range(c.layers) for part in ("weight", "bias")
    }


def _write(network: Speculator, verifier: Verifier, folder: Path) -> None:
    """A recurrent state that is narrower than the target's is filled with zeros, which changes nothing."""
    assert isinstance(network, ReDrafter)
    refuse_parts(network, "redrafter")
    c, d = network.config, network.target_info.hidden
    if c.inner > d:
        raise ValueError(
            f"the format redrafter has a recurrent state of the target's width ({d}), and that of this speculator is "
            f"{c.inner} wide; train one with --set inner={d} to export it"
        )
    width = c.exit_width or d
    layout = {
        "model_type": _TYPE,
        "architectures": ["Drafter"],
        "base_model_name_or_path": verifier.name,
        "vocab_size": network.target_info.vocab,
        "hidden_size": d,
        "exit_dim": width,
        "num_draft_layers": c.layers,
        "num_lookback_tokens": -1,
        "rnn": c.recurrent,
        _STAGES: c.stages,
        "torch_dtype": dtype_name(network),
    }
    state = {name: tensor.to(network.dtype) for name, tensor in _full_width(network).items()}
    tensors = {theirs: state[ours] for ours, theirs in _published_names(c).items()}
    write_checkpoint(folder, layout, tensors | {f"lm_head.{c.layers}.weight": network.full_lm_head.to(network.dtype)})


def _full_width(network: ReDrafter) -> dict[str, torch.Tensor]:
    """The tensors of the network with a state of the target's width, and of tokens without a scale."""
    state, missing = network.state_dict(), network.target_info.hidden - network.config.inner
    if network.combine is not None:
        state["combine.weight"] = pad(state["combine.weight"], (0, missing))
        state.setdefault("combine.bias", torch.zeros(network.combine.out_features))
    if network.config.recurrent:
        state["recur.weight"] = pad(state["recur.weight"], (0, missing, 0, missing))
        state["token.weight"] = pad(state["token.weight"] * network.embedding_scale, (0, 0, 0, missing))
        state["token.bias"] = pad(state["token.bias"], (0, missing))
    return state


AUTHORS = CheckpointFormat("redrafter", _fits, _read)
TO_AUTHORS = ExportFormat("redrafter", "redrafter", _write)
