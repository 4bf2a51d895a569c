"""Ollama's `/api/chat`, `/api/generate`, `/api/show`, `/api/tags` and `/api/ps`."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from foretell.core.parameter_fields import checked
from foretell.serve.protocol.base import Body
from foretell.serve.protocol.generation import GenerationBody
from foretell.serve.protocol.tools import Tool


class OllamaOptions(GenerationBody):
    """Generation parameters: by the names of all APIs, and these by Ollama's."""

    num_predict: int | None = None
    """Most new tokens; 0 or less: what the context holds."""
    repeat_penalty: Annotated[float, checked("repetition_penalty")] | None = None


class OllamaBody(Body):
    """Fields that chats and prompts share."""

    model: str | None = Field(None, max_length=512)
    stream: bool | None = None
    """None: true."""
    format: Any = None
    """`json`, or a JSON schema."""
    think: Any = None
    """Whether, or how much, the model reasons: `low`, `medium` or `high`."""
    options: OllamaOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    keep_alive: Any = None
    """Without effect: the model stays loaded."""


class OllamaChatBody(OllamaBody):
    """A conversation; an empty one asks that the model be loaded."""

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None


class OllamaGenerateBody(OllamaBody):
    """A prompt; an empty one asks that the model be loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    """Continue the prompt as it is, without the chat template."""
    images: Any = None
    suffix: str | None = None
    template: str | None = None
    context: Any = None


class OllamaShowBody(Body):
    """A model; `name` is the older name of the field."""

    model: str | None = None
    name: str | None = None
    verbose: Any = None


class OllamaAnswer(BaseModel):
    """A `message` or a `response` with its counts, and its durations in nanoseconds."""

    model_config = ConfigDict(extra="allow")

    model: str
    created_at: str
    done: bool


class OllamaModels(BaseModel):
    """All served models."""

    models: list[dict[str, Any]]


class OllamaModelInfo(BaseModel):
    """What is known of a model."""

    model_config = ConfigDict(extra="allow")

    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
