"""Answers as items, each a text, reasoning or a call of a tool, as Responses and Anthropic's Messages have them."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.serve.choices import Choices, Piece
from foretell.serve.formats.base import AnswerFormat, AnswerHead, Counts
from foretell.serve.formats.parts import PartReader
from foretell.serve.tools.parts import CallPart, Part, ReasoningPart
from foretell.utils.validation import parse_object


@dataclass
class Item:
    """A text, or the arguments of a call with its id and name."""

    index: int
    text: str = ""
    call: CallPart | None = None
    """Where the item began, if it is a call."""
    is_reasoning: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call. The model may have written no JSON: it is shown as text then."""
        try:
            return parse_object(self.text)
        except ValueError:
            return {"text": self.text}

    def takes(self, part: Part) -> bool:
        """Whether a part continues this item."""
        if isinstance(part, CallPart):
            return self.call is not None and self.call.index == part.index
        return self.call is None and self.is_reasoning == isinstance(part, ReasoningPart)


class ItemFormat(AnswerFormat):
    """Writes an answer with one choice as items, which begin and end one after the other."""

    def __init__(self, head: AnswerHead, parts: PartReader) -> None:
        super().__init__(head)
        self._parts = parts
        self.items = list[Item]()
        self._is_open = False
        self.last: Piece | None = None
        """The last piece."""

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; `tool_calls` if there were any."""
        return None if self.last is None else self._parts.finish_reason(self.last)

    def piece(self, piece: Piece, usage: Counts | None) -> Iterator[bytes]:
        """Events of the items that the piece begins, continues and ends."""
        self.last = piece
        for part in self._parts.read(piece):
            if self._is_open and not self.items[-1].takes(part):
                yield from self._end_item()
            if not self._is_open:
                yield from self._begin_item(part)
            new = part.arguments if isinstance(part, CallPart) else part.text
            self.items[-1].text += new
            if new:
                yield from self.delta(self.items[-1], new)
        if piece.finish_reason is not None and self._is_open:
            yield from self._end_item()

    def complete(
        self, choices: Choices, pieces: Sequence[Piece], usage: Counts, measurements: Counts
    ) -> dict[str, Any]:
        """The whole answer."""
        for _ in self.piece(pieces[0], None):
            pass
        return self.answer(usage)

    def _begin_item(self, part: Part) -> Iterator[bytes]:
        call, is_reasoning = part if isinstance(part, CallPart) else None, isinstance(part, ReasoningPart)
        self.items.append(Item(len(self.items), call=call, is_reasoning=is_reasoning))
        self._is_open = True
        yield from self.begin_item(self.items[-1])

    def _end_item(self) -> Iterator[bytes]:
        self._is_open = False
        yield from self.end_item(self.items[-1])

    def begin_item(self, item: Item) -> Iterator[bytes]:
        """Events of an item without text; only some APIs have any."""
        yield from ()

    @abstractmethod
    def delta(self, item: Item, text: str) -> Iterator[bytes]:
        """Events of new text of an item."""

    @abstractmethod
    def end_item(self, item: Item) -> Iterator[bytes]:
        """Events of a whole item."""

    @abstractmethod
    def answer(self, usage: Counts) -> dict[str, Any]:
        """The whole answer, once all pieces were read."""
