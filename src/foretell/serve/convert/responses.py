"""Responses as chat completions."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from foretell.serve.convert.base import response_format, string_of, text_of, to_chat, unknown_keys
from foretell.serve.errors import bad_request
from foretell.serve.protocol.chat import ChatBody
from foretell.serve.protocol.responses import ResponsesBody
from foretell.serve.protocol.tools import ToolChoice
from foretell.utils.validation import show

PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Fields of chat completions as responses call them."""
_THOUGHT = {"role", "content", "reasoning_content"}
"""Of a message that is reasoning so far."""
_STORED = ("previous_response_id", "conversation", "background", "prompt")
_KEYS: Mapping[str, Collection[str]] = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments", "namespace"),
    "function_call_output": ("call_id", "output"),
}
"""What is read of the items of an input, beside `id` and `status`, and what changes nothing here, by their type."""
_PART_KEYS = ("text", "refusal", "annotations", "logprobs")
_LOGPROBS = "message.output_text.logprobs"
"""In `include`: log-probabilities of the tokens of the text."""


def chat_of_response(body: ResponsesBody) -> ChatBody:
    """The chat completion that a response asks for.

    Raises:
        ApiError: it refers to stored responses, or an item is no text, call or result.
    """
    for name in _STORED:
        if getattr(body, name):
            raise bad_request(f"this server stores nothing; leave {name} out, and send all items", name)
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not items:
        raise bad_request("the input is empty", "input")
    body.ignore(_unknown_keys(items))
    for number, item in enumerate(items):
        _add(messages, item, f"input.{number}")
    include = body.include or ()
    if rest := [name for name in include if name != _LOGPROBS]:
        body.note(f"include has no effect for {', '.join(rest)}")
    if body.top_logprobs is not None and _LOGPROBS not in include:
        body.note(f"top_logprobs has no effect without {_LOGPROBS} in include")
    return to_chat(
        body,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        tools=[{"type": "function", "function": t.model_dump(exclude={"type"})} for t in body.tools or ()] or None,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning.get("effort") if isinstance(body.reasoning, Mapping) else None,
        response_format=response_format(body.text.format if body.text else None, "text.format"),
        logprobs=_LOGPROBS in include or None,
        top_logprobs=body.top_logprobs if _LOGPROBS in include else None,
    )


def _unknown_keys(items: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list[str]()
    for item in items:
        known = _KEYS.get(str(item.get("type", "message")))
        names += [] if known is None else unknown_keys(item, (*known, "id", "status"), "input")
        for name in ("content", "output"):
            parts = item.get(name)
            for part in parts if isinstance(parts, list) else ():
                names += unknown_keys(part, _PART_KEYS, f"input.{name}")
    return names


def settings_of(body: ResponsesBody) -> dict[str, Any]:
    """The fields of a request that its response repeats."""
    choice, form = body.tool_choice, body.text.format if body.text else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None},
        **{name: getattr(body, name) for name in ("temperature", "top_p")},
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": "auto" if choice is None else _shown(choice),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "user": body.user,
    }


def _shown(choice: ToolChoice) -> Any:
    if choice.allowed:
        allowed = [{"type": "function", "name": name} for name in choice.allowed]
        return {"type": "allowed_tools", "mode": choice.mode, "tools": allowed}
    return choice.mode if choice.name is None else {"type": "function", "name": choice.name}


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], param: str) -> None:
    """Add an item to the messages; calls belong to the message of the assistant before them."""
    kind = item.get("type", "message")
    if kind == "message":
        turn = {"role": item.get("role"), "content": text_of(item.get("content"), f"{param}.content")}
        if turn["role"] == "assistant" and messages and messages[-1].keys() == _THOUGHT:
            turn = messages.pop() | turn
        messages.append(turn)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if text := text_of(parts, f"{param}.content"):
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {name: string_of(item, name, param) for name in ("name", "arguments")}
        call = {"id": string_of(item, "call_id", param), "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = text_of(item.get("output"), f"{param}.output")
        messages.append({"role": "tool", "tool_call_id": string_of(item, "call_id", param), "content": content})
    else:
        raise bad_request(f"a message, a function_call or its output was expected, found {show(kind)}", param)
