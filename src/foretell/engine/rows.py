"""The rows of the target's cache: which are free, and which tokens they hold for prompts that begin with the same."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from foretell.core.context import TokenBuffer, common_prefix
from foretell.engine.method import BoundMethod
from foretell.model.run.runner import Runner, copy_row, free_tokens, shares_prefixes

_MIN_AWAITED = 16
"""Tokens that another request must be about to read for a prompt to wait for them."""
_KEPT_ROWS = 256
"""Ended requests whose tokens are kept at most, where the memory of the cache is limited."""


@dataclass(frozen=True)
class _RowContent:
    """The sequence of a row's running or last request, and the method whose drafter has observed it."""

    sequence: TokenBuffer
    method: BoundMethod
    salt: str
    """The request's cache salt."""

    @property
    def tokens(self) -> Int[np.ndarray, " s"]:
        """The tokens that prompts may begin with: those whose keys a pass of all layers would give."""
        return self.sequence.tokens[: None if self.method.method.draft.exact_keys else self.sequence.prompt_length]


class RowPool:
    """Gives rows to requests, of which so many run at most.

    `prefix_caching`: a row keeps its tokens when its request ends. A prompt gets the row that holds the longest prefix
    of it, or, if that row is in use or holds much else, another row with a copy of the prefix. Where the memory of the
    cache is limited, there are rows for the tokens of many ended requests, and `evict` forgets the oldest. Requests of
    different cache salts share nothing.
    """

    def __init__(self, runner: Runner, running: int, prefix_caching: bool) -> None:
        self._runner, self._prefix_caching = runner, prefix_caching
        keeps_many = prefix_caching and shares_prefixes(runner) and free_tokens(runner) is not None
        rows = running + _KEPT_ROWS if keeps_many else running
        self._kept = rows - running
        self.free = list(range(rows))[::-1]
        self._contents = dict[int, _RowContent]()
        """Of the rows in use, and of the free rows that keep their tokens; among these the oldest first."""

    @property
    def available(self) -> bool:
        """Whether another request may run."""
        return len(self.free) > self._kept

    @property
    def unowned(self) -> int:
        """Rows that neither a request nor an ended one holds, with tokens in the cache: there must be none."""
        owned = set(self._contents)
        return sum(self._runner.length(row) > 0 for row in list(self.free) if row not in owned)

    def evict(self) -> bool:
        """Forget the tokens of the request that ended first; returns whether there was one."""
        row = next((row for row in self._contents if row in self.free), None)
        if row is not None:
            self._forget(row, self._contents.pop(row))
        return row is not None

    def _forget(self, row: int, content: _RowContent) -> None:
        content.method.release(row)
        self._runner.truncate(row, 0)

    def allocate(
        self, sequence: TokenBuffer, method: BoundMethod, salt: str = "", reuses: bool = True
    ) -> tuple[int, int]:
        """Take a free row for a prompt; the row, and how many tokens of the prompt its cache holds already: none unless
        the prompt `reuses` prefixes.
        """
        source, length = self._find_prefix(sequence, method, salt) if reuses else (-1, 0)
        row = self._choose(source, length, method)
        self.free.remove(row)
        content = self._contents.get(source)
        before = self._contents.pop(row, None)
        if before is not None and (row != source or before.method is not method):
            before.method.release(row)
        length = self._take_prefix(row, source, length, method, content, sequence.prompt_length)
        if not length:
            method.release(row)
            self._runner.truncate(row, 0)
        self._contents[row] = _RowContent(sequence, method, salt)
        return row, length

    def release(self, row: int, keep: bool) -> None:
        """Free a row. `keep`: its tokens may be of use to a later request."""
        self.free.append(row)
        content = self._contents.pop(row)
        if keep and self._prefix_caching:
            self._contents[row] = content
        else:
            self._forget(row, content)

    def awaits(self, sequence: TokenBuffer, method: BoundMethod, salt: str = "") -> bool:
        """Whether a running request is about to read more of this prompt than any row holds yet."""
        if not self._prefix_caching or not shares_prefixes(self._runner):
            return False
        tokens = _reusable_tokens(sequence, method)
        coming = [
            common_prefix(content.sequence.tokens[: content.sequence.prompt_length], tokens) - 1
            for row, content in self._candidates(method, salt)
            if row not in self.free
        ]
        most = max(coming, default=0)
        return most >= _MIN_AWAITED and most - self._find_prefix(sequence, method, salt)[1] >= _MIN_AWAITED

    def _candidates(self, method: BoundMethod, salt: str) -> Iterator[tuple[int, _RowContent]]:
        """Rows whose tokens a request of this method and salt can use. Hidden states are kept by drafters alone: one
        that needs all of them uses rows that it has observed.
        """
        if self._prefix_caching:
            # A row of its own method goes before others with as long a prefix: its drafter has observed it.
            for row, content in sorted(self._contents.items(), key=lambda item: item[1].method is not method):
                usable = content.salt == salt and (row in self.free or shares_prefixes(self._runner))
                if usable and (content.method is method or not method.method.needs_own_rows):
                    yield row, content

    def _find_prefix(self, sequence: TokenBuffer, method: BoundMethod, salt: str) -> tuple[int, int]:
        """The row that holds the longest prefix of a prompt, and its length; -1 and 0: there is none."""
        best, tokens = (-1, 0), _reusable_tokens(sequence, method)
        for row, content in self._candidates(method, salt):
            # The last common token is read again: drafters need its hidden state, and the token after it may differ.
            common = common_prefix(content.tokens, tokens) - 1
            length = self._runner.restorable(row, common) if common > best[1] else 0
            if length > best[1]:
                best = row, length
        return best

    def _choose(self, source: int, length: int, method: BoundMethod) -> int:
        """The free row for a prompt that shares `length` tokens with row `source`: that row, unless it is in use, holds
        more other tokens than shared ones, or holds what the drafter of another method has observed; otherwise an empty
        row, or the oldest.
        """
        if source in self.free:
            other = self._contents[source].method
            is_observed = self._kept > 0 and other is not method and bool(other.method.draft.hidden_layers)
            fits = 2 * length >= self._runner.length(source) and not is_observed
            if fits or not shares_prefixes(self._runner):
                return source
        empty = [row for row in reversed(self.free) if row not in self._contents]
        oldest = [row for row in self._contents if row in self.free and row != source]
        return next(iter(empty + oldest), source)

    def _take_prefix(
        self,
        row: int,
        source: int,
        length: int,
        method: BoundMethod,
        content: _RowContent | None,
        prompt_length: int,
    ) -> int:
        """Keep the first tokens of `source`, which holds `content`, in `row`: `length`, or as many as returned."""
        if not length or content is None:
            return 0
        has_observed = content.method is method
        if not has_observed:
            method.release(row)
        copies = row != source
        kept = method.take_prefix(source if has_observed else row, row, length, prompt_length)
        if copies:
            if source in self.free:
                self._contents[source] = self._contents.pop(source)  # it was of use: others are forgotten before it
            return kept if copy_row(self._runner, source, row, kept) else 0
        if self._runner.restorable(row, kept) < kept:
            return 0
        self._runner.truncate(row, kept)
        return kept


def _reusable_tokens(sequence: TokenBuffer, method: BoundMethod) -> Int[np.ndarray, " s"]:
    """The tokens of a waiting request that a row may hold already: all of a prompt. A request that goes on after a
    pause drafts after its last token at once, for which a drafter needs the hidden states at the one before.
    """
    is_resumed = len(sequence.generated) > 0 and bool(method.method.draft.hidden_layers)
    return sequence.tokens[:-1] if is_resumed else sequence.tokens
