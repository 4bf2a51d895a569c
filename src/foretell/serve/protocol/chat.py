"""`POST /v1/chat/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from foretell.core.parameter_fields import checked
from foretell.plan import PLANS, Plan, parse_plan
from foretell.serve.protocol.answers import Metrics, Timings, Usage
from foretell.serve.protocol.base import Body
from foretell.serve.protocol.generation import PredictionContent, TextBody
from foretell.serve.protocol.tools import Choice, FunctionDefinition, Tool
from foretell.utils.validation import show

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


def _parts(value: Any) -> Any:
    """The content of a message, whose parts are texts, of the type that templates know, and images with their `url`."""
    if not isinstance(value, list):
        return value
    parts = list[Mapping[str, Any]]()
    for number, part in enumerate(value):
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, Mapping) else image
            if not isinstance(url, str):
                raise ValueError(f"part {number} is an image_url without a url; found {show(image)}")
            parts.append({"type": "image", "url": url})
            continue
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(f"part {number} is neither a text nor an image_url; found {show(kind)}")
        parts.append({**part, "type": "text", "text": text})
    return parts


_URL = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
_PART = {
    "type": "object",
    "properties": {"type": {"type": "string"}, "text": {"type": "string"}, "image_url": _URL},
    "required": ["type"],
}
Content = Annotated[
    str | list[dict[str, Any]] | None,
    BeforeValidator(_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}),
]
"""A text, or a list of parts: texts, and images as data URLs."""


PlanField = Annotated[
    Plan,
    BeforeValidator(parse_plan),
    WithJsonSchema({"anyOf": [kind.model_json_schema() for kind in PLANS.values()]}),
]
"""A plan by its type, with options."""


class CalledFunction(Body):
    """A call of a function. `arguments`: a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call of a tool."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """A turn of a conversation. Unknown fields are given to the chat template."""

    role: Role
    content: Content = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None

    @property
    def text(self) -> str:
        """The text of the content, whose parts are joined by line ends."""
        content = self.content or ""
        return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)

    @property
    def images(self) -> Mapping[int, str]:
        """Addresses of the images by the number of their part."""
        parts = self.content if isinstance(self.content, list) else []
        return {number: part["url"] for number, part in enumerate(parts) if "text" not in part}


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    """`structural_tag` (vLLM): with `format`, or with `structures` and `triggers`."""
    json_schema: dict[str, Any] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """Of `json_object` (llama.cpp)."""


class ChatBody(TextBody):
    """The body of a chat completion."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: Annotated[int, checked("max_new_tokens")] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition], Field(fail_fast=True)] | None = None
    function_call: Choice | None = None
    prediction: PredictionContent | None = None
    plan: PlanField | None = None
    """How the answer is put together from several requests; lossy."""

    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    """For chat templates that read it."""

    # Accepted and without effect on this model.
    verbosity: Any = None
    modalities: Any = None


class TopLogprob(BaseModel):
    """A token that could have stood here."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the answer's tokens."""

    content: list[TokenLogprob] | None


class AnswerToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswerMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnswerToolCall] | None = None
    function_call: CalledFunction | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "repetition", "tool_calls", "function_call", "content_filter"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer to a chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics | None = None
    timings: Timings | None = None
    prompt_token_ids: list[int] | None = None
