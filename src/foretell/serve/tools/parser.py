"""Finds calls of tools in the text of an answer, as it arrives."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from foretell.serve.tools.json_head import ContainerEnd, Head, IncompleteError, MalformedError, read_head, skip_blanks
from foretell.serve.tools.pairs import PairReader
from foretell.serve.tools.parts import CallPart, PartParser, TextPart
from foretell.serve.tools.syntax import ToolSyntax, overlap

_SEPARATORS = (",", ";")
_HEAD_CHARS = 256
"""Most characters between the mark and the arguments of a call that is no JSON object."""
_BEGINNING = re.compile(r"\s*\[?\s*([\w.:/-]*)(\(?)")
"""Of an answer that may begin with a call in Python."""


class ToolParser(PartParser):
    """Splits the text of an answer into text and calls; where the text is cut makes no difference.

    What follows a mark of the syntax is a call if it has a name and, if any, arguments; an answer that begins with a
    call needs no mark if it names one of the tools. Everything else is text, but for blanks next to calls. Arguments in
    JSON are passed on as they arrive, up to the bracket that closes them: models may write invalid JSON there.
    `functions`: names of the tools, with the schemas of their arguments if they are known. `most`: number of calls that
    are passed on; further ones are left out.
    """

    def __init__(
        self,
        syntax: ToolSyntax,
        functions: Collection[str] | Mapping[str, Mapping[str, Any] | None],
        most: int | None = None,
    ) -> None:
        super().__init__()
        self._syntax, self._names, self._most = syntax, frozenset(functions), most
        self._schemas = functions if isinstance(functions, Mapping) else {}
        self._pattern = re.compile(re.escape(syntax.lead) + syntax.head) if syntax.head else None
        self._step = self._start
        self._head_at, self._known_only, self._marked, self._in_array, self._calls = 0, False, False, False, 0
        self._end = ContainerEnd()
        self._pairs: PairReader | None = None
        self._then = self._tail

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self._calls if self._most is None else min(self._calls, self._most)

    def _start(self) -> bool:
        """The beginning of the answer, which may be a call without a mark."""
        at = skip_blanks(self._rest, 0)
        marks = [mark for mark in self._syntax.marks if mark.startswith(self._rest[at:])]
        if not self._last and (marks or at == len(self._rest)):
            return False
        bare = self._bare_call(at)
        if bare is None and not self._last:
            return False
        if bare and not self._rest.startswith(self._syntax.marks, at):
            self._open(at, marked=False)
        else:
            self._step = self._text
        return True

    def _bare_call(self, at: int) -> bool | None:
        """Whether the answer may begin with a call; None: more text is needed."""
        if not self._syntax.bare:
            return self._rest[at : at + 1] in ("{", "[")
        match = _BEGINNING.match(self._rest, at)
        assert match is not None
        if match.end() == len(self._rest) and not match[2]:
            return None if any(name.startswith(match[1]) for name in self._names) else False
        is_call = match[1] in self._names and bool(match[2])
        return is_call or re.match(r"(\[\s*)?\{", self._rest[at:]) is not None

    def _text(self) -> bool:
        """Text up to the next mark."""
        hits = [(at, -len(mark)) for mark in self._syntax.marks if (at := self._rest.find(mark)) >= 0]
        if hits:
            at, length = min(hits)
            mark = self._rest[at : at - length]
            longer = [m for m in self._syntax.marks if len(m) > -length and m.startswith(self._rest[at:])]
            if longer and not self._last:
                self._pass(TextPart, len(self._rest[:at].rstrip()))
                return False
            self._pass(TextPart, len(self._rest[:at].rstrip()))
            self._known_only = mark.startswith("`")
            self._open(self._rest.index(mark) + (0 if mark == self._syntax.lead else len(mark)), marked=True)
            return True
        if self._last:
            self._pass(TextPart, len(self._rest.rstrip() if self._calls else self._rest))
            self._rest = ""
        else:
            held = max((overlap(self._rest, mark) for mark in self._syntax.marks), default=0)
            self._pass(TextPart, len(self._rest[: len(self._rest) - held].rstrip()))
        return False

    def _open(self, at: int, marked: bool) -> None:
        """A call is expected at a position."""
        self._head_at, self._marked, self._step = at, marked, self._head

    def _head(self) -> bool:
        """The name of a call."""
        try:
            head = self._read_head()
        except IncompleteError as error:
            if not self._last:
                return False
            self._end_in_head(error.name)
        except MalformedError:
            self._refuse()
        else:
            self._begin_call(head)
        return True

    def _end_in_head(self, name: str) -> None:
        """The answer ends within the head of a call: as in vLLM a call without arguments if the name is complete, and
        nothing if it is not; without a mark, or where it is prose on marks, text. `name`: in JSON, if it is complete.
        """
        text = self._rest[self._head_at :].strip()
        left_out = self._marked and self._rest.lstrip()[:1] in ("<", "[")
        if left_out and text not in ("", "[") and not re.match(r"\[?\s*\{", text):
            cut = self._syntax.cut_name(text, self._names)
            name, left_out = cut or "", cut is not None
        if name:
            self._begin_call(Head(name, len(self._rest), "{}"))
        elif left_out:
            self._rest, self._step = "", self._after
        else:
            self._refuse()

    def _read_head(self) -> Head:
        at = skip_blanks(self._rest, self._head_at)
        if at == len(self._rest):
            raise IncompleteError
        known = None if self._marked and not self._known_only else self._names
        if self._pattern is None or re.match(r"\[?\s*\{", self._rest[at:]):
            return read_head(self._rest, self._enter_array(at), known)
        if not self._last and re.fullmatch(r"\[\s*", self._rest[at:]):
            raise IncompleteError
        match = self._pattern.match(self._rest, at)
        if match is None:
            lead, text = self._syntax.lead, self._rest[at:]
            may_follow = text.startswith(lead) or lead.startswith(text)
            raise IncompleteError if may_follow and len(text) < _HEAD_CHARS else MalformedError
        if known is not None and match[1] not in known:
            raise MalformedError
        return Head(match[1], match.end())

    def _enter_array(self, at: int) -> int:
        if not self._in_array and self._rest[at] == "[":
            at = skip_blanks(self._rest, at + 1)
            if at == len(self._rest):
                raise IncompleteError
            if self._rest[at] != "{":
                raise MalformedError
        return at

    def _refuse(self) -> None:
        """What was expected to be a call is text, up to where another call may begin."""
        self._pass(TextPart, max(self._head_at, 1))
        self._in_array, self._step = False, self._text

    def _begin_call(self, head: Head) -> None:
        opening = self._rest[self._head_at : head.at].lstrip()
        self._in_array = self._in_array or opening.startswith("[")
        is_object = re.match(r"\[?\s*\{", opening) is not None
        self._calls += 1
        number = self._calls - 1
        self._put(CallPart(number, head.arguments or "", self._syntax.new_id(head.name, number), head.name))
        self._rest = self._rest[head.at :]
        self._end, self._pairs = ContainerEnd(), None
        if self._syntax.pairs is not None and not is_object and head.arguments is None:
            self._pairs, self._step = PairReader(self._syntax.pairs, self._schemas.get(head.name)), self._read_pairs
        else:
            self._step = self._arguments if head.arguments is None else self._after
        self._then = self._tail if is_object else self._after

    def _read_pairs(self) -> bool:
        """Arguments that are no JSON."""
        assert self._pairs is not None
        arguments, used, done = self._pairs.read(self._rest, self._last)
        if arguments:
            self._put(CallPart(self._calls - 1, arguments))
        self._rest = self._rest[used:]
        if done:
            self._step = self._after
        return done

    def _arguments(self) -> bool:
        """Arguments up to the bracket that closes them."""
        if self._syntax.until:
            end, behind = self._until()
        else:
            end = behind = self._end.find(self._rest)
        held = 0 if self._last else max((overlap(self._rest, mark) for mark in self._syntax.until), default=0)
        taken = self._rest[: len(self._rest) - held] if end < 0 else self._rest[:end]
        if taken:
            self._put(CallPart(self._calls - 1, taken))
        self._rest = self._rest[len(taken) if end < 0 else behind :]
        if end >= 0:
            self._end, self._step = ContainerEnd(1), self._then
        return end >= 0

    def _until(self) -> tuple[int, int]:
        """Where the first mark begins and ends that ends arguments; -1 and -1: none is there."""
        hits = [(at, at + len(mark)) for mark in self._syntax.until if (at := self._rest.find(mark)) >= 0]
        return min(hits, default=(-1, -1))

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
        syntax, rest = self._syntax, self._rest
        begun = [m for m in (*syntax.after, *syntax.marks, syntax.lead) if m.startswith(rest) and m != rest]
        if not rest or (begun and (not self._last or rest[0] in "<`")):
            return False
        ended = next((mark for mark in syntax.after if rest.startswith(mark)), None)
        if ended == "]" and not self._in_array:
            ended = None
        if ended is not None:
            self._rest = rest[len(ended) :]
            self._in_array = self._in_array and ended != "]"
        elif self._in_array and rest[0] == "]":
            self._rest, self._in_array = rest[1:], False
        elif rest[0] in _SEPARATORS:
            self._open(1, self._marked)
        elif syntax.lead and rest.startswith(syntax.lead):
            self._open(0, marked=True)
        elif rest[0] == "{" and (not syntax.after or self._in_array):
            self._open(0, self._marked)
        elif self._is_call_in_python():
            if self._pattern is not None and self._pattern.match(rest) is None and not self._last:
                return False
            self._open(0, self._marked)
        else:
            self._in_array, self._step = False, self._text
        return True

    def _is_call_in_python(self) -> bool:
        """Whether the text may go on with a call on a line of its own, of one of the tools."""
        if self._syntax.pairs is None or self._syntax.pairs.close[-1] != ")" or self._syntax.lead:
            return False
        match = re.match(r"([\w.:/-]+)(\(?)", self._rest)
        if match is None or (match.end() < len(self._rest) and not match[2]):
            return False
        return match[1] in self._names if match[2] else any(name.startswith(match[1]) for name in self._names)
