"""Messages of Anthropic's API."""

from collections.abc import Iterator, Mapping
from typing import Any

from foretell.serve.choices import Choices
from foretell.serve.errors import ApiError
from foretell.serve.formats.base import Counts
from foretell.serve.formats.items import Item, ItemFormat
from foretell.serve.sse import event

_SIGNATURE = "unsigned"
"""Of thinking; the API wants one, and this server takes thinking back as it is."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat(ItemFormat):
    """Messages."""

    def begin(self, choices: Choices) -> Iterator[bytes]:
        """The message without content."""
        counts = {"input_tokens": choices.prompt_tokens, "output_tokens": 0}
        yield _event("message_start", message=self._message(counts))
        yield from self.ping()

    def ping(self) -> Iterator[bytes]:
        """An event that says nothing."""
        yield _event("ping")

    def end(self, usage: Counts, measurements: Counts) -> Iterator[bytes]:
        """Why the message ended."""
        yield _event("message_delta", delta=self._ending(), usage=_usage(usage))
        yield _event("message_stop")

    def error(self, error: ApiError) -> Iterator[bytes]:
        """The error."""
        yield event(error.anthropic_body, "error")

    def answer(self, usage: Counts) -> dict[str, Any]:
        """The whole message."""
        return self._message(_usage(usage)) | self._ending()

    def begin_item(self, item: Item) -> Iterator[bytes]:
        """A content block."""
        yield _event("content_block_start", index=item.index, content_block=_block(item, None))

    def delta(self, item: Item, text: str) -> Iterator[bytes]:
        """New text or input."""
        kind = {"type": "text_delta", "text": text}
        if item.is_reasoning:
            kind = {"type": "thinking_delta", "thinking": text}
        if item.call is not None:
            kind = {"type": "input_json_delta", "partial_json": text}
        yield _event("content_block_delta", index=item.index, delta=kind)

    def end_item(self, item: Item) -> Iterator[bytes]:
        """The end of a content block."""
        if item.is_reasoning:
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield _event("content_block_delta", index=item.index, delta=delta)
        yield _event("content_block_stop", index=item.index)

    def _ending(self) -> dict[str, Any]:
        reason = self.finish_reason
        stop = self.last.stop_reason if self.last is not None else None
        if reason == "stop" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _STOP_REASONS.get(reason or "", "end_turn"), "stop_sequence": None}

    def _message(self, usage: Counts) -> dict[str, Any]:
        return {
            "id": f"msg_{self.head.number}",
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": [_block(item, item.arguments) for item in self.items],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
            "foretell": self.head.extension,
        }


def _usage(usage: Counts) -> dict[str, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _block(item: Item, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """A content block; one that begins has no text and no input yet."""
    if item.is_reasoning:
        return {"type": "thinking", "thinking": item.text, "signature": _SIGNATURE if item.text else ""}
    if item.call is None:
        return {"type": "text", "text": item.text}
    return {"type": "tool_use", "id": item.call.id, "name": item.call.name, "input": given or {}}


def _event(name: str, /, **data: Any) -> bytes:
    return event({"type": name, **data}, name)
