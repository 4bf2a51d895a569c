"""Parts that the answers of several endpoints share."""

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    """Where the tokens of the prompt came from."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """What the new tokens were."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SpeculationMetrics(BaseModel):
    """Drafts of a request, under vLLM's names."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    """Number of passes by the number of drafts that they accepted, from 0 on."""
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """Most drafts that one pass accepted."""


class Metrics(BaseModel):
    """Times of a request with one choice, under vLLM's names."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float
    tokens_per_second: float
    speculative_decoding: SpeculationMetrics | None


class Timings(BaseModel):
    """Times of a request with one choice, under llama.cpp's names."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every error."""

    error: ErrorDetail
