"""What a format of checkpoints is: how it is recognised, how its names become ours, and how ours become its."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foretell.model.config import ModelConfig, RopeConfig
from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.speculator.checkpoint import CONFIG, write_weights
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.network.base import Speculator, SpeculatorConfig, TargetInfo
from foretell.tokenizer.codec import TextCodec


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """A published checkpoint in our words."""

    config: SpeculatorConfig
    tensors: Mapping[str, torch.Tensor]
    """What `state_dict` of the network of this kind holds."""


@dataclass(frozen=True)
class CheckpointFormat:
    """A line of the table of formats."""

    name: str
    matches: Callable[[PublishedCheckpoint], bool]
    """Whether a checkpoint is in this format, by its configuration and, where that does not tell, by the names of its
    tensors.
    """
    read: Callable[[PublishedCheckpoint, TargetInfo, EmbeddingAndHead], ConvertedCheckpoint]


@dataclass(frozen=True)
class Verifier:
    """The target, for those who read what is exported."""

    name: str
    """On the Hugging Face hub, or a path."""
    config: ModelConfig
    codec: TextCodec | None = None
    """Its tokenizer, which a whole model goes with."""

    @property
    def architectures(self) -> list[str]:
        """Its class in transformers."""
        known = ARCHITECTURES.get(self.config.architecture)
        return [] if known is None else [known]


@dataclass(frozen=True)
class ExportFormat:
    """A line of the table of what is written."""

    name: str
    kind: str
    """Of the speculators it is for."""
    write: Callable[[Speculator, Verifier, Path], None]
    """Write into a directory that is empty.

    Raises:
        ValueError: the format has no place for something that the network has.
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
    # Tensors that share memory are refused by safetensors.
    write_weights(folder, {name: t.clone() for name, t in weights.items()})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def refuse_softcap(network: Speculator, format_name: str) -> None:
    """Refuse what none of the published forms can say.

    Raises:
        ValueError: the target bounds its logits, and the network with it.
    """
    if network.softcap:
        raise ValueError(f"the format {format_name} has no place for a bound on the logits, which this target has")


def rope_config(rope: RopeConfig) -> dict[str, Any]:
    """Rotary embedding as configurations of transformers write it.

    Raises:
        ValueError: they have no place for it.
    """
    if rope.divisors or rope.fraction != 1:
        what = "divisors of the rotary frequencies" if rope.divisors else "rotary embedding of a part of the head"
        raise ValueError(f"configurations of Hugging Face have no place for {what}, which this speculator has")
    more = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "attention_factor")}
    scaling = {"rope_type": rope.kind, "factor": rope.factor, "original_max_position_embeddings": rope.original_context}
    scaling |= {k: v for k, v in asdict(rope).items() if k in more.get(rope.kind, ()) and v is not None}
    return {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling}


def dtype_name(network: Speculator) -> str:
    """As configurations write it."""
    return str(network.dtype).removeprefix("torch.")


def target_info(found: PublishedCheckpoint, target: TargetInfo, hidden: int, vocab: int, name: str = "") -> TargetInfo:
    """Which target a checkpoint says it is for; what it does not say is taken to fit.

    Raises:
        ValueError: its sizes are not those of the target.
    """
    said = name or str(found.config.get("base_model_name_or_path") or found.folder.name)
    if (hidden, vocab) != (target.hidden, target.vocab):
        raise ValueError(
            f"{found.folder}: this speculator was trained for another model ({said}: width {hidden}, {vocab} tokens); "
            f"the target has width {target.hidden} and {target.vocab} tokens"
        )
    return target.model_copy(update={"name": said, "fingerprint": ""})


def is_copy(own: torch.Tensor, lent: torch.Tensor) -> bool:
    """Whether a tensor that a checkpoint brings is a copy of one of the target's, which need not be held twice."""
    if own.shape != lent.shape:
        return False
    return torch.equal(own.to(torch.bfloat16), lent.to("cpu", torch.bfloat16))


def sort_draft_vocab(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a reduced vocabulary in ascending order, and the order that sorts the rows of its output matrices."""
    order = torch.argsort(tokens)
    return tokens[order].long(), order
