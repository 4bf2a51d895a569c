"""`POST /v1/chat/completions` and `/v1/completions`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from foretell.engine.request import Request
from foretell.serve.constraints import make_constraint
from foretell.serve.drafts import DraftWriter
from foretell.serve.errors import bad_request
from foretell.serve.fields import Prompt, draw_seed, make_requests
from foretell.serve.formats.base import AnswerHead
from foretell.serve.formats.openai import ChatFormat, CompletionFormat
from foretell.serve.formats.parts import PartReader
from foretell.serve.handlers.generate import Generation, respond
from foretell.serve.logprobs import LogprobWriter
from foretell.serve.planned import check_plan, make_run, with_plan
from foretell.serve.prompts import context_exceeded
from foretell.serve.protocol.chat import ChatBody
from foretell.serve.protocol.completions import CompletionBody
from foretell.serve.protocol.generation import GenerationBody, StreamOptions, TextBody
from foretell.serve.reasoning import Reasoning
from foretell.serve.service import Service
from foretell.serve.thinking import Phases, after_reasoning, phases_of
from foretell.serve.tools.use import ToolUse, special_tokens, uses_functions
from foretell.utils.json_values import texts
from foretell.utils.validation import show

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of completions; chats may fill the context."""


async def chat_completions(service: Service, http: HttpRequest, body: ChatBody) -> ASGIApp:
    """Answer a conversation."""
    if body.plan is not None:
        check_plan(body)
    prepared = await prepare_chat(service, body)
    if body.plan is not None:
        run = make_run(body, prepared.requests[0], service.loaded, service.encoder)
        format = ChatFormat(with_plan(prepared.head, run), PartReader(None))
        return await respond(service, http, replace(_generation(body, prepared.requests, format), run=run))
    format = ChatFormat(prepared.head, prepared.parts, echoed_message(body), uses_functions(body))
    return await respond(
        service, http, replace(_generation(body, prepared.requests, format), phases=prepared.phases(service))
    )


@dataclass(frozen=True)
class Prepared:
    """A conversation or prompts as requests of the engine, the head of the answer, the tools that it may call, and its
    reasoning.
    """

    requests: list[Request]
    head: AnswerHead
    tools: ToolUse | None = None
    reasoning: Reasoning | None = None

    @property
    def parts(self) -> PartReader:
        """A reader of the answer's parts."""
        return PartReader(self.tools, self.reasoning)

    def phases(self, service: Service) -> Phases | None:
        """What counts the tokens of reasoning."""
        return None if self.reasoning is None else phases_of(self.reasoning, service.texts)


async def prepare_chat(service: Service, body: ChatBody) -> Prepared:
    """Check and encode a conversation.

    Raises:
        ApiError: a field is wrong.
    """
    name, seed = _check(service, body), draw_seed(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    _check_top_logprobs(service, logprobs, "top_logprobs")
    requests, tools, reasoning = await service.in_pool(_chat_requests, service, body, logprobs, seed)
    return Prepared(requests, _head(service, body, name, requests[0], seed), tools, reasoning)


def _chat_requests(
    service: Service, body: ChatBody, logprobs: int | None, seed: int
) -> tuple[list[Request], ToolUse | None, Reasoning | None]:
    asked_by = "max_completion_tokens" if body.max_completion_tokens is not None else _length_field(body)
    tools = service.encoder.tools(body)
    encoded = service.encoder.chat(body, tools)
    if encoded.images is not None and body.truncate_prompt_tokens is not None:
        raise bad_request("a prompt with images is not shortened; leave it out", "truncate_prompt_tokens")
    prompts = _fit(service, body, [encoded.tokens], asked_by, None, "messages")
    prompts = [replace(prompt, images=encoded.images) for prompt in prompts]
    reasoning = service.encoder.reasoning(body, prompts[0].tokens, tools)
    constraint = make_constraint(body, service.loaded.model, tools)
    if reasoning is not None:
        constraint = after_reasoning(body, reasoning, constraint, service)
    special = special_tokens(service.loaded.model.codec) if reasoning is not None else {}
    has_marks = reasoning is not None and any(t in text for t in special for text in reasoning.syntax.texts)
    if has_marks or (tools is not None and tools.needs_special_tokens):
        body = body.model_copy(update={"skip_special_tokens": False})
    return make_requests(body, prompts, logprobs, seed, service.loaded, constraint), tools, reasoning


def echoed_message(body: ChatBody) -> str:
    """The text of the last message, if it is continued and the answer shall begin with it."""
    return body.messages[-1].text if body.echo and body.continue_final_message else ""


async def completions(service: Service, http: HttpRequest, body: CompletionBody) -> ASGIApp:
    """Continue prompts."""
    prepared = await prepare_completion(service, body)
    echoed, prompt_only = _echoed(service, body, prepared.requests), _is_prompt_only(body)
    format = CompletionFormat(prepared.head, prepared.requests, echoed, prompt_only)
    return await respond(service, http, replace(_generation(body, prepared.requests, format), prompt_only=prompt_only))


def _is_prompt_only(body: GenerationBody) -> bool:
    """Whether the answer is the prompt."""
    return isinstance(body, CompletionBody) and bool(body.echo) and getattr(body, _length_field(body)) == 0


async def prepare_completion(service: Service, body: CompletionBody) -> Prepared:
    """Check and encode prompts.

    Raises:
        ApiError: a field is wrong.
    """
    name, seed = _check(service, body), draw_seed(body)
    if body.suffix:
        raise bad_request("this model has no infill, so that suffix cannot be used; leave it out", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of is not supported by this server; leave it out, and use n", "best_of")
    _check_top_logprobs(service, body.logprobs, "logprobs")
    requests = await service.in_pool(_completion_requests, service, body, seed)
    return Prepared(requests, _head(service, body, name, requests[0], seed))


def _completion_requests(service: Service, body: CompletionBody, seed: int) -> list[Request]:
    asked = {"prompt_logprobs": body.logprobs} if body.echo and body.logprobs is not None else {}
    encoded = service.encoder.prompts(body.prompt, body.add_special_tokens is not False)
    prompts = _fit(service, body, encoded, _length_field(body), COMPLETION_MAX_TOKENS, "prompt")
    constraint = make_constraint(body, service.loaded.model)
    return make_requests(body.model_copy(update=asked), prompts, body.logprobs, seed, service.loaded, constraint)


def _check(service: Service, body: GenerationBody) -> str:
    """Check what needs no encoded prompt; the served name of the model."""
    name = service.check_model(body.model)
    limits = service.settings.limits
    if (body.n or 1) > limits.choices:
        raise bad_request(f"n must be at most {limits.choices}, found {body.n}", "n")
    _check_words(body.stop, "stop", limits.stop_strings, limits.stop_chars)
    _check_words(body.bad_words, "bad_words", limits.bad_words, limits.bad_word_chars)
    _check_top_logprobs(service, body.prompt_logprobs, "prompt_logprobs")
    _check_prediction(service, body)
    if body.logprob_token_ids is not None:
        asked = getattr(body, "logprobs", None)
        if asked is None or asked is False:
            raise bad_request("logprob_token_ids needs logprobs", "logprob_token_ids")
        _check_top_logprobs(service, len(body.logprob_token_ids), "logprob_token_ids")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs are not available in a stream", "prompt_logprobs")
    return name


def _check_top_logprobs(service: Service, count: int | None, param: str) -> None:
    most = service.settings.limits.top_logprobs
    if count is not None and count < 0:
        raise bad_request(f"{param} must be at most {most} here, and {count} asks for the whole vocabulary", param)
    if count is not None and count > most:
        raise bad_request(f"{param} must be at most {most}, found {count}", param)


def _check_words(words: Sequence[str] | None, param: str, most: int, chars: int) -> None:
    """Every step of the engine looks for these words, so that their number and length are bounded."""
    longest = max(map(len, words or ()), default=0)
    if len(words or ()) > most:
        raise bad_request(f"{param} takes at most {most} strings, found {len(words or ())}", param)
    if longest > chars:
        raise bad_request(f"{param} takes strings of at most {chars} characters, found one of {longest}", param)


def _check_prediction(service: Service, body: GenerationBody) -> None:
    prediction = body.prediction if isinstance(body, ChatBody) else None
    if prediction is not None:
        count, context = sum(map(len, texts(prediction.content))), service.loaded.model.config.context
        if count > service.settings.limits.chars_per_token * context:
            raise context_exceeded(f"the prediction has {count} characters", context, "prediction")


def _length_field(body: TextBody) -> str:
    return "n_predict" if body.max_tokens is None and body.n_predict is not None else "max_tokens"


def _fit(
    service: Service,
    body: GenerationBody,
    prompts: Sequence[list[int]],
    asked_by: str,
    default: int | None,
    param: str,
) -> list[Prompt]:
    """The prompts with their most new tokens, from the field `asked_by` or the default, and as many as the context has
    room for. A prompt is shortened from the left if `truncate_prompt_tokens` says so.
    """
    asked: int | None = getattr(body, asked_by)
    if asked == 0 and not _is_prompt_only(body):
        least = "-1 for all that the context holds" if asked_by == "n_predict" else "0 with echo"
        raise bad_request(f"{asked_by} must be at least 1, or {least}, found 0", asked_by)
    context, vocab = service.loaded.model.config.context, service.loaded.model.config.vocab
    fitted = []
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
            body.note(f"{show(asked)} new tokens were asked for, and the context of {context} has room for {room}")
        usual = service.loaded.defaults.get("max_new_tokens", room) if default is None else default
        most = usual if asked is None else asked
        fitted.append(Prompt(prompt, room if most == -1 else min(max(most, 1), room)))
    return fitted


def _truncate(prompt: list[int], most: int | None, room: int) -> None:
    """Keep the last `most` tokens (-1: what fits the context)."""
    if most is not None:
        keep = room if most < 0 else most
        del prompt[: max(len(prompt) - keep, 0)]


def _head(service: Service, body: GenerationBody, name: str, request: Request, seed: int) -> AnswerHead:
    options = body.stream_options or StreamOptions()
    continuous = bool(options.continuous_usage_stats)
    return AnswerHead(
        model=name,
        fingerprint=service.loaded.fingerprint,
        logprobs=LogprobWriter(service.texts, bool(body.return_tokens_as_token_ids)),
        include_usage=bool(options.include_usage) or continuous,
        continuous_usage=continuous,
        token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
        extension={"seed": seed} | service.loaded.describe_method(request),
        timings=bool(getattr(body, "timings_per_token", None)),
        drafts=DraftWriter(service.texts) if body.return_drafts else None,
    )


def _generation(body: TextBody, requests: Sequence[Request], format: ChatFormat | CompletionFormat) -> Generation:
    return Generation(
        requests,
        body.n or 1,
        format,
        bool(body.stream),
        body.stream_interval or 1,
        _ping_interval(body.sse_ping_interval),
        bool(body.return_progress) and len(requests) == 1,
    )


def _ping_interval(asked: float | None) -> float | None:
    return asked if asked is None or asked > 0 else 0.0


def _echoed(service: Service, body: CompletionBody, requests: Sequence[Request]) -> list[str]:
    """The text of the prompt of every choice, if it is echoed."""
    if not body.echo:
        return []
    texts = body.prompt if isinstance(body.prompt[0], str) else None
    codec, each = service.loaded.model.codec, body.n or 1
    return [
        str(texts[i // each]) if texts is not None else codec.decode(request.prompt)
        for i, request in enumerate(requests)
    ]
