"""`/v1/models`, `/tokenize`, `/detokenize`, `/health` and `/version`."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from foretell.serve.protocol.base import Body, TokenIds
from foretell.serve.protocol.chat import ChatMessage


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    methods: list[str]
    """Those that requests may ask for."""
    default_method: str


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeBody(Body):
    """A text or a conversation to encode; `content` is llama.cpp's name of `prompt`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "TokenizeBody":
        given = [x for x in (self.prompt, self.content, self.messages) if x is not None]
        if len(given) != 1:
            raise ValueError("give one of prompt, content and messages")
        return self


class TokenizeAnswer(BaseModel):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    """Token ids to decode."""

    model: str | None = None
    tokens: TokenIds


class DetokenizeAnswer(BaseModel):
    """The text of token ids, under vLLM's name and llama.cpp's."""

    prompt: str
    content: str


class HealthAnswer(BaseModel):
    """The state of the server."""

    status: Literal["ok"]


class VersionAnswer(BaseModel):
    """The version of the server."""

    version: str
