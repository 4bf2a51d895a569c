"""Requests, their updates and completions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Real
from typing import Protocol, TypeVar

from foretell.core.parameters import PARAMETERS, check, is_integer
from foretell.core.sampling import SamplingParams
from foretell.core.token_rules import TokenConstraint
from foretell.engine.logprobs import TopLogprobs
from foretell.engine.method import AnyMethod, Method
from foretell.engine.provenance import PassDrafts
from foretell.engine.repetition import RepetitionDetection
from foretell.engine.statistics import RequestStatistics
from foretell.model.run.runner import PromptImages

T = TypeVar("T", contravariant=True)


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it."""

    prompt: Sequence[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    eos: tuple[int, ...] = ()
    logprobs: bool | int | None = False
    """Report the natural logarithm of every token's probability under the model's softmax (True or 0), and of this many
    most probable tokens in its place; False or None: nothing.
    """
    logprob_token_ids: tuple[int, ...] = ()
    """Report these tokens, most probable first, in place of the most probable ones (vLLM)."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the tokens of the prompt but the first; the prefix cache is not used then."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the answer; `finish_reason` is `stop`."""
    repetition_detection: RepetitionDetection | None = None
    """Ends an answer that repeats itself; `finish_reason` is `repetition`."""
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    """Whether the text holds the stop string, or the token of `eos` or `stop_token_ids`, that ended it."""
    skip_special_tokens: bool = True
    constraint: TokenConstraint | None = None
    """What the answer must match, a grammar for example."""
    method: AnyMethod | None = None
    """What decodes it, beside the requests of other methods in one pass; None: the engine's own method."""
    max_drafts: int | None = None
    """Greatest number of drafted tokens per step; None: as many as the method drafts. 0: plain decoding (`Match`
    accepts nothing and the method's drafter never sees the request), at no cost of drafting.
    """
    return_drafts: bool = False
    """Report the drafts of every pass with their origins; see `Update.passes`."""
    priority: int = 0
    """Requests with a lower number are served first."""
    deadline: float | None = None
    """Time by the engine's clock, in seconds, after which the request is served before all others that are not late;
    its drafts come first from some steps before it on.
    """
    cache_salt: str = ""
    """Requests share cached prefixes, and what token recycling learns, only with those of the same salt (vLLM)."""
    adapter: str = ""
    """Name of the adapter of the model that answers; empty: the model as it is."""
    prediction: Sequence[int] | None = None
    """Tokens that the answer is expected to resemble: drafted beside those of a lossless method (OpenAI's
    `prediction`).
    """
    images: PromptImages | None = None
    """What the target reads at the places of images in the prompt; None: tokens alone."""

    @property
    def prefix_salt(self) -> str:
        """Requests share cached prefixes only with those of the same."""
        images = "" if self.images is None else self.images.digest
        return "\0".join((self.adapter, images, self.cache_salt)) if self.adapter or images else self.cache_salt

    @cached_property
    def ending_tokens(self) -> frozenset[int]:
        """Tokens that end the answer."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else self.eos)


@dataclass(frozen=True)
class Output:
    """What a request got: in one step, or in several."""

    request: int
    tokens: tuple[int, ...]
    text: str
    accepted: int
    """Number of `tokens`, from the first one on, that were drafted."""
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most probable tokens in the place of each token, where `Request.logprobs` asks for them."""
    prompt_logprobs: tuple[float, ...] = ()
    """Of the prompt's tokens from the second one on; only in the first update."""
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()
    finish_reason: str | None = None
    """`stop` (end of sequence or stop string), `length`, `repetition`, `cancelled` or `error`; None: the request goes
    on.
    """
    stop_reason: str | int | None = None
    """The stop string or the token of `stop_token_ids` that ended the request, or `repetition_detected`."""
    error: Exception | None = None
    """The exception that ended the request, if `finish_reason` is `error`."""
    statistics: RequestStatistics | None = None
    """Only in the last update of the request."""
    drafted: int = 0
    """Number of drafted tokens that were verified."""
    passes: tuple[PassDrafts, ...] = ()
    """The drafts of the pass, where `Request.return_drafts` asks for them."""

    @staticmethod
    def join(outputs: "Sequence[Output]") -> "Output":
        """Consecutive outputs of a request as one."""
        if len(outputs) == 1:
            return outputs[0]
        return replace(
            outputs[-1],
            tokens=tuple(t for o in outputs for t in o.tokens),
            text="".join(o.text for o in outputs),
            accepted=sum(o.accepted for o in outputs),
            logprobs=tuple(p for o in outputs for p in o.logprobs),
            top_logprobs=tuple(p for o in outputs for p in o.top_logprobs),
            prompt_logprobs=tuple(p for o in outputs for p in o.prompt_logprobs),
            prompt_top_logprobs=tuple(p for o in outputs for p in o.prompt_top_logprobs),
            drafted=sum(o.drafted for o in outputs),
            passes=tuple(p for o in outputs for p in o.passes),
        )


Update = Output
"""The output of one step."""


@dataclass(frozen=True, kw_only=True)
class Completion(Output):
    """All that a request got."""

    finish_reason: str
    statistics: RequestStatistics

    @staticmethod
    def of(outputs: Sequence[Output]) -> "Completion":
        """Join all outputs of a request.

        Raises:
            ValueError: the last one is not among them.
        """
        last = outputs[-1] if outputs else None
        if last is None or last.finish_reason is None or last.statistics is None:
            raise ValueError("the request is not over: its last update is missing")
        return Completion(**vars(Output.join(outputs)))


class _Decoder(Protocol[T]):
    def submit(self, request: T, /) -> int: ...
    def cancel(self, number: int) -> Output | None: ...
    def run(self) -> Iterator[Output]: ...


def complete(
    engine: _Decoder[T], requests: Sequence[T], on_update: Callable[[Output], None] | None = None
) -> list[Completion]:
    """Submit requests and run until all are over; their completions in the same order. `on_update` is called with the
    output of every step.

    Raises:
        ValueError: a request is invalid; then none is run.
    """
    numbers = list[int]()
    try:
        for request in requests:
            numbers.append(engine.submit(request))
    except ValueError:
        for number in numbers:
            engine.cancel(number)
        raise
    outputs: dict[int, list[Output]] = {number: [] for number in numbers}
    for output in engine.run():
        outputs[output.request].append(output)
        if on_update is not None:
            on_update(output)
    return [Completion.of(outputs[number]) for number in numbers]


_CHECKED = tuple(f.name for f in fields(Request) if f.name in PARAMETERS)


def validate_request(request: Request, vocab: int, context: int) -> None:
    """Check a request against a model's vocabulary and context.

    Raises:
        ValueError: the request is invalid.
    """
    if isinstance(request.prompt, str) or not all(is_integer(t) for t in request.prompt):
        raise ValueError("the prompt must be a sequence of token ids, which are whole numbers; encode text first")
    if not isinstance(request.sampling_params, SamplingParams):
        raise ValueError(f"sampling_params must be a SamplingParams, found {type(request.sampling_params).__name__}")
    check(vars(request), _CHECKED)
    if isinstance(request.stop, str):
        raise ValueError(f"stop must be a sequence of strings that are not empty, found {request.stop!r}")
    for name in ("eos", "logprob_token_ids"):
        if not all(is_integer(t) for t in getattr(request, name)):
            raise ValueError(f"{name} must be a sequence of token ids, found {getattr(request, name)!r}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(request, name)
        if not (value is None or (isinstance(value, bool) and name == "logprobs") or is_integer(value)) or (
            value is not None and not 0 <= value <= vocab
        ):
            raise ValueError(f"{name} must be a number of tokens from 0 to the vocabulary of {vocab}, found {value!r}")
    if len(request.prompt) == 0:
        raise ValueError("the prompt is empty: give at least one token")
    if len(request.prompt) >= context:
        raise ValueError(
            f"the prompt has {len(request.prompt)} tokens; the model reads at most {context - 1} and writes one; "
            "open it for longer texts with max_model_len, and beyond its trained context with rope_scaling"
        )
    _validate_serving(request)
    _validate_prediction(request, vocab)
    if not all(0 <= t < vocab for t in request.prompt):
        raise ValueError(f"the prompt holds a token outside the model's vocabulary of {vocab}")
    sampling = request.sampling_params
    named = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_words": [t for word in sampling.bad_words for t in word],
        "stop_token_ids": request.stop_token_ids,
        "logprob_token_ids": request.logprob_token_ids,
    }
    for name, tokens in named.items():
        if not all(0 <= t < vocab for t in tokens):
            raise ValueError(f"{name} names a token outside the model's vocabulary of {vocab}")


def _validate_serving(request: Request) -> None:
    images = request.images
    if images is not None and not (isinstance(images, PromptImages) and images.positions[-1] < len(request.prompt)):
        raise ValueError("images must be a PromptImages of places in the prompt; Model.with_images makes one")
    if not isinstance(request.repetition_detection, RepetitionDetection | None):
        kind = type(request.repetition_detection).__name__
        raise ValueError(f"repetition_detection must be a RepetitionDetection, found {kind}")
    if request.method is not None and not isinstance(request.method, Method):
        raise ValueError(
            f"method must be a Method, found {type(request.method).__name__}; Model.method builds one from its name"
        )
    if not is_integer(request.priority):
        raise ValueError(f"priority must be a whole number, found {request.priority!r}")
    if request.deadline is not None and not isinstance(request.deadline, Real):
        raise ValueError(f"deadline must be a time in seconds, found {request.deadline!r}")


def _validate_prediction(request: Request, vocab: int) -> None:
    tokens = request.prediction
    if tokens is None:
        return
    if isinstance(tokens, str) or not all(is_integer(t) for t in tokens):
        raise ValueError("the prediction must be a sequence of token ids, which are whole numbers; encode text first")
    if not all(0 <= t < vocab for t in tokens):
        raise ValueError(f"the prediction holds a token outside the model's vocabulary of {vocab}")


def describe_error(error: Exception) -> str:
    """An exception as one line: the message of a ValueError, otherwise with its type."""
    lines = str(error).strip().splitlines()
    sentence = lines[0] if lines else "no reason given"
    return sentence if isinstance(error, ValueError) else f"{type(error).__name__}: {sentence}"
