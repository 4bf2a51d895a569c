"""Loads a speculator for a target from a directory in any known format."""

from pathlib import Path

from pydantic import ValidationError

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.load.adapter import adapter_folder
from foretell.model.load.assistant import is_assistant
from foretell.speculator.checkpoint import load_own
from foretell.speculator.config_file import CONFIG, read_config
from foretell.speculator.formats import find_format
from foretell.speculator.formats.base import ConvertedCheckpoint
from foretell.speculator.formats.files import missing_weights
from foretell.speculator.formats.gguf import is_drafter
from foretell.speculator.network import NETWORKS
from foretell.speculator.network.base import Speculator, TargetInfo
from foretell.utils.validation import explain, validate


def is_speculator(folder: Path) -> bool:
    """Whether a directory holds a trained speculator, in Foretell's or another known format, or an adapter, and not a
    language model; or a GGUF file a drafter.
    """
    if folder.is_file() or not (folder / CONFIG).is_file():
        return is_drafter(folder) or adapter_folder(folder) is not None
    return "kind" in read_config(folder) or is_assistant(folder) or find_format(folder) is not None


def load_speculator(folder: Path, target: TargetInfo, embedding_and_head: EmbeddingAndHead) -> Speculator:
    """Load a speculator for a target, in the dtype and on the device of `embedding_and_head`.

    Raises:
        ValueError: a damaged or incomplete checkpoint, one of no known format, or one for another target.
    """
    if adapter_folder(folder) is not None:
        raise ValueError(f"{folder}: an adapter, with which --method pard lets the target itself draft (UNO)")
    values = {} if folder.is_file() else read_config(folder)
    if "kind" in values:
        check_target(folder, values.get("target"), target)
        return _match_target(load_own(folder, embedding_and_head), embedding_and_head)
    return _match_target(
        _build(folder, read_published(folder, target, embedding_and_head), embedding_and_head), embedding_and_head
    )


def read_published(folder: Path, target: TargetInfo, embedding_and_head: EmbeddingAndHead) -> ConvertedCheckpoint:
    """A checkpoint of another project, converted.

    Raises:
        ValueError: a damaged or incomplete checkpoint, one of no known format, or one for another target.
    """
    if is_assistant(folder):
        raise ValueError(f"{folder}: an assistant of Gemma 4, with which --method mtp drafts alone")
    known = find_format(folder)
    if known is None:
        raise ValueError(f"{folder}: not a speculator in a known format; docs/formats.md lists the formats")
    format_, checkpoint = known
    if not checkpoint.names:
        raise ValueError(missing_weights(folder))
    try:
        return format_.read(checkpoint, target, embedding_and_head)
    except ValidationError as error:
        raise ValueError(f"{folder / CONFIG}: {explain(error)}") from error


def _build(folder: Path, reading: ConvertedCheckpoint, embedding_and_head: EmbeddingAndHead) -> Speculator:
    config_type, network_type = NETWORKS[reading.config.kind]
    assert isinstance(reading.config, config_type)
    network = network_type(reading.config, embedding_and_head)
    if "token_of" in reading.tensors:
        network.set_draft_vocab(reading.tensors["token_of"])
    # Published checkpoints lack the other buffers of a network, such as a calibrated tree.
    weights = {name for name, _ in network.named_parameters()}
    fresh = {name: tensor for name, tensor in network.state_dict().items() if name not in weights}
    try:
        network.load_state_dict(fresh | dict(reading.tensors))
    except RuntimeError as error:
        raise ValueError(f"{folder}: {str(error).splitlines()[-1].strip()}") from error
    return network


def _match_target(network: Speculator, embedding_and_head: EmbeddingAndHead) -> Speculator:
    """Move a network to the target's device and its parameters to the target's dtype; buffers keep their precision."""
    network.to(device=embedding_and_head.head.device)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(embedding_and_head.head.dtype)
    return network


def check_target(folder: Path, trained_for: object, target: TargetInfo) -> None:
    """Refuse a speculator that was trained for another model; without a fingerprint the sizes are compared only.

    Raises:
        ValueError: its target is another model.
    """
    if not isinstance(trained_for, dict):
        raise ValueError(f"{folder}: its config.json does not say which target it was trained for")
    info = validate(TargetInfo, trained_for, f"{folder / CONFIG}: target")
    same_sizes = (info.hidden, info.vocab, info.layers) == (target.hidden, target.vocab, target.layers)
    same_weights = not info.fingerprint or not target.fingerprint or info.fingerprint == target.fingerprint
    if not (same_sizes and same_weights):
        raise ValueError(
            f"{folder}: this speculator was trained for another model ({info.name}: {_describe(info)}); the target "
            f"has {_describe(target)}; use one for this target, or train it with `foretell train`"
        )


def _describe(info: TargetInfo) -> str:
    fingerprint = f", fingerprint {info.fingerprint}" if info.fingerprint else ""
    return f"{info.layers} layers, width {info.hidden}, {info.vocab} tokens{fingerprint}"
