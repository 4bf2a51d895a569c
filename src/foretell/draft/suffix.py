"""Longest-suffix retrieval with suffix automata over the sequence and over reference documents, in amortised constant
time per token.
"""

from collections.abc import Iterable, Sequence

from foretell.core.context import Context, TokenBuffer
from foretell.draft.acceptance import Candidate, EstimatingRetriever

_PRIOR = (0.25, 0.4, 0.6, 0.7, 0.78, 0.82, 0.86, 0.9)
"""Prior acceptance rates, by the length of the match."""


class SuffixAutomaton:
    """All substrings of a growing sequence as a minimal automaton (Blumer et al. 1985), at most two states per token.

    `length[s]`: length of the longest substring of state `s`; `first_end[s]`: end of the first occurrence of its
    substrings.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.transitions: list[dict[int, int]] = [{}]
        self.link, self.length, self.first_end = [-1], [0], [-1]
        self._last = 0
        for token in tokens:
            self.extend(token)

    def extend(self, token: int) -> None:
        """Append a token, amortised O(1)."""
        self.tokens.append(token)
        new = self._state({}, 0, self.length[self._last] + 1, len(self.tokens) - 1)
        at = self._last
        while at >= 0 and token not in self.transitions[at]:
            self.transitions[at][token] = new
            at = self.link[at]
        if at >= 0:
            to = self.transitions[at][token]
            if self.length[to] == self.length[at] + 1:
                self.link[new] = to
            else:
                copy = self._state(dict(self.transitions[to]), self.link[to], self.length[at] + 1, self.first_end[to])
                while at >= 0 and self.transitions[at].get(token) == to:
                    self.transitions[at][token] = copy
                    at = self.link[at]
                self.link[to] = self.link[new] = copy
        self._last = new

    def _state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self.transitions.append(following)
        self.link.append(link)
        self.length.append(length)
        self.first_end.append(end)
        return len(self.transitions) - 1

    def advance(self, state: int, size: int, token: int) -> tuple[int, int]:
        """The state and length of the longest suffix of (match + `token`) that occurs, from the match (`state`,
        `size`).
        """
        while state >= 0 and token not in self.transitions[state]:
            state = self.link[state]
            size = self.length[state] if state >= 0 else 0
        if state < 0:
            return 0, 0
        return self.transitions[state][token], size + 1


class _Place:
    """The longest suffix of a sequence that occurs in an automaton: its state and its length."""

    def __init__(self) -> None:
        self.state, self.size = 0, 0


class SuffixRetriever(EstimatingRetriever):
    """Longest-suffix retrieval (SAM-Decoding, arXiv 2411.10666): the continuation of the first earlier occurrence of
    the longest suffix.

    Searches the sequence itself and `references`; the length of a reference match counts `bias` tokens less, since the
    sequence itself is the better predictor. At least `shortest` tokens must match; at most `copy` are proposed.
    """

    label = "longest suffix match (automaton)"

    def __init__(
        self,
        references: Sequence[Sequence[int]] = (),
        shortest: int = 1,
        copy: int = 24,
        bias: int = 2,
    ) -> None:
        if shortest < 1 or copy < 1:
            raise ValueError(f"suffix matching needs shortest and copy of at least 1, found {shortest} and {copy}")
        super().__init__(_PRIOR)
        self.shortest, self.copy, self.bias = shortest, copy, bias
        # Negative ids occur in no sequence: no match or continuation crosses a document's end.
        self._static = SuffixAutomaton(t for r in references for t in (*r, -1))
        self._own: dict[int, SuffixAutomaton] = {}
        self._places: dict[int, tuple[_Place, _Place]] = {}

    def _candidates(self, context: Context, i: int, budget: int) -> list[Candidate]:
        """Continuations of the longest match and the next shorter one, in the sequence and in the references."""
        row, most = context.rows[i], min(self.copy, budget, int(context.max_depth[i]))
        self._follow(row, context.sequences[i])
        return [(size - 1, tokens) for size, tokens in self._continuations(row, most)] if most > 0 else []

    def _follow(self, row: int, sequence: TokenBuffer) -> None:
        """Read the new tokens: match first, then extend, so that a match is always an earlier occurrence."""
        own = self._own.setdefault(row, SuffixAutomaton())
        mine, static = self._places.setdefault(row, (_Place(), _Place()))
        for token in sequence.tokens[len(own.tokens) :].tolist():
            mine.state, mine.size = own.advance(mine.state, mine.size, token)
            own.extend(token)
            static.state, static.size = self._static.advance(static.state, static.size, token)

    def _continuations(self, row: int, most: int) -> list[Candidate]:
        own, (mine, static) = self._own[row], self._places[row]
        continuations = list[Candidate]()
        for automaton, match, bias in ((own, mine, 0), (self._static, static, self.bias)):
            state, size = match.state, match.size
            for _ in range(2):
                if state <= 0 or size - bias < self.shortest:
                    break
                end = automaton.first_end[state]
                tokens = automaton.tokens[end + 1 : end + 1 + most]
                if -1 in tokens:
                    tokens = tokens[: tokens.index(-1)]
                if tokens and all(tuple(tokens[: len(t)]) != t for _, t in continuations):
                    continuations.append((size - bias, tuple(tokens)))
                state = automaton.link[state]
                size = automaton.length[state]
        return continuations

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        super().release(row)
        self._own.pop(row, None)
        self._places.pop(row, None)
