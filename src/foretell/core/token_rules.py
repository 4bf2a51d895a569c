"""Which tokens may follow a text: allowed tokens, bad words, a least length, and a constraint such as a grammar.

A rule depends on the answer so far, so at a tree node it depends on the node's path. Tokens that are not allowed get
the logit -infinity, and so the weight 0 in temperature, top-k, top-p and min-p.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Int, UInt8

from foretell.core.sampling import SamplingParams


class TokenConstraint(Protocol):
    """A language of token sequences, read token by token: a grammar, for example.

    A state stands for the tokens read so far and never changes, so that the nodes of a tree can share states. One
    constraint may serve several requests.
    """

    def start(self) -> Any:
        """The state before the first token."""

    def advance(self, state: Any, token: int) -> Any | None:
        """The state after one more token; None: the token is not allowed here."""

    def mask(self, state: Any) -> UInt8[np.ndarray, " w"]:
        """The tokens that are allowed next: bit `i % 8` of byte `i // 8` for token `i`. Tokens beyond the last byte are
        not allowed.

        Raises:
            ValueError: it cannot be computed.
        """

    def forced(self, state: Any) -> Sequence[Sequence[int]]:
        """Ways to write, in tokens, the text that the constraint leaves next, the likeliest first; they are only
        drafted. Empty: it leaves several texts.
        """

    def is_final(self, state: Any) -> bool:
        """Whether the text is complete and nothing but an end-of-sequence token may follow."""


class _Node:
    """A state of a constraint and the states after one more token, None where the token is not allowed."""

    __slots__ = ("following", "state")

    def __init__(self, state: Any) -> None:
        self.state = state
        self.following: dict[int, _Node | None] = {}


class _ConstraintStates:
    """The states of a constraint along one answer and the paths of drafts below it."""

    def __init__(self, constraint: TokenConstraint) -> None:
        self._constraint = constraint
        self._start = _Node(constraint.start())
        self._known: list[tuple[int, _Node]] = [(0, self._start)]
        """Lengths of the answer with their states: the newest two, since finished steps are looked at again."""

    def at(self, generated: Int[np.ndarray, " t"], drafted: Sequence[int]) -> Any | None:
        """The state after the answer and the drafts; None: the constraint does not allow them."""
        node = self._after(generated)
        for token in drafted:
            node = None if node is None else self._next(node, token)
        return None if node is None else node.state

    def _after(self, generated: Int[np.ndarray, " t"]) -> _Node | None:
        length = len(generated)
        start, node = next((k for k in reversed(self._known) if k[0] <= length), (0, self._start))
        for token in generated[start:].tolist():
            following = self._next(node, token)
            if following is None:
                return None
            node = following
        if length > self._known[-1][0]:
            self._known = [self._known[-1], (length, node)]
        return node

    def _next(self, node: _Node, token: int) -> _Node | None:
        if token not in node.following:
            state = self._constraint.advance(node.state, token)
            node.following[token] = None if state is None else _Node(state)
        return node.following[token]


class TokenRules:
    """What may follow in the answer of one request.

    `ending`: tokens that end the answer; they are not allowed before `min_tokens`. A constraint restricts nothing after
    tokens that it does not allow, which only probes hold.
    """

    def __init__(
        self, sampling: SamplingParams, ending: Collection[int], constraint: TokenConstraint | None = None
    ) -> None:
        self._min_tokens, self._ending = sampling.min_tokens, np.array(sorted(ending), np.int64)
        self._ending_tokens = frozenset(ending)
        self._bad_words = sampling.bad_words
        self._longest_bad_word = max((len(word) for word in sampling.bad_words), default=0)
        self._allowed = None if sampling.allowed_token_ids is None else np.array(sampling.allowed_token_ids, np.int64)
        self._allowed_tokens = None if sampling.allowed_token_ids is None else frozenset(sampling.allowed_token_ids)
        self._constraint = constraint
        self._states = None if constraint is None else _ConstraintStates(constraint)

    @property
    def has_constraint(self) -> bool:
        """Whether a constraint is among the rules."""
        return self._constraint is not None

    @property
    def restricts(self) -> bool:
        """Whether there is any rule."""
        return bool(self._min_tokens or self._bad_words or self._allowed is not None or self._constraint is not None)

    def allowed(
        self, generated: Int[np.ndarray, " t"], drafted: Sequence[int], vocab: int
    ) -> Bool[np.ndarray, " v"] | None:
        """The tokens that may follow the answer and the drafts; None: all."""
        out: Bool[np.ndarray, " v"] | None = None
        if self._states is not None and (state := self._states.at(generated, drafted)) is not None:
            assert self._constraint is not None
            bits = np.unpackbits(self._constraint.mask(state), count=vocab, bitorder="little")
            out = bits.view(bool)
        if self._allowed is not None:
            chosen = np.zeros(vocab, bool)
            chosen[self._allowed] = True
            out = chosen if out is None else out & chosen
        forbidden = list(self._last_of_bad_words(generated, drafted))
        ends_too_early = len(generated) + len(drafted) < self._min_tokens and len(self._ending)
        if not forbidden and not ends_too_early:
            return out
        out = np.ones(vocab, bool) if out is None else out
        out[forbidden] = False
        if ends_too_early:
            out[self._ending] = False
        return out

    def allows(self, generated: Int[np.ndarray, " t"], drafted: Sequence[int], token: int) -> bool:
        """Whether a token may follow the answer and the drafts; quicker than the mask of all tokens."""
        if self._allowed_tokens is not None and token not in self._allowed_tokens:
            return False
        if token in self._ending_tokens and len(generated) + len(drafted) < self._min_tokens:
            return False
        if self._bad_words and token in self._last_of_bad_words(generated, drafted):
            return False
        return self._states is None or self._states.at(generated, (*drafted, token)) is not None

    def forced(self, generated: Int[np.ndarray, " t"], drafted: Sequence[int]) -> list[list[int]]:
        """Ways to write the text that the constraint leaves next, each cut before the first token that is forbidden."""
        if self._constraint is None or self._states is None:
            return []
        state, out = self._states.at(generated, drafted), list[list[int]]()
        for tokens in () if state is None else self._constraint.forced(state):
            if allowed := self.allowed_prefix(generated, drafted, tokens):
                out.append(allowed)
        return out

    def allowed_prefix(
        self, generated: Int[np.ndarray, " t"], drafted: Sequence[int], tokens: Sequence[int]
    ) -> list[int]:
        """The first of `tokens` that may follow the answer and the drafts, up to the end of the answer."""
        out = list[int]()
        for token in tokens:
            path = (*drafted, *out)
            if self.ends(generated, path) or not self.allows(generated, path, token):
                break
            out.append(token)
        return out

    def ends(self, generated: Int[np.ndarray, " t"], drafted: Sequence[int]) -> bool:
        """Whether the answer is over with the last of the drafts: it is an ending token, or completes the constraint;
        without drafts it is not.
        """
        return bool(drafted) and (drafted[-1] in self._ending_tokens or self.is_complete(generated, drafted))

    def is_complete(self, generated: Int[np.ndarray, " t"], following: Sequence[int] = ()) -> bool:
        """Whether the constraint allows no further token but an end-of-sequence token."""
        if self._constraint is None or self._states is None:
            return False
        state = self._states.at(generated, following)
        return state is not None and self._constraint.is_final(state)

    def _last_of_bad_words(self, generated: Int[np.ndarray, " t"], drafted: Sequence[int]) -> Iterator[int]:
        """Last tokens of the bad words whose other tokens end the text; the prompt does not count."""
        if not self._bad_words:
            return
        needed = self._longest_bad_word - 1
        text = (*generated[max(0, len(generated) - needed) :].tolist(), *drafted)
        for word in self._bad_words:
            if len(word) <= len(text) + 1 and text[len(text) + 1 - len(word) :] == word[:-1]:
                yield word[-1]
