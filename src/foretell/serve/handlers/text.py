"""`POST /v1/chat/completions` and `/v1/completions`."""

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from foretell.serve.errors import bad_request
from foretell.serve.fields import make_requests
from foretell.serve.formats.base import AnswerHead
from foretell.serve.formats.openai import ChatFormat, CompletionFormat
from foretell.serve.handlers.endpoint import warning_headers
from foretell.serve.handlers.generate import Plan, respond
from foretell.serve.logprobs import LogprobWriter
from foretell.serve.prompts import context_exceeded
from foretell.serve.protocol.chat import ChatBody
from foretell.serve.protocol.completions import CompletionBody
from foretell.serve.protocol.generation import GenerationBody, StreamOptions
from foretell.serve.service import Service

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of completions; chats may fill the context."""


async def chat_completions(service: Service, http: HttpRequest, body: ChatBody) -> ASGIApp:
    """Answer a conversation."""
    name = _check(service, body, "messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    _check_top_logprobs(service, logprobs, "top_logprobs")
    prompt = await service.in_pool(service.encoder.chat, body)
    asked_by = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    most = _max_new_tokens(service, body, [prompt], asked_by, None, "messages")
    loaded = service.loaded
    requests, seed = make_requests(body, [prompt], most, loaded.model.eos, logprobs, loaded.defaults)
    format = ChatFormat(_head(service, body, name, seed))
    return await respond(service, http, _plan(body, requests, format))


async def completions(service: Service, http: HttpRequest, body: CompletionBody) -> ASGIApp:
    """Continue prompts."""
    name = _check(service, body, "prompt")
    if body.suffix:
        raise bad_request("suffix is not supported by this server; leave it out", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of is not supported by this server; leave it out, and use n", "best_of")
    _check_top_logprobs(service, body.logprobs, "logprobs")
    prompts = await service.in_pool(service.encoder.prompts, body.prompt, body.add_special_tokens is not False)
    most = _max_new_tokens(service, body, prompts, "max_tokens", COMPLETION_MAX_TOKENS, "prompt")
    loaded = service.loaded
    requests, seed = make_requests(body, prompts, most, loaded.model.eos, body.logprobs, loaded.defaults)
    format = CompletionFormat(_head(service, body, name, seed), _echoed(service, body, prompts))
    return await respond(service, http, _plan(body, requests, format))


def _check(service: Service, body: GenerationBody, param: str) -> str:
    """Check what needs no encoded prompt; the served name of the model."""
    name = service.check_model(body.model)
    limits = service.settings.limits
    if (body.n or 1) > limits.choices:
        raise bad_request(f"n must be at most {limits.choices}, found {body.n}", "n")
    if len(body.stop or ()) > limits.stop_strings:
        raise bad_request(f"stop takes at most {limits.stop_strings} strings, found {len(body.stop or ())}", "stop")
    if not all(body.stop or ("-",)):
        raise bad_request("stop strings must not be empty", "stop")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs are not available in a stream", "prompt_logprobs")
    return name


def _check_top_logprobs(service: Service, count: int | None, param: str) -> None:
    most = service.settings.limits.top_logprobs
    if count is not None and count > most:
        raise bad_request(f"{param} must be at most {most}, found {count}", param)


def _max_new_tokens(
    service: Service,
    body: GenerationBody,
    prompts: Sequence[list[int]],
    asked_by: str,
    default: int | None,
    param: str,
) -> list[int]:
    """Most new tokens for each prompt, from the field `asked_by` or the default. A prompt is shortened from the left if
    `truncate_prompt_tokens` says so.

    Raises:
        ApiError: a prompt is empty, or it does not fit the context with the tokens that are asked for.
    """
    asked: int | None = getattr(body, asked_by)
    context, vocab = service.loaded.model.config.context, service.loaded.model.config.vocab
    found = []
    for prompt in prompts:
        _truncate(prompt, body.truncate_prompt_tokens, context - 1)
        if not prompt:
            raise bad_request("the prompt is empty", param)
        if not all(0 <= token < vocab for token in prompt):
            raise bad_request(f"the prompt has a token outside the vocabulary of {vocab}", param)
        room = context - len(prompt)
        if room < 1:
            raise context_exceeded(f"the prompt has {len(prompt)} tokens", context, param)
        if asked is not None and asked > room:
            wanted = f"the prompt has {len(prompt)} tokens, {asked} new ones were asked for"
            raise context_exceeded(wanted, context, asked_by)
        usual = service.loaded.defaults.get("max_new_tokens", room) if default is None else default
        found.append(asked or min(usual, room))
    return found


def _truncate(prompt: list[int], most: int | None, room: int) -> None:
    """Keep the last `most` tokens (-1: what fits the context)."""
    if most is not None:
        keep = room if most < 0 else most
        del prompt[: max(len(prompt) - keep, 0)]


def _head(service: Service, body: GenerationBody, name: str, seed: int) -> AnswerHead:
    loaded, options = service.loaded, body.stream_options or StreamOptions()
    continuous = bool(options.continuous_usage_stats)
    return AnswerHead(
        model=name,
        fingerprint=loaded.fingerprint,
        logprobs=LogprobWriter(service.texts, bool(body.return_tokens_as_token_ids)),
        include_usage=bool(options.include_usage) or continuous,
        continuous_usage=continuous,
        token_ids=bool(body.return_token_ids),
        extension={"seed": seed, "method": loaded.method, "lossless": loaded.lossless},
    )


def _plan(body: GenerationBody, requests: Sequence, format: ChatFormat | CompletionFormat) -> Plan:  # type: ignore[type-arg]
    return Plan(requests, body.n or 1, format, bool(body.stream), warning_headers(body))


def _echoed(service: Service, body: CompletionBody, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The text of the prompt of every choice, if it is echoed."""
    if not body.echo:
        return []
    codec = service.loaded.model.codec
    texts = [
        given if isinstance(given, str) else codec.decode(tokens)
        for given, tokens in zip(body.prompt, prompts, strict=True)
    ]
    return [text for text in texts for _ in range(body.n or 1)]
