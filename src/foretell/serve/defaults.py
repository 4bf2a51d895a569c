"""Sampling defaults of a server: the checkpoint's `generation_config.json`, or the operator's."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from foretell.core.parameters import PARAMETERS
from foretell.utils.validation import Fields, parse_object, read_json

OPENAI_DEFAULTS: Mapping[str, float] = {"temperature": 1.0}
"""Where they differ from the engine's."""


def read_defaults(source: str, model: Path, override: str | None) -> dict[str, Any]:
    """Defaults by field: `source` is `auto` (the model's directory), `none`, or a folder with a
    `generation_config.json`; `override` is a JSON object that goes before it.

    Raises:
        ValueError: no such folder, no JSON object, or a wrong value.
    """
    folder = model if source == "auto" else Path(source).expanduser()
    file = folder / "generation_config.json"
    if source not in ("auto", "none") and not file.is_file():
        raise ValueError(f"--generation-config: {file} does not exist; give a folder that has it, auto or none")
    given = dict[str, Any]()
    if override is not None:
        name = "--override-generation-config"
        given = _known(Fields(parse_object(override, name), name))
    stored = dict[str, Any]()
    if source != "none" and file.is_file():
        fields = Fields(read_json(file, "download it again"), str(file))
        try:
            stored = _known(fields, besides=given)
        except ValueError as error:
            raise ValueError(f"sampling defaults: {error}; give another by --override-generation-config") from error
    return {**OPENAI_DEFAULTS, **stored, **given}


def _known(fields: Fields, besides: Collection[str] = ()) -> dict[str, Any]:
    values = dict[str, Any]()
    for name, parameter in PARAMETERS.items():
        if parameter.in_checkpoint and name not in besides and fields.has(name):
            value = fields.raw[name]
            whole = parameter.kind is int and isinstance(value, float) and value.is_integer()
            values[name] = parameter.read(int(value) if whole else value, f"{fields.source}: {name}")
    return values
