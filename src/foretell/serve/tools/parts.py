"""Parts of an answer: text, reasoning, and calls of tools."""

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
