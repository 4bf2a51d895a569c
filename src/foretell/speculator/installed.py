"""Finds trained speculators in installed packages by the packages' entry points, without running their code."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from foretell.speculator.config_file import CONFIG, read_config

ENTRY_POINTS = "foretell.speculators"
"""Group of the entry points `TARGET = "PACKAGE"`; the package holds `<any folder>/config.json` and weights."""
PACKAGE, PACKAGE_TARGET = "foretell-smollm2-135m", "4e58793650753582"
"""The package that is built from this repository, and the fingerprint of its target's weights."""
PACKAGE_KINDS = ("blockwise", "draft_model", "eagle3", "medusa", "mlp_speculator")


@dataclass(frozen=True)
class InstalledSpeculator:
    """A speculator in an installed package."""

    target: str
    """Name of its target, which is the name of the entry point."""
    kind: str
    fingerprint: str
    """Fingerprint of the target's weights; see `Checkpoint.fingerprint`."""
    folder: Path


@dataclass(frozen=True)
class InstalledSpeculators:
    """The speculators of all packages, in the order of the entry points' names."""

    speculators: tuple[InstalledSpeculator, ...]
    problems: tuple[str, ...]
    """A sentence per package that cannot be read."""


@cache
def find_all_installed() -> InstalledSpeculators:
    """Read the entry points and configurations of all packages, once per process."""
    speculators, problems = list[InstalledSpeculator](), list[str]()
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda p: (p.name, p.value)):
        try:
            speculators += list(_speculators(point))
        except (ValueError, OSError) as error:
            package = point.dist.name if point.dist else point.value
            problems.append(f"the speculators of the package {package} cannot be used: {error}; upgrade or remove it")
    return InstalledSpeculators(tuple(speculators), tuple(problems))


def find_installed(kind: str, fingerprint: str) -> Path | None:
    """The folder of the first installed speculator of this kind for the target of this fingerprint."""
    speculators = find_all_installed().speculators
    return next((s.folder for s in speculators if (s.kind, s.fingerprint) == (kind, fingerprint)), None)


def install_hint(kind: str, fingerprint: str) -> str:
    """What to do when `find_installed` finds nothing, as the end of an error message."""
    ours = fingerprint == PACKAGE_TARGET and kind in PACKAGE_KINDS
    install = f"install the package {PACKAGE}, " if ours else ""
    problems = "".join(f" ({p})" for p in find_all_installed().problems)
    return f"{install}train one with `foretell train {kind}`, or name one with --draft-model DIR{problems}"


def _speculators(point: EntryPoint) -> Iterator[InstalledSpeculator]:
    """The speculators of one package."""
    folder = _package_folder(point.value)
    files = sorted(folder.glob(f"*/{CONFIG}"))
    if not files:
        raise ValueError(f"{folder}: no folder with {CONFIG} in it")
    for file in files:
        values = read_config(file.parent)
        kind, target = values.get("kind"), values.get("target")
        fingerprint = target.get("fingerprint") if isinstance(target, dict) else None
        if not (isinstance(kind, str) and kind and isinstance(fingerprint, str) and fingerprint):
            raise ValueError(f"{file}: no `kind`, or no `fingerprint` of its `target`, as `foretell train` writes them")
        yield InstalledSpeculator(point.name, kind, fingerprint, file.parent)


def _package_folder(name: str) -> Path:
    """The folder of a package or subpackage, found without importing it."""
    top, *inside = name.split(".")
    spec = find_spec(top) if top else None
    places = [Path(p, *inside) for p in spec.submodule_search_locations or ()] if spec else []
    folder = next((p for p in places if p.is_dir()), None)
    if folder is None:
        raise ValueError(f"its entry point in {ENTRY_POINTS} names {name!r}, which is no package with a folder")
    return folder
