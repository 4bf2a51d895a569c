"""`POST /v1/responses` and `/v1/responses/input_tokens`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foretell.core.parameter_fields import checked
from foretell.serve.protocol.base import Body
from foretell.serve.protocol.generation import GenerationBody
from foretell.serve.protocol.tools import NAME_PATTERN, Choice


class ResponseTool(Body):
    """A function of the client; this server has no tools of its own."""

    type: Literal["function"]
    name: str = Field(pattern=f"^{NAME_PATTERN}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    name: str | None = None


class TextOptions(Body):
    """The form of the answer's text."""

    format: TextFormat | None = None


class ResponsesBody(GenerationBody):
    """The body of a response: a conversation in items. Nothing is stored."""

    input: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | str
    instructions: str | None = None
    max_output_tokens: Annotated[int, checked("max_new_tokens")] | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    """`message.output_text.logprobs` is given; of others the answer warns."""
    top_logprobs: int | None = Field(None, ge=0)
    prompt: Any = None

    # Accepted and without effect on this model.
    reasoning: Any = None
    truncation: Any = None
    max_tool_calls: Any = None
    prompt_cache_retention: Any = None


class ResponseAnswer(BaseModel):
    """A response."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class InputTokens(BaseModel):
    """Number of tokens of an input."""

    object: Literal["response.input_tokens"]
    input_tokens: int
