"""The published measurements of published.toml."""

import re
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
    task: str = ""
    temperature: float = 0.0
    drafter: str = ""
    offload: bool = False
    fit: bool = False

    @property
    def paper(self) -> str:
        """The publication: the source up to the first comma, colon or semicolon."""
        return re.split("[,:;]", self.source)[0]

    @property
    def states_tokens(self) -> bool:
        """Whether the tokens per pass are a published figure."""
        return self.tau > 1 and not self.tau_basis.startswith("assumed")


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("foretell.roofline").joinpath("published.toml").read_text("utf-8"))


def published_groups() -> Mapping[str, str]:
    """The groups of measurements, and what each is about."""
    return {name: str(entry["about"]) for name, entry in _table().items()}


def published_goals() -> Mapping[str, float]:
    """The groups of speed-ups with a goal for the median error at predicted tokens per pass, and the goal."""
    return {name: float(entry["goal"]) for name, entry in _table().items() if "goal" in entry}


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
