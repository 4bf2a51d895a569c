"""Conversations that chat templates are compared on."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Conversation(NamedTuple):
    """What a template is given."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = {}
    add_generation_prompt: bool = True


_USER, _SYSTEM = (
    {"role": "user", "content": ' Wie spät ist\'s in <Rom> & "Paris"?\n'},
    {"role": "system", "content": "Be brief."},
)
_ANSWER, _AGAIN = {"role": "assistant", "content": "Zwölf. "}, {"role": "user", "content": "And é 日本?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "time_in",
            "description": "The time in a place.\nLocal.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "A city."},
                    "unit": {"type": "string", "enum": ["24h", "12h"], "default": "24h"},
                    "days": {"type": ["array", "null"], "items": {"type": "integer"}, "description": "Which"},
                    "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
                },
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "stop", "description": "Stop.", "parameters": {"type": "object", "properties": {}}},
    },
]


def _call(number: int, arguments: Any = None) -> dict[str, Any]:
    given = {"place": "Rom <é>", "days": [1, 2], "at": {"x": 0.5}, "flag": True} if arguments is None else arguments
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": "time_in", "arguments": given}}


_CALL = {"role": "assistant", "tool_calls": [_call(1)]}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "time_in", "content": '{"time": "12:00"}'}
_THOUGHT = {"role": "assistant", "content": "So.", "reasoning_content": "Hm,\nlet me see."}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two."}]}

CONVERSATIONS: dict[str, Conversation] = {
    "plain": Conversation([_USER]),
    "plain, several turns": Conversation([_USER, _ANSWER, _AGAIN]),
    "no generation prompt": Conversation([_USER, _ANSWER], add_generation_prompt=False),
    "system": Conversation([_SYSTEM, _USER, _ANSWER, _AGAIN]),
    "developer": Conversation([_SYSTEM | {"role": "developer"}, _USER]),
    "tools": Conversation([_SYSTEM, _USER], TOOLS),
    "tools without a system message": Conversation([_USER], TOOLS),
    "no tools": Conversation([_USER], []),
    "call": Conversation([_USER, _CALL], TOOLS, add_generation_prompt=False),
    "call with text": Conversation([_USER, _CALL | {"content": "I look."}, _RESULT], TOOLS),
    "result": Conversation([_SYSTEM, _USER, _CALL, _RESULT], TOOLS),
    "two calls": Conversation(
        [
            _USER,
            _CALL | {"tool_calls": [_call(1), _call(2)]},
            _RESULT,
            _RESULT | {"tool_call_id": "call00002"},
            _ANSWER,
            _AGAIN,
        ],
        TOOLS,
    ),
    "call with text arguments": Conversation(
        [_USER, _CALL | {"tool_calls": [_call(1, '{"place": "Rom"}')]}, _RESULT], TOOLS
    ),
    "reasoning": Conversation([_USER, _THOUGHT, _AGAIN]),
    "reasoning at the end": Conversation([_USER, _THOUGHT], add_generation_prompt=False),
    "reasoning in the text": Conversation([_USER, _ANSWER | {"content": "<think>\nHm\n</think>\n\nSo."}, _AGAIN]),
    "reasoning before a call": Conversation([_USER, _THOUGHT | _CALL, _RESULT], TOOLS),
    "thinking": Conversation([_USER, _ANSWER | {"thinking": "Hm"}, _AGAIN], variables={"enable_thinking": True}),
    "thinking off": Conversation(
        [_USER], variables={"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
    ),
    "parts": Conversation([_PARTS]),
    "parts of all": Conversation([_PARTS | {"role": "system"}, _PARTS, _PARTS | {"role": "assistant"}, _PARTS]),
    "parts of a result": Conversation([_USER, _CALL, _RESULT | {"content": _PARTS["content"]}], TOOLS),
    "documents": Conversation([_USER], variables={"documents": [{"title": "T", "text": "A text.", "doc_id": 1}]}),
    "unknown fields": Conversation(
        [_USER | {"name": "Ann", "no_such": {"a": 1}}, _ANSWER | {"prefix": True}], None, {"extra": [1]}
    ),
    "empty texts": Conversation(
        [_SYSTEM | {"content": ""}, _USER | {"content": ""}, _ANSWER | {"content": ""}, _AGAIN]
    ),
    "wrong order": Conversation([_ANSWER, _USER, _USER]),
}
