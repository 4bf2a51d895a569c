"""All methods by name: the built-in ones, then those of other packages."""

from collections.abc import Mapping
from importlib.metadata import entry_points

from foretell.accept import Match
from foretell.catalogue import (
    draft_model,
    feature_level,
    heads,
    hybrid,
    lossy,
    parallel_decoding,
    retrieval,
    self_drafting,
)
from foretell.catalogue.build_context import BuildContext
from foretell.catalogue.config import SpeculativeConfig
from foretell.catalogue.entry import Entry
from foretell.draft import NoDrafter
from foretell.engine.method import AnyMethod, Method
from foretell.shape import RootOnly
from foretell.utils.names import unknown

BUILT_IN: tuple[Entry, ...] = (
    Entry(
        name="autoregressive",
        family="baseline",
        description="Plain decoding: one token per pass.",
        when_to_use="as the baseline that every other method is measured against.",
        drafter=NoDrafter,
        shape=RootOnly,
        acceptor=Match,
        builder=lambda context, options: Method(NoDrafter(), RootOnly(), Match()),
        aliases=("none", "plain"),
    ),
    *retrieval.ENTRIES,
    *draft_model.ENTRIES,
    *self_drafting.ENTRIES,
    *heads.ENTRIES,
    *feature_level.ENTRIES,
    *parallel_decoding.ENTRIES,
    *hybrid.ENTRIES,
    *lossy.ENTRIES,
)


def catalogue() -> Mapping[str, Entry]:
    """All methods by name: the built-in ones, then those in the entry point group `foretell.methods`.

    Raises:
        ValueError: something else than an entry is registered.
    """
    entries = {e.name: e for e in BUILT_IN}
    for point in entry_points(group="foretell.methods"):
        entry = point.load()
        if not isinstance(entry, Entry):
            raise ValueError(f"the entry point {point.name} = {point.value} names no foretell.catalogue.Entry")
        entries.setdefault(entry.name, entry)
    return entries


def find(name: str) -> Entry:
    """The entry of this name or alias.

    Raises:
        ValueError: there is none; the nearest name is suggested.
    """
    entries = catalogue()
    by_alias = {a: e for e in entries.values() for a in e.aliases}
    found = entries.get(name) or by_alias.get(name)
    if found is None:
        raise unknown("method", name, entries)
    return found


def build(
    name: str, context: BuildContext, config: SpeculativeConfig | Mapping[str, object] | None = None
) -> AnyMethod:
    """The method of this name, with fresh memory.

    Raises:
        ValueError: no such method, an option that it does not read, or something that it needs is missing.
    """
    return find(name).build(context, config)
