"""Builders of methods that copy what can be copied and have something guess the rest."""

from collections.abc import Callable, Mapping
from typing import Any

from foretell.accept import Match
from foretell.catalogue.drafts import KIND, find_small, mixed, named_drafts_only
from foretell.catalogue.eagle import eagle_method
from foretell.catalogue.heads import heads_method
from foretell.catalogue.parts import Parts, copies, early_exit, frugal_of
from foretell.catalogue.stages import stages_method
from foretell.catalogue.trained import read, target_card
from foretell.config import SpeculativeConfig
from foretell.draft import Hybrid, Predictor, Retriever, Suffix
from foretell.draft.network.base import Speculator
from foretell.draft.network.pack import packed
from foretell.method import AnyMethod, Method
from foretell.shape import Chain, Fallback, Shape
from foretell.speculator.installed import find_installed

_GUESSERS: Mapping[str, Callable[[Any, SpeculativeConfig], AnyMethod]] = {
    "eagle3": eagle_method,
    "mlp_speculator": stages_method,
    "eagle": eagle_method,
    "medusa": heads_method,
    "blockwise": heads_method,
}
"""How speculators of each kind draft; of those that are installed, the first is taken."""


def hybrid_model(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Copies first; where they find nothing a trained speculator, a small model, or the target's first layers."""
    speculator = _speculator(parts)
    if speculator is not None:
        # Successors of single tokens it knows better than a table of them.
        method = _GUESSERS[speculator.kind](packed(speculator), config)
        return _beside(Suffix(parts.references), method.draft, method.tree, config)
    small = find_small(parts)
    confidence = 0.4 if config.confidence_threshold is None else config.confidence_threshold
    chain = Chain(config.num_speculative_tokens or 5, draw=False, confidence=confidence)
    return _beside(copies(parts), mixed(small) if small else early_exit(parts, config), chain, config)


def _beside(copying: Retriever, draft: Predictor, tree: Shape[Predictor], config: SpeculativeConfig) -> AnyMethod:
    return Method(Hybrid(copying, draft), Fallback(frugal_of(config), tree), Match())


def _speculator(parts: Parts) -> Speculator | None:
    """The trained speculator, unless it is a draft model: then None, as where there is none."""
    if parts.drafts or (parts.speculators and named_drafts_only(parts)):
        return None
    if parts.speculator is not None:
        found = read(parts, parts.speculator)
        if found.kind not in _GUESSERS:
            raise ValueError(
                f"{parts.speculator}: a hybrid drafts with one of {', '.join([*_GUESSERS, KIND])}, not with {found.kind}"
            )
        return found
    if parts.source is None:
        return None
    fingerprint = target_card(parts).fingerprint
    folder = next((f for kind in _GUESSERS if (f := find_installed(kind, fingerprint))), None)
    return None if folder is None else read(parts, folder)
