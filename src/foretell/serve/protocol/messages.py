"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from foretell.core.parameter_fields import checked
from foretell.serve.protocol.base import Body
from foretell.serve.protocol.generation import GenerationBody
from foretell.serve.protocol.responses import TextFormat
from foretell.serve.protocol.tools import NAME_PATTERN


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_BLOCK = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
Blocks = Annotated[
    list[dict[str, Any]],
    BeforeValidator(_blocks),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}),
]
"""A text, or a list of content blocks."""


class InputMessage(Body):
    """A turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


def _custom(value: Any) -> Any:
    """Leave out the type of the client's own tools, and refuse the server's."""
    if isinstance(value, Mapping) and value.get("type") not in (None, "custom"):
        raise ValueError(f"this server has no tools of its own, and {str(value['type'])[:40]!r} was asked for")
    return value


class MessageTool(Body):
    """A tool of the client."""

    name: str = Field(pattern=f"^{NAME_PATTERN}$")
    description: str | None = None
    input_schema: dict[str, Any]


class MessageToolChoice(Body):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Body):
    """The form of the answer."""

    format: TextFormat | None = None
    effort: Any = None


class CountTokensBody(GenerationBody):
    """A conversation."""

    messages: Annotated[list[InputMessage], Field(fail_fast=True)] = Field(min_length=1)
    system: Blocks | None = None
    tools: Annotated[list[Annotated[MessageTool, BeforeValidator(_custom)]], Field(fail_fast=True)] | None = None
    tool_choice: MessageToolChoice | None = None
    output_config: OutputConfig | None = None

    # Accepted and without effect on this model.
    thinking: Any = None
    betas: Any = None
    context_management: Any = None
    container: Any = None
    cache_control: Any = None


class MessagesBody(CountTokensBody):
    """The body of a message."""

    max_tokens: Annotated[int, checked("max_new_tokens")]
    stop_sequences: Annotated[tuple[str, ...], checked("stop")] | None = None


class MessageAnswer(BaseModel):
    """A message."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class TokenCount(BaseModel):
    """Number of tokens of a conversation."""

    input_tokens: int
