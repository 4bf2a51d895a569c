"""Parts of an answer: text, reasoning, and calls of tools."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TextPart:
    """Text of an answer."""

    text: str


@dataclass(frozen=True)
class ReasoningPart:
    """Text that a model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """Arguments of a call, as JSON text. `id` and `name`: where the call begins only."""

    index: int
    """Number of the call in the answer."""
    arguments: str
    id: str = ""
    name: str = ""


Part = TextPart | ReasoningPart | CallPart


class PartParser:
    """Splits the text of an answer into parts; where the text is cut makes no difference."""

    _step: Callable[[], bool]
    """Reads on; whether more can be read before there is further text."""

    def __init__(self) -> None:
        self._rest, self._last = "", False
        """Text that is not decided, and whether none follows."""
        self._parts = list[Part]()

    def feed(self, text: str, last: bool) -> list[Part]:
        """The parts of further text; `last`: none follows."""
        self._rest, self._last, self._parts = self._rest + text, last, []
        while self._step():
            pass
        return self._parts

    def _pass(self, kind: type[TextPart] | type[ReasoningPart], count: int) -> None:
        """Pass on the next characters."""
        if count:
            self._parts.append(kind(self._rest[:count]))
            self._rest = self._rest[count:]
