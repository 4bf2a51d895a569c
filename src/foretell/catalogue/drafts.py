"""The small models of a method: checkpoints and trained drafts that the user named, else the installed trained draft."""

from collections.abc import Sequence

from foretell.catalogue.parts import Parts
from foretell.catalogue.trained import read, target_card
from foretell.draft import DraftModel, Mix, Predictor
from foretell.draft.network.draft_model import DraftNetwork
from foretell.model.runner import Runner
from foretell.speculator.checkpoint import read_config
from foretell.speculator.installed import find_installed, how_to_get

KIND = DraftNetwork.kind


def drafter_of(parts: Parts) -> Predictor:
    """The draft model, or several mixed."""
    return mixed(small_models(parts))


def mixed(runners: Sequence[Runner]) -> Predictor:
    """One draft model, or the mean of several."""
    models = [DraftModel(r) for r in runners]
    return models[0] if len(models) == 1 else Mix(models)


def small_models(parts: Parts) -> tuple[Runner, ...]:
    """The draft models.

    Raises:
        ValueError: there is none, or one does not fit.
    """
    found = find_small(parts)
    if not found:
        fingerprint = parts.source.fingerprint() if parts.source else ""
        raise ValueError(f"this method needs a draft model: {how_to_get(KIND, fingerprint)}; layer_skip needs none")
    return found


def find_small(parts: Parts) -> tuple[Runner, ...]:
    """The draft models that were named, else the installed one for the target; none where there is none.

    Raises:
        ValueError: one has another vocabulary than the target, or a speculator of another kind was named.
    """
    for runner in parts.drafts:
        if runner.vocab != parts.vocab:
            raise ValueError(
                f"the draft model's vocabulary has {runner.vocab} tokens, the target's {parts.vocab}; use a draft model with the target's tokenizer"
            )
    if parts.drafts or parts.speculators:
        return (*parts.drafts, *(network.runner() for network in draft_networks(parts)))
    if parts.source is None:
        return ()
    folder = find_installed(KIND, target_card(parts).fingerprint)
    return () if folder is None else (_network(parts, read(parts, folder)).runner(),)


def draft_networks(parts: Parts) -> tuple[DraftNetwork, ...]:
    """The trained drafts that were named.

    Raises:
        ValueError: one is a speculator of another kind.
    """
    return tuple(_network(parts, read(parts, folder)) for folder in parts.speculators)


def named_drafts_only(parts: Parts) -> bool:
    """Whether no speculator but trained draft models was named."""
    return all(read_config(folder).get("kind") == KIND for folder in parts.speculators)


def _network(parts: Parts, found: object) -> DraftNetwork:
    if not isinstance(found, DraftNetwork):
        named = ", ".join(map(str, parts.speculators))
        raise ValueError(f"{named}: this method drafts with small models, and a speculator of another kind was named")
    return found
