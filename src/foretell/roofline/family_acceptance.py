"""Acceptance by method and family of targets, from the published measurements."""

import re
import statistics
from dataclasses import dataclass, replace

from foretell.roofline.acceptance import AcceptanceByRank, fit_acceptance
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.fitted_acceptance import features, stored_fit
from foretell.roofline.method_profiles import MethodProfile, method_profiles
from foretell.roofline.published_rows import PublishedRow, published_rows

_SAME_FAMILY = {"llama-3.1": "llama-3", "llama-3.2": "llama-3", "llama-3.3": "llama-3"}
MIN_ROWS_FOR_SPREAD = 3
"""Measurements from which on their own spread is used."""


def family_of(name: str) -> str:
    """The name of a model without its size: `llama-3` of `llama-3.1-8b`."""
    family = re.sub(r"-\d+(\.\d+)?(x\d+)?[bm].*$", "", name.lower())
    return _SAME_FAMILY.get(family, family)


@dataclass(frozen=True)
class MeasuredTokens:
    """Median tokens per pass of some measurements, relative spread of the accepted tokens (None: too few), source."""

    tokens: float
    spread: float | None
    source: str


def measured_tokens(profile: MethodProfile, target: str, draft_model: str = "") -> MeasuredTokens | None:
    """What was published for a method on a target, or else on its family; greedy, with the profile's tree; None: none.

    `draft_model`: the measurements must be with this one, where the method has a draft model.
    """
    fitting = [row for row in published_rows() if _fits(row, profile, draft_model)]
    rows = [row for row in fitting if row.model == target]
    whose = target
    if not rows:
        whose = family_of(target)
        rows = [row for row in fitting if family_of(row.model) == whose]
    if not rows:
        return None
    taus = [row.tau for row in rows]
    middle = statistics.median(taus)
    spread = (max(taus) - min(taus)) / 2 / (middle - 1) if len(taus) >= MIN_ROWS_FOR_SPREAD else None
    works = ", ".join(dict.fromkeys(row.source.partition(",")[0] for row in rows))
    count = f"median of {len(rows)} measurements" if len(rows) > 1 else "one measurement"
    return MeasuredTokens(middle, spread, f"{works}: {middle:.2f} tokens per pass on {whose}, {count}")


def _fits(row: PublishedRow, profile: MethodProfile, draft_model: str) -> bool:
    if row.method != profile.name or row.measure != "speedup" or row.tau <= 1 or row.tau_basis or row.drafter:
        return False
    if row.temperature or row.draft != (draft_model if profile.draft == "model" else ""):
        return False
    return (row.nodes, row.depth) == (profile.largest or (profile.nodes, profile.depth))


def profile_for_target(profile: MethodProfile, target: AnalyzedModel, draft_model: str) -> MethodProfile:
    """The profile with the acceptance published for this target or its family, or else fitted to its size.

    A profile with acceptance of its own, given or measured, is kept; so is one whose drafter was not fitted.
    """
    if profile != method_profiles().get(profile.name):
        return profile
    published = measured_tokens(profile, target.name, draft_model)
    if published is None:
        return _fitted(profile, target)
    spread = profile.spread if published.spread is None else published.spread
    chosen = replace(profile, basis="published", spread=spread)
    if profile.shape == "fixed":
        return replace(chosen, tokens=published.tokens, acceptance=AcceptanceByRank((0.0,), published.source))
    nodes, depth = profile.largest or (profile.nodes, profile.depth)
    fitted = fit_acceptance(published.tokens, nodes, depth, published.source, profile.shape == "chain")
    return replace(chosen, acceptance=fitted)


def _fitted(profile: MethodProfile, target: AnalyzedModel) -> MethodProfile:
    """The profile with the fitted acceptance of a layer or heads on the target's states, else as it is.

    Draft models are left out: all their figures are of llama-68m.
    """
    fit = stored_fit()
    if profile.draft not in ("heads", "layer") or profile.name not in fit.drafters:
        return profile
    source = f"fitted to {sum(fit.papers.values())} figures of {len(fit.papers)} publications by size and vocabulary"
    acceptance = fit.acceptance(features(profile, profile.name, target, None), profile.name, False, source)
    return replace(profile, basis="fitted", acceptance=acceptance)
