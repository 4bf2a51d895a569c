"""What is allowed while a model thinks: a constraint that begins with the answer, and a budget of tokens."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from foretell.core.token_rules import TokenConstraint
from foretell.serve.protocol.chat import ChatBody
from foretell.serve.reasoning import Reasoning, ReasoningSyntax
from foretell.serve.token_text import TokenTexts

if TYPE_CHECKING:
    from foretell.serve.service import Service

_START, _THINKING, _ANSWER = range(3)


class Phase(NamedTuple):
    """Where an answer is after some tokens: `step`, the end of its text, and the tokens of reasoning so far."""

    step: int
    tail: bytes = b""
    tokens: int = 0
    sizes: tuple[int, ...] = ()
    """Bytes of the tokens whose text the tail holds, and of a few before them."""
    marked: int = 0
    """Tokens of the mark that is being written because the budget is spent."""


class Phases:
    """Follows an answer token by token. `bytes_of`: the bytes of a token; `opened`: the prompt ends in the reasoning;
    `to_answer`: what stands between the reasoning and the answer counts as reasoning.
    """

    def __init__(
        self, syntax: ReasoningSyntax, bytes_of: Callable[[int], bytes], opened: bool, to_answer: bool = False
    ) -> None:
        self.bytes_of, self._opened = bytes_of, opened
        self._begin = tuple(mark.strip().encode() for mark in syntax.begin)
        self._end = tuple(mark.encode() for mark in (to_answer and syntax.answer) or syntax.end)
        self._hidden = tuple(mark.encode() for mark in (*syntax.hidden, *syntax.begin))
        self._kept = max(map(len, (*self._begin, *self._end)))

    def start(self) -> Phase:
        """Before the first token."""
        return Phase(_THINKING if self._opened else _START)

    def advance(self, phase: Phase, token: int) -> Phase:
        """After one more token."""
        if phase.step == _ANSWER:
            return phase
        text = phase.tail + self.bytes_of(token)
        if phase.step == _THINKING:
            sizes = (*phase.sizes, len(text) - len(phase.tail))[-self._kept :]
            ends = [at for mark in self._end if (at := text.find(mark)) >= 0]
            if ends:
                of_mark = len(text) - min(ends) - sizes[-1]
                begun = next((n for n in range(len(sizes)) if sum(sizes[len(sizes) - 1 - n : -1]) >= of_mark), 0)
                return Phase(_ANSWER, b"", max(phase.tokens - begun, 0))
            return Phase(_THINKING, text[-self._kept :], phase.tokens + 1, sizes)
        if any(mark in text for mark in self._begin):
            return Phase(_THINKING)
        text = text.lstrip()
        may_begin = not text or any(mark.startswith(text) or text.startswith(mark) for mark in self._hidden)
        return Phase(_START, text) if may_begin else Phase(_ANSWER)


class AfterReasoning:
    """A constraint of what follows the reasoning; None: there is none. `budget`: tokens of reasoning; None: any number.

    A model that has spent its budget writes `closing`. `closing` and `opening`: tokens of the marks that end and begin
    reasoning; `ending`: tokens that end the answer, and so do not stand in reasoning.
    """

    def __init__(
        self,
        phases: Phases,
        inner: TokenConstraint | None,
        budget: int | None,
        opening: Sequence[int],
        closing: Sequence[int],
        ending: Sequence[int],
        vocab: int,
    ) -> None:
        self._phases, self._inner, self._budget = phases, inner, budget
        self._opening, self._closing, self._vocab = tuple(opening), tuple(closing), vocab
        self._free = np.full((vocab + 7) // 8, 255, np.uint8)
        self._thinking = self._free.copy()
        for token in ending if inner is not None else ():
            self._thinking[token // 8] &= ~np.uint8(1 << (token % 8))

    def start(self) -> Any:
        """The state before the first token."""
        return self._phases.start(), None if self._inner is None else self._inner.start()

    def advance(self, state: Any, token: int) -> Any | None:
        """The state after one more token; None: it is not allowed."""
        phase, inner = state
        if not 0 <= token < self._vocab:
            return None
        if phase.step == _THINKING:
            spent = self._is_spent(phase)
            if spent and token != self._closing[phase.marked]:
                return None
            if not spent and not self._thinking[token // 8] >> (token % 8) & 1:
                return None
            after = self._phases.advance(phase, token)
            if spent and after.step != _ANSWER:
                after = after._replace(tokens=phase.tokens, marked=phase.marked + 1)
                if after.marked == len(self._closing):
                    after = Phase(_ANSWER, b"", phase.tokens)
            return after, inner
        after = self._phases.advance(phase, token) if phase.step == _START else phase
        if self._inner is None or (phase.step == _START and token in self._next_of_mark(phase)):
            return after, inner
        following = self._inner.advance(inner, token)
        return None if following is None else (Phase(_ANSWER, b"", phase.tokens), following)

    def mask(self, state: Any) -> UInt8[np.ndarray, " w"]:
        """The tokens that are allowed next."""
        phase, inner = state
        if phase.step == _THINKING:
            return self._only(self._closing[phase.marked]) if self._is_spent(phase) else self._thinking
        if self._inner is None:
            return self._free
        mask = self._inner.mask(inner)
        for token in self._next_of_mark(phase) if phase.step == _START else ():
            mask = np.pad(mask, (0, max(len(self._free) - len(mask), 0)))
            mask[token // 8] |= np.uint8(1 << (token % 8))
        return mask

    def forced(self, state: Any) -> Sequence[Sequence[int]]:
        """The mark that a spent budget leaves, or what the constraint does."""
        phase, inner = state
        if phase.step == _THINKING:
            return (self._closing[phase.marked :],) if self._is_spent(phase) else ()
        return () if self._inner is None or phase.step == _START else self._inner.forced(inner)

    def is_final(self, state: Any) -> bool:
        """Whether nothing may follow."""
        phase, inner = state
        return self._inner is not None and phase.step == _ANSWER and self._inner.is_final(inner)

    def _next_of_mark(self, phase: Phase) -> Sequence[int]:
        """The token by which the mark that begins reasoning begins or goes on."""
        text = phase.tail
        for count in range(len(self._opening)):
            if text == b"".join(map(self._phases.bytes_of, self._opening[:count])).lstrip():
                return self._opening[count : count + 1]
        return ()

    def _is_spent(self, phase: Phase) -> bool:
        return self._budget is not None and phase.tokens >= self._budget

    def _only(self, token: int) -> UInt8[np.ndarray, " w"]:
        mask = np.zeros_like(self._free)
        mask[token // 8] = 1 << (token % 8)
        return mask


def phases_of(reasoning: Reasoning, texts: TokenTexts, to_answer: bool = False) -> Phases:
    """What follows the answers with this reasoning."""
    return Phases(reasoning.syntax, lambda token: texts.of(token)[1], reasoning.opened, to_answer)


def after_reasoning(
    body: ChatBody, reasoning: Reasoning, constraint: TokenConstraint | None, service: "Service"
) -> TokenConstraint | None:
    """The constraint of an answer that may begin with reasoning, with the budget of the request or of the server."""
    asked = body.thinking_token_budget
    budget = service.settings.reasoning_budget if asked is None else asked
    budget = None if budget is None or budget < 0 else budget
    if constraint is None and budget is None:
        return None
    model, syntax = service.loaded.model, reasoning.syntax
    opening, closing = (
        model.codec.encode(text, add_special_tokens=False)
        for text in (syntax.begin[0], syntax.closing or syntax.end[0])
    )
    phases = phases_of(reasoning, service.texts, to_answer=True)
    return AfterReasoning(phases, constraint, budget, opening, closing, model.eos, model.config.vocab)
