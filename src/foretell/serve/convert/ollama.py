"""Ollama's chats and prompts as chat completions and completions."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from foretell.serve.convert.base import B, to_body
from foretell.serve.errors import bad_request
from foretell.serve.protocol.chat import ChatBody
from foretell.serve.protocol.completions import CompletionBody
from foretell.serve.protocol.generation import GenerationBody
from foretell.serve.protocol.ollama import OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaOptions
from foretell.utils.validation import show

NAMES: Mapping[str, str] = {"repetition_penalty": "repeat_penalty", "n_predict": "num_predict"}
"""Options that have another name in Ollama's API."""
PARAMS = {
    **{name: f"options.{NAMES.get(name, name)}" for name in (*GenerationBody.model_fields, "n_predict")},
    "model": "model",
    "structured_outputs": "format",
    "chat_template_kwargs": "think",
}
"""Fields of chat completions as Ollama calls them."""
_MESSAGE_NAMES = {"thinking": "reasoning_content", "tool_name": "name"}
_RANDOM_SEED = -1
_LEVELS = ("low", "medium", "high")
_SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")
"""Variables by which chat templates turn reasoning on and off, or choose how much there is."""
_MARKS = ("<think>", "[THINK]")
"""In the templates of models that always reason."""
_REFUSED = {
    "images": "images are read in /v1/chat/completions; leave them out",
    "suffix": "this model has no infill, so that suffix cannot be used; leave it out",
    "template": "this server uses no templates of requests; leave it out, or write the whole prompt with raw",
    "context": "this server remembers no conversations; send all messages to /api/chat",
}
"""Why fields are refused that hold something."""


def chat_of_ollama(body: OllamaChatBody | OllamaGenerateBody, model: str, template: str) -> ChatBody:
    """The chat completion that a chat asks for, or a prompt without `raw`. `template`: the model's chat template.

    Raises:
        ApiError: a field is wrong or not offered, or the model does not reason.
    """
    if isinstance(body, OllamaChatBody):
        messages, tools = [_message(number, turn) for number, turn in enumerate(body.messages or ())], body.tools
    else:
        _refuse(vars(body))
        turns = {"system": body.system, "user": body.prompt}
        messages, tools = [{"role": role, "content": text} for role, text in turns.items() if text], None
    asked = {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs, "tools": tools}
    thinking = _thinking(body.think, template, model)
    return _converted(ChatBody, body, model, asked | {"messages": messages, "chat_template_kwargs": thinking})


def completion_of_ollama(body: OllamaGenerateBody, model: str) -> CompletionBody:
    """The completion that a prompt with `raw` asks for.

    Raises:
        ApiError: a field is wrong, not offered, or of use for a chat template only.
    """
    _refuse(vars(body))
    for name in ("system", "think"):
        if getattr(body, name):
            raise bad_request(f"raw goes without {name}; write the whole prompt, or leave raw out", name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _converted(CompletionBody, body, model, {"n_predict": -1, "prompt": body.prompt, "logprobs": logprobs})


def can_think(template: str) -> bool:
    """Whether models with this chat template reason."""
    return any(mark in template for mark in _MARKS) or any(_reads(template, name) for name in _SWITCHES)


def _refuse(given: Mapping[str, Any], place: str = "") -> None:
    for name, why in _REFUSED.items():
        if given.get(name):
            raise bad_request(why, place + name)


def _converted(kind: type[B], body: OllamaBody, model: str, fields: dict[str, Any]) -> B:
    """A body of this kind with these fields and those that have another name or place in Ollama's API."""
    options, fields = body.options or OllamaOptions.model_validate({}), {**fields, "model": model}
    if options.seed == _RANDOM_SEED:
        options = options.model_copy(update={"seed": None})
    if options.num_predict is not None:
        fields["n_predict"] = options.num_predict if options.num_predict > 0 else -1
    if options.repeat_penalty is not None:
        fields["repetition_penalty"] = options.repeat_penalty
    if isinstance(body.format, Mapping) or body.format == "json":
        fields["structured_outputs"] = {"json_object": True} if body.format == "json" else {"json": body.format}
    elif body.format not in (None, ""):
        raise bad_request(f'"json" or a JSON schema was expected, found {show(body.format)}', "format")
    made = to_body(kind, options, fields)
    made.share_notes(body)
    body.ignore(name for name in made.unknown_fields if name.startswith("messages."))
    return made


def _message(number: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """A turn as a chat completion has it: with the arguments of calls as text."""
    _refuse(given, f"messages.{number}.")
    message = {_MESSAGE_NAMES.get(name, name): value for name, value in given.items() if name != "images"}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call(call) if isinstance(call, Mapping) else call for call in calls]
    return message


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
        function = {"name": function.get("name"), "arguments": to_json(function["arguments"]).decode()}
    return {**call, "function": function}


def _thinking(think: Any, template: str, model: str) -> dict[str, Any]:
    """Variables of the chat template that turn reasoning on or off."""
    if not isinstance(think, bool | None) and think not in _LEVELS:
        raise bad_request(f"true, false, low, medium or high was expected, found {show(think)}", "think")
    if think and not can_think(template):
        raise bad_request(f"{model} does not support thinking; leave think out", "think")
    values: dict[str, Any] = {} if think is None else {"enable_thinking": bool(think), "thinking": bool(think)}
    values |= {"reasoning_effort": think} if isinstance(think, str) else {}
    return {name: value for name, value in values.items() if _reads(template, name)}


def _reads(template: str, name: str) -> bool:
    """Whether a template reads a variable: a word that is neither a text nor an attribute."""
    return re.search(rf"(?<![.'\"\w]){name}\b", template) is not None
