"""Published speculators and draft models by their targets: a table of hub ids, methods and licences."""

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Pair:
    """A target and what drafts for it, by their hub ids."""

    target: str
    speculator: str
    kind: str
    """The method that drafts with it."""
    licence: str
    """As its page states it; empty: not known here."""
    source: str
    """Where the two are named together."""


@cache
def known_pairs() -> Sequence[Pair]:
    """All pairs of the table."""
    text = resources.files("foretell.speculator").joinpath("pairs.toml").read_text("utf-8")
    return [Pair(*entry) for entry in tomllib.loads(text)["pairs"]]


def pairs_for(names: Iterable[str]) -> list[Pair]:
    """The pairs of a model, by its hub id, the name in its file or that of its file, whatever its quantisation."""
    own = {_plain(name) for name in names} - {""}
    return [pair for pair in known_pairs() if _plain(pair.target) in own]


_ENDINGS = re.compile(
    r"(-(gguf|mlx|dwq|awq|gptq|fp8|bf16|f16|f32|hf|unsloth|\d+-?bits?|i?q\d[\w]*|mxfp4|ud|imat|imatrix|i1))+$"
)
"""Ends of names that say how a model is stored."""


def _plain(name: str) -> str:
    """A name without its owner, its tag and what it says of the storage; small letters and hyphens."""
    last = name.strip().lower().removesuffix(".gguf").rpartition("/")[2].partition(":")[0]
    last = re.sub(r"-\d{5}-of-\d{5}$", "", last)
    return _ENDINGS.sub("", re.sub(r"\s+", "-", last)).replace("_", "-").removeprefix("meta-")
