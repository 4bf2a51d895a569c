"""All methods by name: the built-in ones, then those of other packages."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

from foretell.accept import Match
from foretell.catalogue import (
    draft_model,
    feature_level,
    heads,
    hybrid,
    lossy,
    masked_diffusion,
    one_pass,
    parallel_decoding,
    retrieval,
    self_drafting,
    sparse_cache,
    sparse_mlp,
)
from foretell.catalogue.build_context import BuildContext
from foretell.catalogue.config import SpeculativeConfig
from foretell.catalogue.entry import Entry
from foretell.draft import NoDrafter
from foretell.engine.method import AnyMethod, Method
from foretell.shape import RootOnly
from foretell.utils.names import METHODS, unknown

DEFAULT_METHOD = "auto"
"""What the command line and the server decode with where no method is named."""

BUILT_IN: tuple[Entry, ...] = (
    Entry(
        name="autoregressive",
        family="baseline",
        description="Plain decoding: one token per pass of the target.",
        when_to_use="as the baseline of every measurement.",
        drafter=NoDrafter,
        shape=RootOnly,
        acceptor=Match,
        builder=lambda context, options: Method(NoDrafter(), RootOnly(), Match()),
        aliases=("none", "plain"),
    ),
    *retrieval.ENTRIES,
    *draft_model.ENTRIES,
    *masked_diffusion.ENTRIES,
    *self_drafting.ENTRIES,
    *sparse_cache.ENTRIES,
    *sparse_mlp.ENTRIES,
    *heads.ENTRIES,
    *feature_level.ENTRIES,
    *one_pass.ENTRIES,
    *parallel_decoding.ENTRIES,
    *hybrid.ENTRIES,
    *lossy.ENTRIES,
)


@dataclass(frozen=True)
class InstalledMethods:
    """The methods of other packages, and one sentence for every entry point that gives none."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...]


def installed_methods() -> InstalledMethods:
    """Load the entry points of the group `foretell.methods`. A broken package does not affect the others."""
    entries, problems = list[Entry](), list[str]()
    for point in entry_points(group=METHODS):
        try:
            entry = point.load()
            if not isinstance(entry, Entry):
                raise TypeError("it is no foretell.catalogue.Entry")
            entries.append(entry)
        except Exception as error:  # A package can raise anything when it is imported.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            problems.append(
                f"the method {point.name} = {point.value} of another package cannot be loaded ({reason}); "
                f"upgrade or remove the package"
            )
    return InstalledMethods(tuple(entries), tuple(problems))


def catalogue() -> Mapping[str, Entry]:
    """All methods by name: the built-in ones, then those of other packages, which cannot replace one."""
    entries = {e.name: e for e in BUILT_IN}
    for entry in installed_methods().entries:
        entries.setdefault(entry.name, entry)
    return entries


def find(name: str) -> Entry:
    """The entry of this name or alias.

    Raises:
        ValueError: there is none; the message suggests the nearest name.
    """
    for built_in in BUILT_IN:
        if built_in.name == name:  # No other package replaces it, so none needs to be loaded.
            return built_in
    entries = catalogue()
    by_alias = {a: e for e in entries.values() for a in e.aliases}
    entry = entries.get(name) or by_alias.get(name)
    if entry is None:
        problems = "".join(f" ({p})" for p in installed_methods().problems)
        raise ValueError(f"{unknown('method', name, entries)}{problems}")
    return entry


def build(
    name: str, context: BuildContext, config: SpeculativeConfig | Mapping[str, object] | None = None
) -> AnyMethod:
    """Build the method of this name or alias with its initial state.

    Raises:
        ValueError: no such method, an option that it does not have, or something that it needs is missing.
    """
    return find(name).build(context, config)
