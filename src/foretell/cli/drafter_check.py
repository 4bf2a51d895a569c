"""Checks a named drafter by the first answers, against its card or what it did the last time."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from foretell.cli.errors import print_error
from foretell.cli.setup import ModelSetup
from foretell.engine.drafter_check import DrafterCheck
from foretell.engine.method import AnyMethod
from foretell.model.kernels.build import cache_directory
from foretell.utils.validation import read_json

_CARD = re.compile(r"^\| Tokens per pass \| \*\*(\d+\.\d+)\*\*", re.MULTILINE)
"""Of a card that `foretell train` writes."""


def checked(setup: ModelSetup, method: AnyMethod) -> AnyMethod:
    """The method, with a check of the draft models and speculators that were named for it."""
    if not method.inputs & {"drafts", "speculators"}:
        return method
    names = [str(draft) if isinstance(draft, Path) else draft.name for draft in setup.drafts]
    key = " ".join([setup.model.name, method.name, *names])
    card = next(filter(None, (_of_card(draft) for draft in setup.drafts if isinstance(draft, Path))), None)
    last = _records().get(key)
    lowest = last if isinstance(last, float) else None
    known = lowest if card is None else card
    check = DrafterCheck(
        ", ".join(names),
        print_error,
        lambda drafts: _keep(key, min(drafts, lowest or drafts)),
        known,
        "its card" if card else "earlier texts",
    )
    return replace(method, check=check)


def _of_card(folder: Path) -> float | None:
    """Accepted drafts per pass by the card of a trained speculator; None: it has none of ours."""
    with suppress(OSError):
        stated = _CARD.search((folder / "README.md").read_text("utf-8", errors="replace"))
        return float(stated[1]) - 1 if stated else None
    return None


def _file() -> Path:
    return cache_directory() / "acceptance.json"


def _records() -> Mapping[str, object]:
    """The fewest accepted drafts per pass of earlier times, by target, method and drafters."""
    with suppress(OSError, ValueError):
        return read_json(_file())
    return {}


def _keep(key: str, drafts: float) -> None:
    with suppress(OSError):
        part = _file().with_name(f"acceptance.{os.getpid()}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({**_records(), key: drafts}, indent=1))
        part.replace(_file())
