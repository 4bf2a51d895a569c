"""Answers in OpenAI's harmony format: messages with a header, which names a channel and, for a call, its recipient.

Source: https://cookbook.openai.com/articles/openai-harmony, and vLLM 0.33 where that leaves a choice.
"""

import re

from foretell.serve.tools.parts import PartParser, ReasoningPart, TextPart
from foretell.serve.tools.syntax import overlap

_START, _CHANNEL, _MESSAGE, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
_ENDS = ("<|end|>", _CALL, "<|return|>", _START)
_HEADER = re.compile(
    r"\s*(?:<\|start\|>assistant)?(?:\s*(?:to=(?P<to>[^\s<]++)|<\|channel\|>(?P<channel>\w++)|<\|constrain\|>|\w++))*+"
    r"\s*<\|message\|>"
)
_BEGINNINGS = (_START, _CHANNEL, _MESSAGE, "to=", "<|constrain|>", *_ENDS)
_MOST_HEADER = 512
"""Characters of the longest header."""
_NO_FUNCTIONS = ("assistant", "python", "browser", "container")
"""Recipients that are no functions of a request, and those that begin with one of them and a dot."""


class ChannelParser(PartParser):
    """Splits an answer into reasoning (the channel `analysis`) and text; where the text is cut makes no difference.

    Calls are text in one form, whatever the model's order of recipient, channel and type was, for a parser of calls.
    What is sent to anything but a function is left out. Messages of one kind are joined by line ends. `opened`: the
    prompt ends inside the reasoning.
    """

    def __init__(self, opened: bool) -> None:
        super().__init__()
        self._step = self._read
        self._kind: type[TextPart] | type[ReasoningPart] | None = ReasoningPart if opened else None
        """Of the parts of the message that is being read; None: a call, or what is left out."""
        self._in_body, self._in_call = opened, False
        self._begun = set[type]()
        self._is_first = False
        """Whether nothing of the message was passed on."""

    def _read(self) -> bool:
        return self._body() if self._in_body else self._header()

    def _header(self) -> bool:
        text = self._rest.lstrip()
        if not text or (not self._last and any(mark.startswith(text) and mark != text for mark in _BEGINNINGS)):
            return False
        begun = next((mark for mark in _BEGINNINGS if text.startswith(mark)), "")
        if begun in _ENDS[:-1]:
            self._rest = text[len(begun) :]
            return True
        header = _HEADER.match(self._rest[:_MOST_HEADER]) if begun else None
        if header is not None:
            self._rest = self._rest[header.end() :]
            self._open_message(header["to"], header["channel"])
        elif begun and self._end((*_ENDS[:-1], _MESSAGE)) < 0 and len(self._rest) < _MOST_HEADER:
            self._rest = "" if self._last else self._rest
            return False
        else:  # This is no message.
            self._open(TextPart)
            mark = len(self._rest) - len(text) + len(begun)
            self._put(self._rest[:mark])
            self._rest = self._rest[mark:]
        return True

    def _open_message(self, recipient: str | None, channel: str | None) -> None:
        if recipient is None or recipient.startswith("<|"):
            self._open(ReasoningPart if channel == "analysis" else TextPart)
        elif recipient.partition(".")[0] in _NO_FUNCTIONS:
            self._open(None)
        else:
            self._open(None)
            self._in_call = True
            name = recipient.removeprefix("functions.")
            self._parts.append(TextPart(f"{_CHANNEL}commentary to=functions.{name} {_MESSAGE}"))

    def _open(self, kind: type[TextPart] | type[ReasoningPart] | None) -> None:
        self._in_body, self._in_call, self._kind, self._is_first = True, False, kind, True

    def _end(self, marks: tuple[str, ...]) -> int:
        return min((at for mark in marks if (at := self._rest.find(mark)) >= 0), default=-1)

    def _body(self) -> bool:
        end = self._end(_ENDS)
        held = 0 if self._last else max((overlap(self._rest, mark) for mark in _ENDS), default=0)
        self._put(self._rest[: len(self._rest) - held if end < 0 else end])
        if end < 0:
            self._rest = self._rest[len(self._rest) - held :]
            return False
        self._rest, self._in_body = self._rest[end:], False
        if self._in_call:
            self._parts.append(TextPart(_CALL))
        return True

    def _put(self, text: str) -> None:
        if text and self._in_call:
            self._parts.append(TextPart(text))
        elif text and self._kind is not None:
            again = self._is_first and self._kind in self._begun
            self._parts.append(self._kind(f"\n{text}" if again else text))
            self._begun.add(self._kind)
            self._is_first = False
