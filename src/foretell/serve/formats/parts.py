"""Splits the pieces of an answer into reasoning, text and calls of tools."""

from foretell.serve.channels import ChannelParser
from foretell.serve.choices import Piece
from foretell.serve.reasoning import Citations, Reasoning, ReasoningParser
from foretell.serve.tools.parser import ToolParser
from foretell.serve.tools.parts import CallPart, Part, ReasoningPart, TextPart
from foretell.serve.tools.use import ToolUse


class PartReader:
    """Reads the parts of all choices of an answer; without tools and reasoning all is text."""

    def __init__(self, use: ToolUse | None, reasoning: Reasoning | None = None) -> None:
        self._use, self._reasoning = use, reasoning
        self._parsers, self._reasoners = dict[int, ToolParser](), dict[int, ReasoningParser | ChannelParser]()
        self._citations = dict[tuple[int, type[Part]], Citations]()

    @property
    def must_call(self) -> bool:
        """Whether an answer is calls only."""
        return self._use is not None and self._use.choice.mode == "required"

    def read(self, piece: Piece) -> list[Part]:
        """The parts of the next piece of a choice."""
        parts = self._read(piece)
        if self._reasoning is None or not self._reasoning.syntax.cites:
            return parts
        thought, said = (self._uncited(piece, parts, kind) for kind in (ReasoningPart, TextPart))
        return [*thought, *said, *(part for part in parts if isinstance(part, CallPart))]

    def _uncited(self, piece: Piece, parts: list[Part], kind: type[TextPart] | type[ReasoningPart]) -> list[Part]:
        """Text of one kind without marks of citations."""
        citations = self._citations.setdefault((piece.index, kind), Citations())
        given = "".join(part.text for part in parts if isinstance(part, kind))
        text = citations.feed(given, piece.finish_reason is not None)
        return [kind(text)] if text else []

    def _read(self, piece: Piece) -> list[Part]:
        parts, last = list[Part]([TextPart(piece.text)] if piece.text else []), piece.finish_reason is not None
        if self._reasoning is not None:
            if piece.index not in self._reasoners:
                self._reasoners[piece.index] = self._reasoning.parser()
            parts = self._reasoners[piece.index].feed(piece.text, last)
        if self._use is None:
            return parts
        if piece.index not in self._parsers:
            self._parsers[piece.index] = self._use.parser()
        thought = [part for part in parts if isinstance(part, ReasoningPart)]
        read = self._parsers[piece.index].feed(text_of(parts), last)
        return [*thought, *(part for part in read if not self.must_call or isinstance(part, CallPart))]

    def finish_reason(self, piece: Piece) -> str | None:
        """The reason for the end, after the piece was read: `tool_calls` if there were any."""
        parser = self._parsers.get(piece.index)
        called = parser is not None and parser.calls and piece.finish_reason == "stop"
        return "tool_calls" if called else piece.finish_reason


def text_of(parts: list[Part]) -> str:
    """All text of some parts."""
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def reasoning_of(parts: list[Part]) -> str:
    """All reasoning of some parts."""
    return "".join(part.text for part in parts if isinstance(part, ReasoningPart))


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
