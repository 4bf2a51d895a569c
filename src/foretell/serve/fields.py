"""How fields of a request become fields of the engine's `Request` and `SamplingParams`: the one place for it."""

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.core.sampling import CounterRNG, SamplingParams, Stream
from foretell.engine.engine import Request
from foretell.serve.errors import bad_request
from foretell.serve.protocol.chat import ChatBody
from foretell.serve.protocol.generation import GenerationBody

SAMPLING: type = SamplingParams
REQUEST: type = Request
_ATTRIBUTES = {kind: {f.name for f in dataclasses.fields(kind)} for kind in (SAMPLING, REQUEST)}
_SEED_BITS = 53
"""Of a seed that the server draws: JavaScript reads such numbers exactly."""


@dataclass(frozen=True)
class EngineField:
    """A field of the API and the engine's attribute that it sets.

    A value that asks for nothing (`False`, 0, empty, or `neutral`) is left out; any other is refused while the engine
    has no such attribute.
    """

    name: str
    """Dotted name in the body."""
    kind: type
    attribute: str = ""
    """Name in the engine, if it is another."""
    convert: Callable[[Any], Any] = lambda value: value
    neutral: Any = None

    @property
    def target(self) -> str:
        """Name of the attribute in the engine."""
        return self.attribute or self.name.split(".")[-1]

    def read(self, body: GenerationBody, defaults: Mapping[str, Any]) -> Any:
        """The value that the body asks for, or the server's default; None: neither."""
        value: Any = body
        for part in self.name.split("."):
            value = getattr(value, part, None)
        return defaults.get(self.name) if value is None else value


FIELDS: Sequence[EngineField] = (
    EngineField("temperature", SAMPLING),
    EngineField("top_p", SAMPLING),
    EngineField("top_k", SAMPLING, convert=lambda k: max(k, 0)),
    EngineField("min_p", SAMPLING),
    EngineField("presence_penalty", SAMPLING),
    EngineField("frequency_penalty", SAMPLING),
    EngineField("repetition_penalty", SAMPLING, neutral=1),
    EngineField("logit_bias", SAMPLING),
    EngineField("allowed_token_ids", SAMPLING, convert=tuple),
    EngineField("bad_words", REQUEST, convert=tuple),
    EngineField("min_tokens", REQUEST),
    EngineField("stop", REQUEST, convert=tuple),
    EngineField("include_stop_str_in_output", REQUEST),
    EngineField("skip_special_tokens", REQUEST, neutral=True),
    EngineField("prompt_logprobs", REQUEST),
    EngineField("priority", REQUEST),
    EngineField("speculative.method", REQUEST),
    EngineField("speculative.max_drafts", REQUEST),
    EngineField("deadline_ms", REQUEST, "deadline", convert=lambda ms: time.perf_counter() + ms / 1000),
)
"""A further field is one line here and one in `protocol.generation`."""
_NOT_YET = ("structured_outputs",)
_NOT_YET_CHAT = ("tools", "echo", "documents")


def engine_values(body: GenerationBody, defaults: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes of `SamplingParams` and of `Request` that a body asks for.

    Raises:
        ApiError: a field asks for what the engine cannot do.
    """
    _refuse_missing_features(body)
    values: dict[type, dict[str, Any]] = {SAMPLING: {}, REQUEST: {}}
    for field in FIELDS:
        value = field.read(body, defaults)
        if value is None or (field.target not in _ATTRIBUTES[field.kind] and (not value or value == field.neutral)):
            continue
        if field.target not in _ATTRIBUTES[field.kind]:
            raise bad_request(f"{field.name} is not supported by this server; leave it out", field.name)
        values[field.kind][field.target] = field.convert(value)
    return values[SAMPLING], values[REQUEST]


def make_requests(
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    eos: tuple[int, ...],
    logprobs: int | None,
    defaults: Mapping[str, Any],
) -> tuple[list[Request], int]:
    """The engine's requests, choice k of prompt p at p * n + k, and the seed that they draw with.

    Raises:
        ApiError: a field is out of range, or asks for what the engine cannot do.
    """
    sampling, request = engine_values(body, defaults)
    seed = secrets.randbits(_SEED_BITS) if body.seed is None else body.seed
    ends = () if body.ignore_eos else eos
    request |= {"eos": (*ends, *(body.stop_token_ids or ())), **_logprob_values(logprobs)}
    try:
        return [
            Request(prompt, SamplingParams(**sampling, seed=choice_seed(seed, k)), max_new_tokens=most, **request)
            for prompt, most in zip(prompts, max_new_tokens, strict=True)
            for k in range(body.n or 1)
        ], seed
    except ValueError as error:
        raise bad_request(str(error), str(error).split()[0]) from error


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice`; that of the first is the request's own."""
    return seed if choice == 0 else CounterRNG(seed).key(choice, Stream.CHOICE)


def _logprob_values(logprobs: int | None) -> dict[str, Any]:
    if logprobs is None:
        return {}
    if logprobs and "top_logprobs" not in _ATTRIBUTES[REQUEST]:
        raise bad_request("top_logprobs above 0 is not supported by this server", "top_logprobs")
    return {"logprobs": True} | ({"top_logprobs": logprobs} if logprobs else {})


def _refuse_missing_features(body: GenerationBody) -> None:
    names = _NOT_YET + (_NOT_YET_CHAT if isinstance(body, ChatBody) else ())
    for name in names:
        if getattr(body, name):
            raise bad_request(f"{name} is not supported by this server; leave it out", name)
    if isinstance(body, ChatBody) and body.response_format is not None and body.response_format.type != "text":
        raise bad_request("structured outputs are not supported by this server", "response_format")
