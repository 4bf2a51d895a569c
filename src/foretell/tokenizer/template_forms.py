"""Which forms of messages a chat template reads, found by rendering small conversations."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from foretell.tokenizer.chat_template import ChatTemplate

_NEEDLE = "needle"
_USER = {"role": "user", "content": "?"}
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}]


@lru_cache(maxsize=16)
def reads_parts(source: str) -> bool:
    """Whether the template writes the texts of a content that is a list of parts."""
    parts = [{"type": "text", "text": _NEEDLE + end} for end in "12"]
    text = _rendered(source, [{"role": "user", "content": parts}], None)
    return all(part["text"] in text for part in parts) and not any(key in text for key in ("'type'", '"type"'))


@lru_cache(maxsize=16)
def reads_strings(source: str) -> bool:
    """Whether the template writes a content that is a string; those of vision-language models may read parts alone."""
    return _NEEDLE in _rendered(source, [{"role": "user", "content": _NEEDLE}], None)


@lru_cache(maxsize=16)
def reads_argument_objects(source: str) -> bool:
    """Whether the arguments of a call are given to the template as an object, and not as JSON text: so unless it does
    not write an object as JSON or in a form of its own, and writes the text.
    """
    written, text = (_rendered(source, _call(form), _TOOLS) for form in ({_NEEDLE: "x"}, f'{{"{_NEEDLE}": "x"}}'))
    return (_NEEDLE in written and f"'{_NEEDLE}'" not in written) or f'"{_NEEDLE}"' not in text


def _call(arguments: object) -> list[dict[str, Any]]:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "x"}
    return [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


def _rendered(source: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a conversation; empty if the template refuses it."""
    try:
        return ChatTemplate(source).render(messages, variables={"tools": tools})
    except ValueError:
        return ""
