"""Tools that a request offers, and how one is chosen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from foretell.serve.protocol.base import Body
from foretell.utils.validation import show

NAME_PATTERN = r"[A-Za-z0-9_.:/-]{1,128}"
"""Names of functions."""
_MODES = ("none", "auto", "required")


class FunctionDefinition(Body):
    """A function that the model may call. `parameters`: the JSON schema of its arguments; none if it has none."""

    name: str = Field(pattern=f"^{NAME_PATTERN}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool: a function of the client."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools are called: `none`, `auto`, `required`, or `required` with the name of the only one."""

    mode: str
    name: str | None = None


def _tool_choice(value: Any) -> Any:
    if value is None or isinstance(value, ToolChoice):
        return value
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(value)
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            f"{', '.join(_MODES)} or {{'type': 'function', 'function': {{'name': ...}}}} was expected, "
            f"found {show(value)}"
        )
    return ToolChoice("required", name)


_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
Choice = Annotated[
    ToolChoice, BeforeValidator(_tool_choice), WithJsonSchema({"anyOf": [{"enum": list(_MODES)}, _NAMED]})
]
"""`tool_choice` of chat completions and responses, and `function_call` of older requests."""
