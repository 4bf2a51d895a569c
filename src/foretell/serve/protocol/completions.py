"""`POST /v1/completions`."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from foretell.core.parameter_fields import checked
from foretell.serve.protocol.answers import Metrics, Timings, Usage
from foretell.serve.protocol.base import Prompts
from foretell.serve.protocol.generation import TextBody


class CompletionBody(TextBody):
    """The body of a completion."""

    prompt: Prompts
    max_tokens: Annotated[int, checked("max_new_tokens", low=0)] | None = None
    """0 with `echo`: the prompt alone is answered, with its log-probabilities if they are asked for."""
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities as parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "repetition", "content_filter"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """The answer to a completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: Metrics | None = None
    timings: Timings | None = None
