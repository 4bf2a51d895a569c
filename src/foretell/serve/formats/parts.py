"""Splits the pieces of an answer into text and calls of tools."""

from foretell.serve.choices import Piece
from foretell.serve.tools.parser import ToolParser
from foretell.serve.tools.parts import CallPart, Part, TextPart
from foretell.serve.tools.use import ToolUse


class PartReader:
    """Reads the parts of all choices of an answer; without tools all is text."""

    def __init__(self, use: ToolUse | None) -> None:
        self._use = use
        self._parsers = dict[int, ToolParser]()

    def read(self, piece: Piece) -> list[Part]:
        """The parts of the next piece of a choice."""
        if self._use is None:
            return [TextPart(piece.text)] if piece.text else []
        parser = self._parsers.setdefault(piece.index, self._use.parser())
        return parser.feed(piece.text, last=piece.finish_reason is not None)

    def finish_reason(self, piece: Piece) -> str | None:
        """The reason for the end, after the piece was read: `tool_calls` if there were any."""
        parser = self._parsers.get(piece.index)
        called = parser is not None and parser.calls and piece.finish_reason == "stop"
        return "tool_calls" if called else piece.finish_reason


def text_of(parts: list[Part]) -> str:
    """All text of some parts."""
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def calls_of(parts: list[Part]) -> list[CallPart]:
    """The calls of some parts, each as one."""
    calls = dict[int, CallPart]()
    for part in parts:
        if isinstance(part, CallPart):
            first = calls.get(part.index)
            calls[part.index] = (
                part if first is None else CallPart(part.index, first.arguments + part.arguments, first.id, first.name)
            )
    return list(calls.values())
