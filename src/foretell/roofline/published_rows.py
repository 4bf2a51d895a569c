"""The published measurements of published.toml."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

Measure = Literal["speedup", "tokens_per_second", "seconds_per_pass", "seconds_per_token"]
DEFAULT_CONTEXT = 500
"""Cached tokens of a measurement that states none: half of a typical answer and its prompt."""


@dataclass(frozen=True)
class PublishedRow:
    """A published measurement; published.toml describes the fields."""

    group: str
    model: str
    hardware: str
    runtime: str
    measure: Measure
    published: float
    source: str
    batch: int = 1
    context: int = DEFAULT_CONTEXT
    tokens: int = 1
    weights: str = "16"
    devices: int = 1
    method: str = ""
    draft: str = ""
    nodes: int = 0
    depth: int = 0
    tau: float = 0.0
    tau_basis: str = ""
    offload: bool = False
    fit: bool = False


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("foretell.roofline").joinpath("published.toml").read_text("utf-8"))


def published_groups() -> Mapping[str, str]:
    """The groups of measurements, and what each is about."""
    return {name: str(entry["about"]) for name, entry in _table().items()}


@cache
def published_rows() -> Sequence[PublishedRow]:
    """All measurements in order.

    Raises:
        ValueError: a row with an unknown measure.
    """
    rows = [PublishedRow(name, **raw) for name, entry in _table().items() for raw in entry["rows"]]
    for row in rows:
        if row.measure not in get_args(Measure):
            raise ValueError(f"published.toml: there is no measure {row.measure!r}; use {', '.join(get_args(Measure))}")
    return rows
