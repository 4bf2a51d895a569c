"""Text that is written in several places at once and shown in order."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Segment:
    """A part of the text, with the tokens that it was made of; `closed`: nothing follows in it."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    closed: bool = False

    def write(self, text: str, tokens: tuple[int, ...] = ()) -> None:
        """Append to the segment."""
        self.text += text
        self.tokens += tokens


class OrderedText:
    """Segments in the order of the text. What follows a segment is held back until the segment is closed."""

    def __init__(self) -> None:
        self._segments = list[Segment]()
        self._next = 0
        """Index of the first segment that is not shown to its end."""

    def append(self, text: str = "", closed: bool = False) -> Segment:
        """A new segment at the end."""
        self._segments.append(Segment(text, closed=closed))
        return self._segments[-1]

    def insert_after(self, segment: Segment) -> Segment:
        """A new segment behind another that was not shown to its end before the last release."""
        self._segments.insert(self._segments.index(segment) + 1, Segment())
        return self._segments[self._segments.index(segment) + 1]

    def release(self) -> tuple[str, tuple[int, ...]]:
        """The text that may be shown by now and was not before, with its tokens."""
        text, tokens = "", list[int]()
        while self._next < len(self._segments):
            segment = self._segments[self._next]
            text, tokens = text + segment.text, tokens + segment.tokens
            segment.text, segment.tokens = "", []
            if not segment.closed:
                break
            self._next += 1
        return text, tuple(tokens)

    def close(self) -> None:
        """Close all segments: no request is left that writes."""
        for segment in self._segments[self._next :]:
            segment.closed = True
