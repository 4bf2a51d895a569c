"""The speculator of a method that needs a trained one: what the user named, or what is installed."""

from pathlib import Path

from foretell.catalogue.parts import Parts, own
from foretell.draft.network.base import Speculator, TargetCard
from foretell.model.decoder import Decoder
from foretell.model.ends import Ends
from foretell.speculator.installed import find_installed, how_to_get
from foretell.speculator.load import load_speculator


def trained(parts: Parts, kind: str) -> Speculator:
    """The speculator of this kind that the user named, else the installed one for the target, in the dtype that the target runs in.

    Raises:
        ValueError: there is none, it is of another kind or for another target, or the target is not on the own decoder.
    """
    card = target_card(parts)
    folder = parts.speculator or find_installed(kind, card.fingerprint)
    if folder is None:
        raise ValueError(f"no {kind} speculator is installed for this target; {how_to_get(kind, card.fingerprint)}")
    found = read(parts, folder)
    if found.kind != kind:
        raise ValueError(f"{folder}: a speculator of kind {found.kind}, and this method drafts with one of kind {kind}")
    return found


def read(parts: Parts, folder: Path) -> Speculator:
    """The speculator in a directory, of whichever kind, in the dtype that the target runs in.

    Raises:
        ValueError: it is damaged or for another target, or the target is not on the own decoder.
    """
    return load_speculator(folder, target_card(parts), ends_of(parts)).eval().requires_grad_(False)


def target_card(parts: Parts) -> TargetCard:
    """Which model speculators must have been trained for; without a fingerprint where its checkpoint is not at hand.

    Raises:
        ValueError: the target is not on the own decoder.
    """
    c = own(parts).config
    fingerprint = parts.source.fingerprint() if parts.source else ""
    return TargetCard(name=c.architecture, fingerprint=fingerprint, hidden=c.hidden, vocab=c.vocab, layers=c.layers)


def ends_of(parts: Parts) -> Ends:
    """The target's embedding and head, in the dtype that it runs in.

    Raises:
        ValueError: the target is not on the own decoder, or its weights cannot be read again.
    """
    if parts.source is not None:
        return parts.source.ends(parts.source.dtype)
    network = own(parts)
    if not isinstance(network, Decoder):
        raise ValueError("this method borrows the target's embedding and head, which cannot be read again here")
    c = network.config
    return Ends(network.embedding.detach(), network.head.weight.detach(), c.embedding_scale, c.logit_softcap)
