"""What a model thinks before it answers: one table of marks, by vLLM's names, and how the texts are told apart."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.serve.channels import ChannelParser
from foretell.serve.tools.parts import PartParser, ReasoningPart, TextPart

NONE = "none"
"""Name for: reasoning is part of the answer."""


@dataclass(frozen=True)
class ReasoningSyntax:
    """Reasoning stands between one of `begin` and one of `end`; texts of `hidden` beside it belong to nothing."""

    begin: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    hidden: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    """Where one of them stands, the answer begins; empty: at the end of the reasoning."""
    closing: str = ""
    """What a model writes from the end of its reasoning to the beginning of its answer; empty: the first end."""
    channels: bool = False
    """Whether an answer consists of messages with headers."""
    strips: bool = False
    """Whether blanks at the end of the reasoning are left out, as vLLM does."""
    cites: bool = False
    """Whether `<co>` and `</co: 0:[1]>` in texts mark what is cited."""

    def opened_by(self, prompt: str, continued: bool) -> bool:
        """Whether the prompt of an answer ends inside the reasoning; `continued`: with the beginning of the answer."""
        if not continued:
            return prompt.rstrip().endswith(tuple(mark.rstrip() for mark in self.begin))
        begun = max(prompt.rfind(mark.rstrip()) for mark in self.begin)
        return begun > max(prompt.rfind(mark) for mark in self.end)

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        return (*self.begin, *self.end, *self.hidden, *self.answer)


_THINK, _STRIPPED = ReasoningSyntax(), ReasoningSyntax(strips=True)
_COHERE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
_CHANNEL, _FINAL = "<|channel|>", "<|channel|>final<|message|>"
REASONING_SYNTAXES: dict[str, ReasoningSyntax] = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "deepseek_v4", "qwen3", "olmo3", "step3", "step3p5", "mimo", "holo2"), _THINK
    ),
    **dict.fromkeys(
        ("glm45", "glm47", "kimi_k2", "minimax_m2", "nemotron_v3", "granite_thinking_parser"), _STRIPPED
    ),
    "openai_gptoss": ReasoningSyntax(
        (f"{_CHANNEL}analysis<|message|>",), ("<|end|>",),
        (_FINAL, f"{_CHANNEL}commentary<|message|>", f"{_CHANNEL}commentary", f"{_CHANNEL}analysis",
         "<|start|>assistant", "<|end|>", "<|return|>"),
        (_FINAL,), f"<|end|><|start|>assistant{_FINAL}", channels=True,
    ),
    "mistral": ReasoningSyntax(("[THINK]",), ("[/THINK]",), strips=True),
    "gemma4": ReasoningSyntax(("<|channel>thought\n", "<|channel>thought"), ("<channel|>",), strips=True),
    "granite": ReasoningSyntax(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "granite_response": ReasoningSyntax(hidden=("<response>", "</response>")),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), ReasoningSyntax(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), _COHERE, ("<|START_RESPONSE|>", "<|START_TEXT|>"),
        "<|END_THINKING|><|START_RESPONSE|>", strips=True, cites=True,
    )),
    "seed_oss": ReasoningSyntax(("<seed:think>",), ("</seed:think>",)),
}  # fmt: skip
"""By vLLM's names; `granite_response` (Granite 3.3) is ours."""
_IN_TEMPLATES = (
    ((_CHANNEL, "<|message|>"), "openai_gptoss"),
    (("<|channel>",), "gemma4"),
    (("[THINK]",), "mistral"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<seed:think>",), "seed_oss"),
    (("<think>", "<arg_key>"), "glm45"),
    (("<think>", "<|tool_call_begin|>"), "kimi_k2"),
    (("<think>", "<minimax:tool_call>"), "minimax_m2"),
    (("<think>", "<response>"), "granite_response"),
    (("<think>",), "deepseek_r1"),
    (("</think>",), "deepseek_r1"),
    (("Here is my thought process:",), "granite"),
)
"""Texts that together stand in the templates of a syntax; the first one that fits."""


def reasoning_of(template: str | None, name: str | None = None) -> ReasoningSyntax | None:
    """The syntax of a model with this chat template; None: it shows none. `name`: of one that goes before."""
    if name is None:
        fitting = (kind for texts, kind in _IN_TEMPLATES if all(text in (template or "") for text in texts))
        name = next(fitting, NONE)
    return None if name == NONE else REASONING_SYNTAXES[name]


@dataclass(frozen=True)
class Reasoning:
    """The reasoning of the answers to one prompt. `opened`: the prompt ends inside it."""

    syntax: ReasoningSyntax
    opened: bool
    calls: tuple[str, ...] = ()
    """Marks of calls of tools."""

    def parser(self) -> "ReasoningParser | ChannelParser":
        """A parser of one answer."""
        return ChannelParser(self.opened) if self.syntax.channels else ReasoningParser(self)


class Citations:
    """Leaves the marks of citations out of a text, wherever it is cut; a mark that ends what did not begin is text.

    Source: Cohere's parser (melody 0.14), which vLLM runs.
    """

    def __init__(self) -> None:
        self._rest, self._is_open = "", False

    def feed(self, text: str, last: bool) -> str:
        """The text without marks, as far as it is decided; `last`: none follows."""
        self._rest, out = self._rest + text, ""
        while True:
            mark = (_CITED if self._is_open else _CITES).search(self._rest)
            if mark is None or (mark.end() == len(self._rest) and mark[0][-1] != ">"):
                break
            out += self._rest[: mark.start()]
            self._rest, self._is_open = self._rest[mark.end() :], not self._is_open
        held = len(self._rest) if mark is None else mark.start()
        out += self._rest[:held] + (self._rest[held:] if last and not self._is_open else "")
        self._rest = "" if last else self._rest[held:]
        return out


_CITES = re.compile(r"<co>|<(co?)?\Z")
_CITED = re.compile(r"</co(:[^<>]{0,256})?(>|\Z)|<(/c?)?\Z")
"""The marks, or their beginning at the end of a text."""


class ReasoningParser(PartParser):
    """Splits the text of an answer into reasoning and text; where the text is cut makes no difference.

    Reasoning begins with the answer, but for blanks, or after hidden texts; a mark that stands later is text.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        super().__init__()
        syntax = reasoning.syntax
        self._syntax, self._calls = syntax, reasoning.calls
        self._is_new = True
        """Whether no reasoning was read yet."""
        self._step = self._reasoning if reasoning.opened else self._start

    def _start(self) -> bool:
        """Where reasoning may begin."""
        blanks = len(self._rest) - len(self._rest.lstrip())
        text, marks = self._rest[blanks:], (*self._syntax.begin, *self._syntax.hidden)
        longer = any(mark.startswith(text) and mark != text for mark in marks)
        if longer and not self._last:
            return False
        mark = max((m for m in marks if text.startswith(m)), key=len, default=None)
        if mark is None:
            self._step = self._answer
            return True
        self._rest = text[len(mark) :]
        self._step = self._reasoning if mark in self._syntax.begin else self._start
        self._is_new = False
        if mark in self._syntax.answer:
            self._step = self._answer
        return True

    def _reasoning(self) -> bool:
        """Reasoning up to its end."""
        if self._is_new:  # A prompt may have opened it, and the model does again.
            text = self._rest.lstrip()
            again = max((len(m) for m in self._syntax.begin if text.startswith(m)), default=0)
            if not again and not self._last and any(m.startswith(text) for m in self._syntax.begin):
                return False
            self._rest, self._is_new = text[again:] if again else self._rest, False
        hits = [(at, mark) for mark in (*self._syntax.end, *self._calls) if (at := self._rest.find(mark)) >= 0]
        if not hits:
            shown = self._rest[: len(self._rest) - self._held((*self._syntax.end, *self._calls))]
            self._pass(ReasoningPart, len(shown.rstrip() if self._syntax.strips else shown))
            return False
        at, mark = min(hits)
        shown = self._rest[:at]
        self._pass(ReasoningPart, len(shown.rstrip() if self._syntax.strips else shown))
        self._rest = self._rest[self._rest.index(mark) :]
        if mark in self._syntax.end:
            self._rest = self._rest[len(mark) :]
        self._step = self._start if self._syntax.hidden else self._answer
        return True

    def _answer(self) -> bool:
        """Text, without what is hidden."""
        hidden = self._syntax.hidden
        hits = [(at, -len(mark), mark) for mark in hidden if (at := self._rest.find(mark)) >= 0]
        if not hits:
            self._pass(TextPart, len(self._rest) - self._held(hidden))
            return False
        at, _, mark = min(hits)
        longer = any(m.startswith(self._rest[at:]) and len(m) > len(mark) for m in (*hidden, *self._syntax.begin))
        self._pass(TextPart, at)
        if longer and not self._last:
            return False
        if not self._rest.startswith(self._syntax.begin):
            self._rest = self._rest[len(mark) :]
        self._step = self._start
        return True

    def _held(self, marks: Sequence[str]) -> int:
        """Length of the end of the text that may begin a mark."""
        if self._last:
            return 0
        ends = (n for mark in marks for n in range(1, len(mark)) if self._rest.endswith(mark[:n]))
        return max(ends, default=0)
