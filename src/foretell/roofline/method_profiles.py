"""Drafting cost and acceptance of every decoding method of the catalogue, read from methods.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from foretell.roofline.acceptance import AcceptanceByRank, fit_acceptance, geometric_acceptance
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.drafter_cost import DrafterCost, DraftKind, drafter_cost
from foretell.roofline.names import look_up

ACCEPTED_SPREAD = 0.2
"""Relative spread of the accepted tokens over tasks and models: all greedy rows of arXiv 2401.15077, table 1, lie
within it of their mean (2.61 to 3.52 accepted tokens, mean 3.06).
"""


@dataclass(frozen=True)
class MethodProfile:
    """Drafting cost, draft shape and acceptance of a decoding method; methods.toml describes the fields."""

    name: str
    title: str
    draft: DraftKind
    shape: str
    acceptance: AcceptanceByRank
    basis: str
    share: float = 0.25
    heads: int = 5
    nodes: int = 0
    depth: int = 0
    tokens: float = 0.0
    vocab: int = 0
    keys: int = 0
    largest: tuple[int, int] | None = None
    """Nodes (root included) and depth of the tree whose acceptance was measured; a larger one is not predicted."""
    spread: float = ACCEPTED_SPREAD
    """Relative spread of the accepted tokens."""

    @property
    def max_depth(self) -> int | None:
        """Deepest tree that the drafter can propose: a head predicts one position. None: any."""
        return self.heads if self.draft == "heads" else None


@cache
def _file() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("foretell.roofline").joinpath("methods.toml").read_text("utf-8"))


def _table() -> Mapping[str, Mapping[str, Any]]:
    return {name: entry for name, entry in _file().items() if name != "draft_models"}


@cache
def method_profiles() -> Mapping[str, MethodProfile]:
    """The entries of methods.toml by name, with acceptance from the literature."""
    return {name: _profile(name, entry) for name, entry in _table().items()}


@cache
def profile_of_method() -> Mapping[str, str]:
    """Every drafting method of the catalogue, and the name of the profile that applies to it."""
    return {other: name for name, entry in _table().items() for other in (name, *entry.get("also", ()))}


def find_method(name: str) -> MethodProfile:
    """The profile of a method of the catalogue.

    Raises:
        ValueError: no such method; says which may have been meant.
    """
    key = name.strip().lower()
    if key not in profile_of_method():
        former_names = {other: known for known, entry in _table().items() for other in entry.get("formerly", ())}
        spelled = key.replace("-", "_")
        current = spelled if spelled in profile_of_method() else former_names.get(spelled)
        if current is not None:
            raise ValueError(f"there is no method called {name!r}; its name is {current}")
        look_up(profile_of_method(), key, "method")
    return replace(method_profiles()[profile_of_method()[key]], name=key)


def _profile(name: str, raw: Mapping[str, Any]) -> MethodProfile:
    chain, source = raw["shape"] == "chain", str(raw["source"])
    if raw["shape"] == "fixed":
        acceptance = AcceptanceByRank((0.0,), source)
    elif "accept" in raw:
        acceptance = geometric_acceptance(raw["accept"], source, chain)
    else:
        acceptance = fit_acceptance(raw["tokens"], raw["nodes"], raw["depth"], source, chain)
    fitted = raw["shape"] != "fixed" and "accept" not in raw
    return MethodProfile(
        name, raw["title"], raw["draft"], raw["shape"], acceptance, raw["basis"],
        largest=(raw["nodes"], raw["depth"]) if fitted else None,
        **{key: raw[key] for key in ("share", "heads", "nodes", "depth", "tokens", "vocab", "keys") if key in raw},
    )  # fmt: skip


def cost_of_profile(
    profile: MethodProfile, target: AnalyzedModel, draft_model: AnalyzedModel | None = None
) -> DrafterCost | None:
    """The drafting cost of a method for a target.

    Raises:
        ValueError: a draft model is needed and none is given or known, or its vocabulary differs.
    """
    return drafter_cost(profile.draft, target, draft_model, profile.share, profile.heads, profile.vocab, profile.keys)


def with_acceptance(profile: MethodProfile, acceptance: AcceptanceByRank, basis: str) -> MethodProfile:
    """The profile with other acceptance; a method of fixed shape gets 1 + ranks[0] tokens per pass."""
    if profile.shape == "fixed":
        return replace(profile, tokens=1 + acceptance.ranks[0], basis=basis)
    ranks = acceptance.ranks[:1] if profile.shape == "chain" else acceptance.ranks
    return replace(profile, acceptance=replace(acceptance, ranks=ranks), basis=basis, largest=None)


def with_draft_vocab(profile: MethodProfile, vocab: int | None) -> MethodProfile:
    """The profile with another vocabulary of its drafter, where that is a layer (0: all tokens); None: unchanged.

    Raises:
        ValueError: fewer than 0 tokens.
    """
    if vocab is None or profile.draft != "layer":
        return profile
    if vocab < 0:
        raise ValueError(f"a draft vocabulary has 0 (all) or more tokens, found {vocab}")
    return replace(profile, vocab=vocab)


def profile_for_draft(profile: MethodProfile, draft_model: str) -> MethodProfile:
    """The profile with the acceptance published for a particular draft model, where there is one."""
    raw = _file()["draft_models"].get(draft_model)
    if profile.draft != "model" or profile.basis not in ("published", "assumed") or raw is None:
        return profile
    chain = profile.shape == "chain"
    return with_acceptance(profile, geometric_acceptance(raw["accept"], str(raw["source"]), chain), "published")
