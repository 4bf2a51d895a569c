"""Finds calls of tools in the text of an answer, as it arrives."""

import re
from collections.abc import Callable, Collection

from foretell.serve.protocol.tools import NAME_PATTERN
from foretell.serve.tools.json_head import ContainerEnd, Head, IncompleteError, MalformedError, read_head, skip_blanks
from foretell.serve.tools.parts import CallPart, Part, TextPart
from foretell.serve.tools.syntax import ToolSyntax

_SEPARATORS = (",", ";")
_NAME_HEAD_CHARS = 256
"""Most characters between the mark and the arguments of a call that is no JSON object."""
_NAME_HEAD = re.compile(rf"\s{{0,9}}({NAME_PATTERN})\s{{0,9}}(?:\[CALL_ID\]\w{{1,40}})?(?:\[ARGS\])?\s{{0,9}}(?={{)")
"""A name and its mark; it is never longer than `_NAME_HEAD_CHARS`."""


class ToolParser:
    """Splits the text of an answer into text and calls; where the text is cut makes no difference.

    What follows the mark of the syntax is a call if it has a name and, if any, arguments; an answer that begins with
    JSON is a call if it names one of the tools. Everything else is text, but for blanks next to calls. Arguments are
    passed on as they arrive, up to the bracket that closes them: models may write invalid JSON there. `most`: number
    of calls that are passed on; further ones are left out.
    """

    def __init__(self, syntax: ToolSyntax, names: Collection[str], most: int | None = None) -> None:
        self._syntax, self._names, self._most = syntax, frozenset(names), most
        self._rest, self._last = "", False
        """Text from the position on that is decided."""
        self._parts = list[Part]()
        self._step: Callable[[], bool] = self._start
        self._head_at, self._marked, self._in_array, self._calls = 0, False, False, 0
        self._end = ContainerEnd()
        self._then = self._tail

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self._calls if self._most is None else min(self._calls, self._most)

    def feed(self, text: str, last: bool) -> list[Part]:
        """The parts of further text; `last`: none follows."""
        self._rest, self._last, self._parts = self._rest + text, last, []
        while self._step():
            pass
        return self._parts

    def _emit(self, count: int) -> None:
        """Pass on the next characters as text."""
        if count:
            self._parts.append(TextPart(self._rest[:count]))
            self._rest = self._rest[count:]

    def _start(self) -> bool:
        """The beginning of the answer, which may be a call without a mark."""
        mark, at = self._syntax.mark, skip_blanks(self._rest, 0)
        undecided = mark.startswith(self._rest[at:]) if mark else at == len(self._rest)
        if undecided and not self._last:
            return False
        if self._rest[at : at + 1] in ("{", "[") and not (mark and self._rest.startswith(mark, at)):
            self._open(at, marked=False)
        else:
            self._step = self._text
        return True

    def _text(self) -> bool:
        """Text up to the next mark."""
        mark = self._syntax.mark
        found = self._rest.find(mark) if mark else -1
        if found >= 0:
            self._emit(len(self._rest[:found].rstrip()))
            self._open(self._rest.index(mark) + len(mark), marked=True)
            return True
        if self._last:
            self._emit(len(self._rest.rstrip() if self._calls else self._rest))
            self._rest = ""
        else:
            self._emit(len(self._rest[: len(self._rest) - _overlap(self._rest, mark)].rstrip()))
        return False

    def _open(self, at: int, marked: bool) -> None:
        """A call is expected at a position."""
        self._head_at, self._marked, self._step = at, marked, self._head

    def _head(self) -> bool:
        """The name of a call."""
        try:
            at = self._enter_array()
            head = self._read_head(at)
        except IncompleteError:
            if not self._last:
                return False
            self._refuse()
        except MalformedError:
            self._refuse()
        else:
            self._begin_call(head)
        return True

    def _enter_array(self) -> int:
        at = skip_blanks(self._rest, self._head_at)
        if not self._in_array and self._rest[at : at + 1] == "[":
            at = skip_blanks(self._rest, at + 1)
            if at == len(self._rest):
                raise IncompleteError
            if self._rest[at] != "{":
                raise MalformedError
        return at

    def _read_head(self, at: int) -> Head:
        if at == len(self._rest):
            raise IncompleteError
        if self._marked and self._syntax.args_mark and self._rest[at] not in "{[":
            match = _NAME_HEAD.match(self._rest, at)
            if match is None:
                too_long = "{" in self._rest[at:] or len(self._rest) - at > _NAME_HEAD_CHARS
                raise MalformedError if too_long else IncompleteError
            return Head(match[1], match.end())
        return read_head(self._rest, at, None if self._marked else self._names)

    def _refuse(self) -> None:
        """What was expected to be a call is text, up to where another call may begin."""
        self._emit(max(self._head_at, 1))
        self._in_array, self._step = False, self._text

    def _begin_call(self, head: Head) -> None:
        opening = self._rest[self._head_at : head.at]
        self._in_array = self._in_array or opening.lstrip().startswith("[")
        is_object = opening.lstrip().startswith(("{", "["))
        self._calls += 1
        self._put(CallPart(self._calls - 1, head.arguments or "", self._syntax.new_id(), head.name))
        self._rest = self._rest[head.at :]
        self._end = ContainerEnd()
        self._step = self._arguments if head.arguments is None else self._after
        self._then = self._tail if is_object else self._after

    def _arguments(self) -> bool:
        """Arguments up to the bracket that closes them."""
        end = self._end.find(self._rest)
        taken = self._rest if end < 0 else self._rest[:end]
        if taken:
            self._put(CallPart(self._calls - 1, taken))
        self._rest = self._rest[len(taken) :]
        if end >= 0:
            self._end, self._step = ContainerEnd(1), self._then
        return end >= 0

    def _put(self, part: CallPart) -> None:
        if self._most is None or part.index < self._most:
            self._parts.append(part)

    def _tail(self) -> bool:
        """The members of the call's object after the arguments."""
        end = self._end.find(self._rest)
        self._rest = "" if end < 0 else self._rest[end:]
        if end >= 0:
            self._step = self._after
        return end >= 0

    def _after(self) -> bool:
        """Between calls."""
        self._rest = self._rest.lstrip()
        mark = self._syntax.end_mark
        if not self._rest or (mark.startswith(self._rest) and mark != self._rest and not self._last):
            return False
        if mark and self._rest.startswith(mark):
            self._rest = self._rest[len(mark) :]
        elif self._in_array and self._rest[0] == "]":
            self._rest, self._in_array = self._rest[1:], False
        elif self._rest[0] in _SEPARATORS:
            self._open(1, self._marked)
        elif self._rest[0] == "{" and not mark:
            self._open(0, self._marked)
        else:
            self._in_array, self._step = False, self._text
        return True


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that a mark may begin with."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
