"""Fields that all requests for generated text share."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foretell.core.parameter_fields import checked, parameter_model
from foretell.core.parameters import PARAMETERS
from foretell.serve.protocol.base import Body, LogitBias, TokenIds


class StreamOptions(Body):
    """What a stream reports besides the text."""

    include_usage: bool | None = None
    """One more chunk with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk (vLLM)."""
    include_obfuscation: bool | None = None


class SpeculativeOptions(Body):
    """How this request is drafted for; the answer's law does not depend on it if the method is lossless."""

    method: str | None = Field(None, max_length=64)
    """A method of `foretell methods`."""
    max_drafts: Annotated[int, checked("max_drafts")] | None = None
    """Most drafted tokens per pass; 0: plain decoding."""


class RepetitionOptions(BaseModel):
    """When an answer that repeats itself ends: once its tail is `min_count` times a pattern of such a size."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_pattern_size: int = Field(0, ge=0)
    """Tokens; 0: never."""
    min_pattern_size: int = Field(0, ge=0)
    min_count: int = Field(0, ge=0)


if TYPE_CHECKING:

    class _Parameters(Body):
        """The parameters that handlers read by name."""

        seed: int | None
        stop: tuple[str, ...] | None
        bad_words: tuple[str, ...] | None
        max_tokens: int | None
else:
    _Parameters = parameter_model(
        "_Parameters", Body, {p.field_name: p for p in PARAMETERS.values() if "." not in p.field_name}
    )


class GenerationBody(_Parameters):
    """The table of generation parameters, and further fields: names and meanings as in OpenAI's API and, below, as in
    vLLM's extensions.
    """

    model: str | None = Field(None, max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    logit_bias: LogitBias | None = None

    repetition_detection: RepetitionOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=-1)
    logprob_token_ids: TokenIds | None = None
    """Whose log-probabilities are reported with each token, in place of those of the likeliest ones."""
    stream_interval: int | None = Field(None, ge=1)
    """New tokens of a piece of a stream, beside its first and last one."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")
    """Requests share the prefix cache, and what learning drafters learn, only with those of the same salt and key."""
    structured_outputs: dict[str, Any] | None = None
    """Fields of `StructuredOutputs`, and `disable_any_whitespace`."""
    grammar: str | None = None
    """What the answer must match, as GBNF or Lark (llama.cpp)."""
    json_schema: dict[str, Any] | None = None
    """What the answer must match (llama.cpp)."""

    thinking_token_budget: int | None = Field(None, ge=-1)
    """Most tokens of reasoning (vLLM); -1: any number."""
    speculative: SpeculativeOptions | None = None
    return_drafts: bool | None = None
    """Report under `foretell` which part of the method made each token, and what was refused."""
    deadline_ms: float | None = Field(None, gt=0)
    """Milliseconds from the arrival of the request in which the answer should be complete."""

    # Accepted and without effect on one machine.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    session_id: Any = None
    cache_prompt: Any = None
    id_slot: Any = None
    request_id: Any = None
    spaces_between_special_tokens: Any = None


class TextBody(GenerationBody):
    """Further fields of chat completions and completions; the names are llama.cpp's."""

    n_predict: int | None = Field(None, ge=-1)
    """`max_tokens` where that is not given; -1: what the context holds."""
    timings_per_token: bool | None = None
    """Report the timings so far in every chunk of a stream with one choice."""
    return_progress: bool | None = None
    """Report in a stream with one choice how much of the prompt is read, until the first token."""
    sse_ping_interval: float | None = Field(None, ge=-1, le=3600)
    """Seconds of silence in a stream after which a comment keeps it open; -1 or 0: none is sent."""


class PredictionContent(Body):
    """A predicted output (OpenAI)."""

    type: Literal["content"] = "content"
    content: Any = None
