"""From a directory to a speculator that fits a target, whoever wrote it."""

from pathlib import Path

from pydantic import ValidationError

from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.speculator.checkpoint import CONFIG, load_own, read_config
from foretell.speculator.formats import find_format
from foretell.speculator.formats.base import ConvertedCheckpoint
from foretell.speculator.formats.files import missing_weights
from foretell.speculator.network import NETWORKS
from foretell.speculator.network.base import Speculator, TargetInfo
from foretell.utils.validation import explain, validate


def load_speculator(folder: Path, target: TargetInfo, embedding_and_head: EmbeddingAndHead) -> Speculator:
    """Read a speculator for a target; its weights are in the dtype and on the device of `embedding_and_head`.

    Raises:
        ValueError: a damaged or incomplete checkpoint, one of no known format, or one for another target.
    """
    values = read_config(folder)
    if "kind" in values:
        check_target(folder, values.get("target"), target)
        return _like(load_own(folder, embedding_and_head), embedding_and_head)
    return _like(
        _build(folder, read_published(folder, target, embedding_and_head), embedding_and_head), embedding_and_head
    )


def read_published(folder: Path, target: TargetInfo, embedding_and_head: EmbeddingAndHead) -> ConvertedCheckpoint:
    """A checkpoint of another project in our words.

    Raises:
        ValueError: a damaged or incomplete checkpoint, one of no known format, or one for another target.
    """
    known = find_format(folder)
    if known is None:
        raise ValueError(
            f"{folder}: neither a speculator of ours nor one in a format that is known here; docs/formats.md lists them"
        )
    format_, found = known
    if not found.names:
        raise ValueError(missing_weights(folder))
    try:
        return format_.read(found, target, embedding_and_head)
    except ValidationError as error:
        raise ValueError(f"{folder / CONFIG}: {explain(error)}") from error


def _build(folder: Path, reading: ConvertedCheckpoint, embedding_and_head: EmbeddingAndHead) -> Speculator:
    config_type, network_type = NETWORKS[reading.config.kind]
    assert isinstance(reading.config, config_type)
    network = network_type(reading.config, embedding_and_head)
    if "token_of" in reading.tensors:
        network.set_draft_vocab(reading.tensors["token_of"])
    # What else a network keeps beside its weights, such as a calibrated tree, others do not publish.
    weights = {name for name, _ in network.named_parameters()}
    fresh = {name: tensor for name, tensor in network.state_dict().items() if name not in weights}
    try:
        network.load_state_dict(fresh | dict(reading.tensors))
    except RuntimeError as error:
        raise ValueError(f"{folder}: {str(error).splitlines()[-1].strip()}") from error
    return network


def _like(network: Speculator, embedding_and_head: EmbeddingAndHead) -> Speculator:
    """On the device and in the dtype of the ends; buffers, such as rotary tables, keep their precision."""
    network.to(device=embedding_and_head.head.device)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(embedding_and_head.head.dtype)
    return network


def check_target(folder: Path, trained_for: object, target: TargetInfo) -> None:
    """Refuse a speculator that was trained for another model; sizes decide where it has no fingerprint.

    Raises:
        ValueError: with what it was trained for and what was given.
    """
    if not isinstance(trained_for, dict):
        raise ValueError(f"{folder}: its config.json does not say which target it was trained for")
    card = validate(TargetInfo, trained_for, f"{folder / CONFIG}: target")
    sizes = (card.hidden, card.vocab, card.layers) == (target.hidden, target.vocab, target.layers)
    prints = not card.fingerprint or not target.fingerprint or card.fingerprint == target.fingerprint
    if not (sizes and prints):
        raise ValueError(
            f"{folder}: this speculator was trained for another model ({card.name}: {_described(card)}); the target "
            f"has "
            f"{_described(target)}; take one for this target, or train it with `foretell train`"
        )


def _described(card: TargetInfo) -> str:
    mark = f", fingerprint {card.fingerprint}" if card.fingerprint else ""
    return f"{card.layers} layers, width {card.hidden}, {card.vocab} tokens{mark}"
