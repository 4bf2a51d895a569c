"""Responses of OpenAI's API."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretell.serve.choices import Choices, Piece
from foretell.serve.errors import ApiError
from foretell.serve.formats.base import AnswerHead, Counts
from foretell.serve.formats.items import Item, ItemFormat
from foretell.serve.formats.parts import PartReader
from foretell.serve.sse import event


class ResponsesFormat(ItemFormat):
    """Responses. `settings`: the fields of the request that the answer repeats."""

    def __init__(self, head: AnswerHead, parts: PartReader, settings: Mapping[str, Any]) -> None:
        super().__init__(head, parts)
        self._settings, self._events = settings, 0
        self._unshown = list[dict[str, Any]]()
        """Log-probabilities of the tokens whose text is not written yet."""
        self._logprobs = dict[int, list[dict[str, Any]]]()
        """Log-probabilities of the tokens of each text, by the index of its item."""

    def piece(self, piece: Piece, usage: Counts | None) -> Iterator[bytes]:
        """Events of the items, with the log-probabilities of their tokens."""
        self._unshown += self.head.logprobs.entries(piece)
        yield from super().piece(piece, usage)

    def begin(self, choices: Choices) -> Iterator[bytes]:
        """The response without output."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def end(self, usage: Counts, measurements: Counts) -> Iterator[bytes]:
        """The whole response."""
        answer = self.answer(usage)
        yield self._event(f"response.{answer['status']}", response=answer)

    def error(self, error: ApiError) -> Iterator[bytes]:
        """A failed response."""
        details = {"code": "server_error", "message": error.detail["message"]}
        yield self._event("response.failed", response=self._response("failed") | {"error": details})

    def answer(self, usage: Counts) -> dict[str, Any]:
        """The whole response."""
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }
        if self.finish_reason == "length":
            why = {"incomplete_details": {"reason": "max_output_tokens"}}
            return self._response("incomplete") | {"usage": counts} | why
        return self._response("completed") | {"usage": counts}

    def begin_item(self, item: Item) -> Iterator[bytes]:
        """The item, and the part of its content."""
        shown = self._item(item, "in_progress", empty=True)
        yield self._event("response.output_item.added", output_index=item.index, item=shown)
        if item.call is None:
            yield self._event("response.content_part.added", **self._place(item), part=_content(item, "", ()))

    def delta(self, item: Item, text: str) -> Iterator[bytes]:
        """New text or arguments."""
        if item.is_reasoning:
            self._unshown.clear()  # Reasoning is no text of the answer.
            yield self._event("response.reasoning_text.delta", **self._place(item), delta=text)
        elif item.call is None:
            logprobs = self._take(item, len(text.encode()))
            yield self._event("response.output_text.delta", **self._place(item), delta=text, logprobs=logprobs)
        else:
            self._unshown.clear()  # The syntax of a call is no text of the answer.
            yield self._event("response.function_call_arguments.delta", **self._place(item), delta=text)

    def end_item(self, item: Item) -> Iterator[bytes]:
        """The whole text or arguments, and the item."""
        if item.call is None:
            logprobs = self._logprobs.get(item.index, [])
            name = "reasoning_text" if item.is_reasoning else "output_text"
            shown: dict[str, Any] = {} if item.is_reasoning else {"logprobs": logprobs}
            yield self._event(f"response.{name}.done", **self._place(item), text=item.text, **shown)
            part = _content(item, item.text, logprobs)
            yield self._event("response.content_part.done", **self._place(item), part=part)
        else:
            named = {"name": item.call.name, "arguments": item.text}
            yield self._event("response.function_call_arguments.done", **self._place(item), **named)
        done = self._item(item, self._status)
        yield self._event("response.output_item.done", output_index=item.index, item=done)

    def _take(self, item: Item, size: int) -> list[dict[str, Any]]:
        """The next tokens, up to so many bytes of text, as those of an item."""
        count = 0
        while count < len(self._unshown) and size > 0:
            size -= len(self._unshown[count]["bytes"])
            count += 1
        taken, self._unshown = self._unshown[:count], self._unshown[count:]
        self._logprobs.setdefault(item.index, []).extend(taken)
        return taken

    @property
    def _status(self) -> str:
        return "incomplete" if self.finish_reason == "length" else "completed"

    def _place(self, item: Item) -> dict[str, Any]:
        content = {"content_index": 0} if item.call is None else {}
        return {"item_id": self._id(item), "output_index": item.index, **content}

    def _id(self, item: Item) -> str:
        prefix = "rs" if item.is_reasoning else "msg" if item.call is None else "fc"
        return f"{prefix}_{self.head.number}{item.index}"

    def _item(self, item: Item, status: str, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else item.text
        if item.call is None:
            kind: dict[str, Any] = (
                {"type": "reasoning", "summary": []} if item.is_reasoning else {"type": "message", "role": "assistant"}
            )
            kind["content"] = [] if empty else [_content(item, text, self._logprobs.get(item.index, ()))]
        else:
            kind = {"type": "function_call", "call_id": item.call.id, "name": item.call.name, "arguments": text}
        return {"id": self._id(item), "status": status, **kind}

    def _response(self, status: str) -> dict[str, Any]:
        head = self.head
        last = len(self.items) - 1
        return {
            "id": f"resp_{head.number}",
            "object": "response",
            "created_at": head.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "output": [
                self._item(item, "incomplete" if i == last and status == "incomplete" else "completed")
                for i, item in enumerate(self.items)
            ],
            "previous_response_id": None,
            "store": False,
            "background": False,
            "truncation": "disabled",
            "usage": None,
            **self._settings,
            "system_fingerprint": head.fingerprint,
            "foretell": head.extension,
        }

    def _event(self, name: str, /, **data: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return event({"type": name, "sequence_number": number, **data}, name)


def _content(item: Item, text: str, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if item.is_reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
