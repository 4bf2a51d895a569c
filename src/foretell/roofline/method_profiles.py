"""Drafting cost and acceptance of every decoding method of the catalogue, read from methods.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from foretell.roofline.acceptance import Acceptance, fitted, profile
from foretell.roofline.drafter_cost import DraftKind
from foretell.roofline.names import look_up


@dataclass(frozen=True)
class Method:
    """A decoding method: how it drafts, how it arranges, and how much of it stands; see methods.toml for the fields."""

    name: str
    title: str
    draft: DraftKind
    shape: str
    acceptance: Acceptance
    basis: str
    share: float = 0.25
    heads: int = 5
    nodes: int = 0
    tokens: float = 0.0


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("foretell.roofline").joinpath("methods.toml").read_text("utf-8"))


@cache
def catalogue() -> Mapping[str, Method]:
    """The methods that have costs of their own, by their names in the catalogue, with acceptance from the
    literature.
    """
    return {name: _method(name, entry) for name, entry in _table().items()}


@cache
def priced() -> Mapping[str, str]:
    """Every method of the catalogue that drafts, to the method whose costs it has: its own, or those of one that drafts
    alike.
    """
    return {other: name for name, entry in _table().items() for other in (name, *entry.get("also", ()))}


def not_runnable() -> set[str]:
    """Methods that are analysed here only."""
    return {name for name, entry in _table().items() if not entry.get("runnable", True)}


def method(name: str) -> Method:
    """The costs of a method of the catalogue.

    Raises:
        ValueError: no such method; says which may have been meant.
    """
    key = name.strip().lower()
    if key not in priced():
        former = {other: known for known, entry in _table().items() for other in entry.get("formerly", ())}
        spelled = key.replace("-", "_")
        now = spelled if spelled in priced() else former.get(spelled)
        if now is not None:
            raise ValueError(f"there is no method called {name!r}; its name is {now}")
        look_up(priced(), key, "method")
    return replace(catalogue()[priced()[key]], name=key)


def _method(name: str, raw: Mapping[str, Any]) -> Method:
    chain, source = raw["shape"] == "chain", str(raw["source"])
    if raw["shape"] == "fixed":
        accepted = Acceptance((0.0,), source)
    elif "accept" in raw:
        accepted = profile(raw["accept"], source, chain)
    else:
        accepted = fitted(raw["tokens"], raw["nodes"], raw["depth"], source, chain)
    return Method(
        name, raw["title"], raw["draft"], raw["shape"], accepted, raw["basis"], raw.get("share", 0.25), raw.get("heads",
        5),
        raw.get("nodes", 0), raw.get("tokens", 0.0),
    )  # fmt: skip


def with_acceptance(method: Method, acceptance: Acceptance, basis: str) -> Method:
    """The method with acceptance given or measured; a method of fixed shape takes one plus its first rank as tokens per
    pass.
    """
    if method.shape == "fixed":
        return replace(method, tokens=1 + acceptance.ranks[0], basis=basis)
    ranks = acceptance.ranks[:1] if method.shape == "chain" else acceptance.ranks
    return replace(method, acceptance=replace(acceptance, ranks=ranks), basis=basis)
