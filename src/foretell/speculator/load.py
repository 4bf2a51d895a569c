"""From a directory to a speculator that fits a target, whoever wrote it."""

from pathlib import Path

from pydantic import ValidationError

from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.speculator.checkpoint import CONFIG, load_own, read_config
from foretell.speculator.formats import recognised
from foretell.speculator.formats.base import Reading
from foretell.speculator.formats.files import absent
from foretell.speculator.network import NETWORKS
from foretell.speculator.network.base import Speculator, TargetCard
from foretell.utils.validation import explain, validate


def load_speculator(folder: Path, target: TargetCard, ends: EmbeddingAndHead) -> Speculator:
    """Read a speculator for a target; its weights are in the dtype and on the device of `ends`.

    Raises:
        ValueError: a damaged or incomplete checkpoint, one of no known format, or one for another target.
    """
    values = read_config(folder)
    if "kind" in values:
        check_target(folder, values.get("target"), target)
        return _like(load_own(folder, ends), ends)
    return _like(_build(folder, read_published(folder, target, ends), ends), ends)


def read_published(folder: Path, target: TargetCard, ends: EmbeddingAndHead) -> Reading:
    """A checkpoint of another project in our words.

    Raises:
        ValueError: a damaged or incomplete checkpoint, one of no known format, or one for another target.
    """
    known = recognised(folder)
    if known is None:
        raise ValueError(
            f"{folder}: neither a speculator of ours nor one in a format that is known here; docs/formats.md lists them"
        )
    format_, found = known
    if not found.names:
        raise ValueError(absent(folder))
    try:
        return format_.read(found, target, ends)
    except ValidationError as error:
        raise ValueError(f"{folder / CONFIG}: {explain(error)}") from error


def _build(folder: Path, reading: Reading, ends: EmbeddingAndHead) -> Speculator:
    config_type, network_type = NETWORKS[reading.config.kind]
    assert isinstance(reading.config, config_type)
    network = network_type(reading.config, ends)
    if "token_of" in reading.tensors:
        network.choose(reading.tensors["token_of"])
    # What else a network keeps beside its weights, such as a calibrated tree, others do not publish.
    weights = {name for name, _ in network.named_parameters()}
    fresh = {name: tensor for name, tensor in network.state_dict().items() if name not in weights}
    try:
        network.load_state_dict(fresh | dict(reading.tensors))
    except RuntimeError as error:
        raise ValueError(f"{folder}: {str(error).splitlines()[-1].strip()}") from error
    return network


def _like(network: Speculator, ends: EmbeddingAndHead) -> Speculator:
    """On the device and in the dtype of the ends; buffers, such as rotary tables, keep their precision."""
    network.to(device=ends.head.device)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(ends.head.dtype)
    return network


def check_target(folder: Path, trained_for: object, target: TargetCard) -> None:
    """Refuse a speculator that was trained for another model; sizes decide where it has no fingerprint.

    Raises:
        ValueError: with what it was trained for and what was given.
    """
    if not isinstance(trained_for, dict):
        raise ValueError(f"{folder}: its config.json does not say which target it was trained for")
    card = validate(TargetCard, trained_for, f"{folder / CONFIG}: target")
    sizes = (card.hidden, card.vocab, card.layers) == (target.hidden, target.vocab, target.layers)
    prints = not card.fingerprint or not target.fingerprint or card.fingerprint == target.fingerprint
    if not (sizes and prints):
        raise ValueError(
            f"{folder}: this speculator was trained for another model ({card.name}: {_described(card)}); the target "
            f"has "
            f"{_described(target)}; take one for this target, or train it with `foretell train`"
        )


def _described(card: TargetCard) -> str:
    mark = f", fingerprint {card.fingerprint}" if card.fingerprint else ""
    return f"{card.layers} layers, width {card.hidden}, {card.vocab} tokens{mark}"
