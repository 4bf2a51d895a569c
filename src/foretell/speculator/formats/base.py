"""The base of checkpoint formats: how a format is detected, converted from, and converted to."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.model import ModelConfig, RopeConfig
from foretell.speculator.checkpoint import write_weights
from foretell.speculator.config_file import CONFIG
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.network.base import Speculator, SpeculatorConfig, TargetInfo
from foretell.tokenizer.codec import TextCodec


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """A published checkpoint, converted to Foretell's configuration and tensor names."""

    config: SpeculatorConfig
    tensors: Mapping[str, torch.Tensor]
    """The state dict of the network of this kind."""


@dataclass(frozen=True)
class CheckpointFormat:
    """A format that is read."""

    name: str
    matches: Callable[[PublishedCheckpoint], bool]
    """Whether a checkpoint is in this format, by its configuration or else by its tensor names."""
    read: Callable[[PublishedCheckpoint, TargetInfo, EmbeddingAndHead], ConvertedCheckpoint]


@dataclass(frozen=True)
class Verifier:
    """The target model, as exported configurations name it."""

    name: str
    """Name on the Hugging Face hub, or a path."""
    config: ModelConfig
    codec: TextCodec | None = None
    """Its tokenizer, which is exported with draft models."""
    states: Callable[[Sequence[int]], Sequence[torch.Tensor]] | None = None
    """The hidden states of these layers along texts, [t d] each; None: the target is not at hand."""
    gguf: Path | None = None
    """Its GGUF file, whose tokenizer is exported with drafters in GGUF; None: it is no GGUF file."""

    @property
    def architectures(self) -> list[str]:
        """Its class in transformers, as `config.json` lists it."""
        known = ARCHITECTURES.get(self.config.architecture)
        return [] if known is None else [known]


@dataclass(frozen=True)
class ExportFormat:
    """A format that is written."""

    name: str
    kind: str
    """Kind of the speculators that it supports."""
    write: Callable[[Speculator, Verifier, Path], None]
    """Write into an empty directory.

    Raises:
        ValueError: the format does not support a part of the network.
    """


ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Classes of transformers by `model_type`."""


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `config.json` and `model.safetensors`."""
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # safetensors refuses tensors that share memory.
    write_weights(folder, {name: t.clone() for name, t in weights.items()})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def refuse_other_tensors(files: PublishedCheckpoint, known: Collection[str], is_unused: Callable[[str], bool]) -> None:
    """Refuse tensors that a checkpoint of its configuration does not have.

    Raises:
        ValueError: there is one that is neither known nor unused.
    """
    other = next((name for name in files.names if name not in known and not is_unused(name)), None)
    if other is not None:
        raise ValueError(f"{files.folder}: it holds {other}, which a checkpoint of this configuration does not have")


def refuse_parts(network: Speculator, format_name: str, parts: Sequence[tuple[str, bool, str]] = ()) -> None:
    """Refuse a part that a format does not support: what it is, whether it is there, and which options of a training
    leave it out. No published format supports a soft cap on the logits.

    Raises:
        ValueError: the speculator has such a part.
    """
    if network.softcap:
        raise ValueError(f"the format {format_name} has no place for a bound on the logits, which this target has")
    for what, present, how in parts:
        if present:
            raise ValueError(
                f"the format {format_name} has no place for {what}, which this speculator has; train one without{how} "
                f"to export it"
            )


def rope_config(rope: RopeConfig) -> dict[str, Any]:
    """The rotary embedding as keys of a transformers configuration.

    Raises:
        ValueError: transformers has no keys for it.
    """
    if rope.divisors or rope.fraction != 1:
        what = "divisors of the rotary frequencies" if rope.divisors else "rotary embedding of a part of the head"
        raise ValueError(f"configurations of Hugging Face have no place for {what}, which this speculator has")
    more = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
        "longrope": ("short_factor", "long_factor", "attention_factor"),
    }
    scaling = {"rope_type": rope.kind, "factor": rope.factor, "original_max_position_embeddings": rope.original_context}
    scaling |= {k: v for k, v in asdict(rope).items() if k in more.get(rope.kind, ()) and v is not None}
    return {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling}


def dtype_name(network: Speculator) -> str:
    """The network's dtype as configurations write it."""
    return str(network.dtype).removeprefix("torch.")


def target_info(files: PublishedCheckpoint, target: TargetInfo, hidden: int, vocab: int, name: str = "") -> TargetInfo:
    """The target that a checkpoint names; what it does not state is taken from the given target.

    Raises:
        ValueError: its sizes are not those of the target.
    """
    trained_for = name or str(files.config.get("base_model_name_or_path") or files.folder.name)
    if (hidden, vocab) != (target.hidden, target.vocab):
        raise ValueError(
            f"{files.folder}: this speculator was trained for another model ({trained_for}: width {hidden}, {vocab} "
            f"tokens); the target has width {target.hidden} and {target.vocab} tokens"
        )
    return target.model_copy(update={"name": trained_for, "fingerprint": ""})


def is_copy(own: torch.Tensor, shared: torch.Tensor) -> bool:
    """Whether a checkpoint's tensor is a copy of one of the target's, so that it need not be stored twice."""
    if own.shape != shared.shape:
        return False
    return torch.equal(own.to(torch.bfloat16), shared.to("cpu", torch.bfloat16))


def target_rows(embedding_and_head: EmbeddingAndHead, tokens: torch.Tensor | None) -> torch.Tensor:
    """The rows of the target's head for a draft vocabulary; None: all rows."""
    head: torch.Tensor = embedding_and_head.head
    return head if tokens is None else head[tokens.to(head.device)]


def sort_draft_vocab(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a draft vocabulary in ascending order, and the permutation that sorts them."""
    order = torch.argsort(tokens)
    return tokens[order].long(), order
