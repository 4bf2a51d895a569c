"""How fields of a request become fields of the engine's `Request` and `SamplingParams`: the one place for it."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.core.parameters import PARAMETERS
from foretell.core.sampling import CounterRNG, SamplingParams, Stream
from foretell.core.token_rules import TokenConstraint
from foretell.engine.repetition import RepetitionDetection
from foretell.engine.request import Request, validate_request
from foretell.model.run.runner import PromptImages
from foretell.serve.errors import bad_request
from foretell.serve.loaded import LoadedModel
from foretell.serve.protocol.generation import GenerationBody, PredictionContent
from foretell.serve.tenants import tenant_salt

SAMPLING: type = SamplingParams
REQUEST: type = Request
_SEED_BITS = 53
"""Of a seed that the server draws: JavaScript reads such numbers exactly."""


def _prediction(prediction: PredictionContent, loaded: LoadedModel) -> list[int]:
    """Tokens of a predicted output, which is a text or a list of text parts."""
    content = prediction.content
    parts = [{"text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise ValueError("prediction.content must be a text or a list of parts with a text")
    return loaded.model.prediction("".join(p["text"] for p in parts))


@dataclass(frozen=True)
class EngineField:
    """A field of the API and the engine's attribute that it sets."""

    name: str
    """Dotted name in the body."""
    kind: type
    attribute: str = ""
    """Name in the engine, if it is another."""
    convert: Callable[[Any, LoadedModel], Any] = lambda value, loaded: value

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
    *(
        EngineField(p.field_name, SAMPLING if p.is_sampling else REQUEST, p.name)
        for p in PARAMETERS.values()
        if p.name not in ("bad_words", "max_new_tokens", "seed")
    ),
    EngineField("logit_bias", SAMPLING),
    EngineField("bad_words", SAMPLING, convert=lambda words, loaded: loaded.model.bad_words(words)),
    EngineField("repetition_detection", REQUEST, convert=lambda options, _: RepetitionDetection(**dict(options))),
    EngineField("prompt_logprobs", REQUEST),
    EngineField("logprob_token_ids", REQUEST, convert=lambda ids, _: tuple(dict.fromkeys(ids))),
    EngineField("return_drafts", REQUEST),
    EngineField("priority", REQUEST),
    EngineField("deadline_ms", REQUEST, "deadline", convert=lambda ms, _: time.perf_counter() + ms / 1000),
    EngineField("prediction", REQUEST, convert=_prediction),
    EngineField("speculative.method", REQUEST, convert=lambda name, loaded: loaded.methods.get(name)),
)
"""The table of generation parameters, and what is a line here and one in `protocol.generation`. The server itself
reads the seed and the length.
"""


def engine_values(body: GenerationBody, loaded: LoadedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes of `SamplingParams` and of `Request` that a body asks for.

    Raises:
        ApiError: the value of a field is wrong.
    """
    values: dict[type, dict[str, Any]] = {SAMPLING: {}, REQUEST: {}}
    for field in FIELDS:
        value = field.read(body, loaded.defaults)
        if value is None:
            continue
        try:
            values[field.kind][field.target] = field.convert(value, loaded)
        except ValueError as error:
            raise bad_request(str(error), field.name) from error
    return values[SAMPLING], values[REQUEST]


@dataclass(frozen=True)
class Prompt:
    """An encoded prompt, and the most new tokens after it."""

    tokens: list[int]
    max_new_tokens: int
    images: PromptImages | None = None


def make_requests(
    body: GenerationBody,
    prompts: Sequence[Prompt],
    logprobs: int | None,
    seed: int,
    loaded: LoadedModel,
    constraint: TokenConstraint | None = None,
) -> list[Request]:
    """The engine's requests, choice k of prompt p at p * n + k.

    `logprobs`: number of the likeliest tokens that are reported with each token; None: nothing is reported.
    `constraint`: what the answers must match.

    Raises:
        ApiError: a field is wrong or out of range.
    """
    sampling, request = engine_values(body, loaded)
    if logprobs is not None:
        request["logprobs"] = logprobs or True
    request["adapter"] = body.model if body.model in loaded.model.adapters else ""
    salt = request["cache_salt"] = tenant_salt(body.cache_salt)
    request["method"] = loaded.methods.for_salt(request.get("method"), salt)
    config = loaded.model.config
    try:
        requests = [
            Request(
                prompt.tokens,
                SamplingParams(**sampling, seed=choice_seed(seed, k)),
                prompt.max_new_tokens,
                eos=loaded.model.eos,
                constraint=constraint,
                images=prompt.images,
                **request,
            )
            for prompt in prompts
            for k in range(body.n or 1)
        ]
        for first in requests[:: body.n or 1]:
            validate_request(first, config.vocab, config.context)
        return requests
    except ValueError as error:
        word = str(error).split()[0]
        raise bad_request(str(error), word if word in type(body).model_fields else None) from error


def draw_seed(body: GenerationBody) -> int:
    """The seed of a request, or a new one."""
    return secrets.randbits(_SEED_BITS) if body.seed is None else body.seed


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice`; that of the first is the request's own."""
    return seed if choice == 0 else CounterRNG(seed).key(choice, Stream.CHOICE)
