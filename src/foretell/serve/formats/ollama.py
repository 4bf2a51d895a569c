"""Answers of Ollama's API: one object, or a line of JSON for every piece."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from foretell.serve.choices import Choices, Piece
from foretell.serve.errors import ApiError
from foretell.serve.formats.base import AnswerHead, Counts
from foretell.serve.formats.items import Item, ItemFormat
from foretell.serve.formats.parts import PartReader
from foretell.serve.sse import BLANK, LINES, line

_NANOSECONDS = 1_000_000
"""In a millisecond."""


class OllamaFormat(ItemFormat):
    """Messages (`is_chat`) or texts. A call is written once it is whole."""

    media_type, filler = LINES, BLANK

    def __init__(self, head: AnswerHead, parts: PartReader, is_chat: bool) -> None:
        super().__init__(head, parts)
        self._is_chat = is_chat
        self._logprobs, self._written = list[dict[str, Any]](), 0

    def piece(self, piece: Piece, usage: Counts | None) -> Iterator[bytes]:
        """Lines of new text, and of calls that the piece ends."""
        self._logprobs += (self.head.logprobs.chat(piece) or {}).get("content", ())
        yield from super().piece(piece, usage)

    def delta(self, item: Item, text: str) -> Iterator[bytes]:
        """New text, or new reasoning."""
        if item.is_reasoning:
            yield line(self._fields("", thinking=text))
        elif item.call is None:
            yield line(self._fields(text))

    def end_item(self, item: Item) -> Iterator[bytes]:
        """A whole call."""
        if item.call is not None:
            yield line(self._fields("", [item]))

    def end(self, usage: Counts, measurements: Counts) -> Iterator[bytes]:
        """The last line, with the counts."""
        yield line(self._fields("") | self._ending(usage, measurements))

    def error(self, error: ApiError) -> Iterator[bytes]:
        """The error."""
        yield line(error.ollama_body)

    def complete(
        self, choices: Choices, pieces: Sequence[Piece], usage: Counts, measurements: Counts
    ) -> dict[str, Any]:
        """The whole answer."""
        return super().complete(choices, pieces, usage, measurements) | self._ending(usage, measurements)

    def answer(self, usage: Counts) -> dict[str, Any]:
        """The whole answer without its counts."""
        self._written = 0
        text = "".join(item.text for item in self.items if item.call is None and not item.is_reasoning)
        thinking = "".join(item.text for item in self.items if item.is_reasoning)
        return self._fields(text, [item for item in self.items if item.call is not None], thinking)

    def _fields(self, text: str, calls: Sequence[Item] = (), thinking: str = "") -> dict[str, Any]:
        new, self._written = self._logprobs[self._written :], len(self._logprobs)
        fields = unfinished(self.head.model, self._is_chat, text, [_call(item) for item in calls], thinking)
        return fields | ({"logprobs": new} if new else {})

    def _ending(self, usage: Counts, measurements: Counts) -> dict[str, Any]:
        metrics, timings = measurements["metrics"], measurements["timings"]
        milliseconds = {
            "total_duration": metrics["time_to_first_token_ms"] + metrics["generation_time_ms"],
            "load_duration": 0,
            "prompt_eval_duration": timings["prompt_ms"],
            "eval_duration": timings["predicted_ms"],
        }
        return {
            "done": True,
            "done_reason": "length" if self.finish_reason == "length" else "stop",
            **{name: round(_NANOSECONDS * value) for name, value in milliseconds.items()},
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
            "foretell": self.head.extension,
        }


def unfinished(
    model: str, is_chat: bool, text: str, calls: Sequence[Mapping[str, Any]] = (), thinking: str = ""
) -> dict[str, Any]:
    """A line that is not the last one."""
    thought = {"thinking": thinking} if thinking else {}
    message = {"role": "assistant", "content": text, **thought, **({"tool_calls": calls} if calls else {})}
    content = {"message": message} if is_chat else {"response": text, **thought}
    return {"model": model, "created_at": datetime.now(UTC).isoformat(), **content, "done": False}


def _call(item: Item) -> dict[str, Any]:
    assert item.call is not None
    function = {"index": item.call.index, "name": item.call.name, "arguments": item.arguments}
    return {"id": item.call.id, "function": function}
