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
    allowed: tuple[str, ...] = ()
    """Names of the tools that may be called; empty: all."""


def _tool_choice(value: Any) -> Any:
    if value is None or isinstance(value, ToolChoice):
        return value
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(value)
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        return _allowed_tools(value.get("allowed_tools", value))
    name = _name_of(value)
    if not isinstance(name, str):
        raise ValueError(
            f"{', '.join(_MODES)} or {{'type': 'function', 'function': {{'name': ...}}}} was expected, "
            f"found {show(value)}"
        )
    return ToolChoice("required", name)


def _name_of(tool: Any) -> Any:
    """The name of a function, as chat completions and as responses write it."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _allowed_tools(value: Any) -> ToolChoice:
    """A choice among some of the tools (OpenAI)."""
    given = value if isinstance(value, Mapping) else {}
    mode, tools = given.get("mode"), given.get("tools")
    names = [_name_of(tool) for tool in tools] if isinstance(tools, list) else []
    if mode not in ("auto", "required") or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"a mode, auto or required, and tools, a list of functions by name, were expected, found {show(value)}"
        )
    return ToolChoice(mode, allowed=tuple(names))


_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_ALLOWED = {
    "type": "object",
    "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": {"type": "object"}},
    "required": ["type"],
}
Choice = Annotated[
    ToolChoice, BeforeValidator(_tool_choice), WithJsonSchema({"anyOf": [{"enum": list(_MODES)}, _NAMED, _ALLOWED]})
]
"""`tool_choice` of chat completions and responses, and `function_call` of older requests."""
