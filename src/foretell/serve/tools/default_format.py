"""Tools for chat templates that have none: described in the system message, with calls and results as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTIONS = """You can call functions. This is what they do and which arguments they take, one per line:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON, in this form, once for every call:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
The results follow between <tool_response> and </tool_response>."""
_RESULTS = ("tool", "function")
"""Roles of messages with the result of a call."""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without calls and tool messages, whose system message describes the tools."""
    joined = _joined_results([_as_text(m) for m in messages], [m["role"] in _RESULTS for m in messages])
    if not tools:
        return joined
    text = _INSTRUCTIONS.format(tools="\n".join(_json(t["function"]) for t in tools))
    if joined and joined[0]["role"] == "system":
        return [joined[0] | {"content": f"{joined[0]['content']}\n\n{text}"}, *joined[1:]]
    return [{"role": "system", "content": text}, *joined]


def _joined_results(messages: Sequence[dict[str, Any]], are_results: Sequence[bool]) -> list[dict[str, Any]]:
    """Results that follow each other as one message: many templates want the roles to alternate."""
    joined = list[dict[str, Any]]()
    for i, message in enumerate(messages):
        if i and are_results[i - 1] and are_results[i]:
            joined[-1] = joined[-1] | {"content": f"{joined[-1]['content']}\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):  # with images, which messages of the user alone have
        return dict(message)
    if message["role"] in _RESULTS:
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [f"<tool_call>\n{_json(c['function'])}\n</tool_call>" for c in message.get("tool_calls", ())]
    rest = {k: v for k, v in message.items() if k != "tool_calls"}
    return rest | {"content": "\n".join([*([content] if content or not calls else []), *calls])}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
