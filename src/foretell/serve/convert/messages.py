"""Anthropic's messages as chat completions."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import to_json

from foretell.serve.convert.base import response_format, string_of, text_of, to_chat, unknown_keys
from foretell.serve.errors import bad_request
from foretell.serve.protocol.chat import ChatBody
from foretell.serve.protocol.messages import CountTokensBody, InputMessage, MessagesBody, MessageToolChoice
from foretell.utils.validation import show

PARAMS = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""Fields of chat completions as Anthropic calls them."""
_KEYS: Mapping[str, Collection[str]] = {
    "text": ("text", "citations"),
    "document": ("source", "title", "context", "citations"),
    "tool_use": ("id", "name", "input", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
"""What is read of the blocks of a message, and what changes nothing here, by their type."""


def chat_of_messages(body: CountTokensBody) -> ChatBody:
    """The chat completion that a message asks for. A last message of the assistant is continued.

    Raises:
        ApiError: a content block is no text, call or result, or a tool is chosen without its name.
    """
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": text_of(body.system, "system")})
    for number, message in enumerate(body.messages):
        body.ignore(name for block in message.content for name in _unknown_keys(block))
        messages += _messages(message, f"messages.{number}.content")
    choice, thinking = body.tool_choice, body.thinking if isinstance(body.thinking, Mapping) else {}
    budget = thinking.get("budget_tokens")
    return to_chat(
        body,
        **({"thinking_token_budget": budget} if isinstance(budget, int) else {}),
        chat_template_kwargs={"enable_thinking": False} if thinking.get("type") == "disabled" else None,
        messages=messages,
        stop=(body.stop_sequences if isinstance(body, MessagesBody) else None) or body.stop,
        tools=[_tool(t.name, t.description, t.input_schema) for t in body.tools or ()] or None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        continue_final_message=(messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]) or None,
        response_format=response_format(
            body.output_config.format if body.output_config else None, "output_config.format"
        ),
    )


def _tool(name: str, description: str | None, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _choice(choice: MessageToolChoice) -> Any:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise bad_request("a tool is chosen by its name, and there is none", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _messages(message: InputMessage, param: str) -> list[dict[str, Any]]:
    """A turn as messages: results of tools first, each as its own."""
    texts, calls, results = list[str](), list[dict[str, Any]](), list[dict[str, Any]]()
    thoughts = list[str]()
    for number, block in enumerate(message.content):
        place, kind = f"{param}.{number}", block.get("type")
        if kind in ("text", "document"):
            texts.append(text_of([block], param) if kind == "document" else string_of(block, "text", place))
        elif kind == "tool_use" and message.role == "assistant":
            calls.append(_call(block, place))
        elif kind == "tool_result" and message.role == "user":
            text = text_of(block.get("content") or "", f"{place}.content")
            results.append({"role": "tool", "tool_call_id": string_of(block, "tool_use_id", place), "content": text})
        elif kind == "thinking":
            thoughts.append(string_of(block, "thinking", place))
        elif kind != "redacted_thinking":
            what = f"a block of text or of a tool was expected, found {show(kind)}"
            raise bad_request(f"{what}; images are read in /v1/chat/completions", place)
    if results and not texts:
        return results
    turn: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    thought = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return [*results, turn | thought | ({"tool_calls": calls} if calls else {})]


def _unknown_keys(block: Mapping[str, Any]) -> list[str]:
    known = _KEYS.get(str(block.get("type")))
    return [] if known is None else unknown_keys(block, (*known, "cache_control"), "messages.content")


def _call(block: Mapping[str, Any], param: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise bad_request(f"an object was expected, found {show(given)}", f"{param}.input")
    function = {"name": string_of(block, "name", param), "arguments": to_json(given).decode()}
    return {"id": string_of(block, "id", param), "type": "function", "function": function}
