"""Sampling defaults of a server: the checkpoint's `generation_config.json`, or the operator's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.core.sampling import SamplingParams
from foretell.utils.validation import Fields, parse_object, read_json

OPENAI_DEFAULTS: Mapping[str, float] = {"temperature": 1.0}
"""Where they differ from the engine's."""
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("top_k", "max_new_tokens")


def read_defaults(source: str, model: Path, override: str | None) -> dict[str, Any]:
    """Defaults by field: `source` is `auto` (the model's directory), `none`, or a folder with a
    `generation_config.json`; `override` is a JSON object that goes before it.

    Raises:
        ValueError: no such folder, no JSON object, or a value of a wrong type.
    """
    folder = model if source == "auto" else Path(source).expanduser()
    file = folder / "generation_config.json"
    if source not in ("auto", "none") and not file.is_file():
        raise ValueError(f"--generation-config: {file} does not exist; give a folder that has it, auto or none")
    found = dict(OPENAI_DEFAULTS)
    if source != "none" and file.is_file():
        found |= _known(Fields(read_json(file, "download it again"), str(file)))
    if override is not None:
        name = "--override-generation-config"
        found |= _known(Fields(parse_object(override, name), name))
    _check(found, str(file))
    return found


def _check(defaults: Mapping[str, Any], source: str) -> None:
    """Refuse what no request could be answered with.

    Raises:
        ValueError: a value is out of range.
    """
    sampling = {name: value for name, value in defaults.items() if name != "max_new_tokens"}
    try:
        if defaults.get("max_new_tokens", 1) < 1:
            raise ValueError(f"max_new_tokens must be at least 1, found {defaults['max_new_tokens']}")
        SamplingParams(**sampling)
    except ValueError as error:
        raise ValueError(
            f"sampling defaults ({source}): {error}; give another value by --override-generation-config"
        ) from None


def _known(fields: Fields) -> dict[str, Any]:
    numbers = {name: fields.number(name) for name in _NUMBERS if fields.has(name)}
    return numbers | {name: fields.integer(name) for name in _INTEGERS if fields.has(name)}
