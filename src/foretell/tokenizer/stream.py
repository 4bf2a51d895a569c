"""Incremental detokenization and stop strings: text that streams without splitting a character."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet


class Detokenizer:
    """Turns a growing list of tokens into text that never takes back a character and never splits one.

    Decodes a short window of tokens around the edge; a tail that is not yet a whole character is held until it is. A
    run of `run_tokens`, whose text depends on the whole run, is held until another token ends it. So the text is that
    of all tokens decoded at once, however many come at a time.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], run_tokens: AbstractSet[int] = frozenset()) -> None:
        self._decode, self._run_tokens = decode, run_tokens
        self._tokens: list[int] = []
        self._window_start = 0
        self._decoded = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens complete."""
        self._tokens.extend(tokens)
        end = len(self._tokens)
        while end > self._decoded and self._tokens[end - 1] in self._run_tokens:
            end -= 1
        if end == self._decoded:
            return ""
        known = self._decode(self._tokens[self._window_start : self._decoded])
        text = self._decode(self._tokens[self._window_start : end])
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return ""
        self._window_start, self._decoded = self._decoded, end
        return text[len(known) :]

    def finish(self) -> str:
        """What was held back, as it stands."""
        text = self._decode(self._tokens[self._window_start :])[
            len(self._decode(self._tokens[self._window_start : self._decoded])) :
        ]
        self._window_start = self._decoded = len(self._tokens)
        return text


class StopStrings:
    """Cuts streamed text at the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string was met."""
        if not self._stops:
            return text, False
        self._held += text
        hits = [i for i in (self._held.find(s) for s in self._stops) if i >= 0]
        if hits:
            shown, self._held = self._held[: min(hits)], ""
            return shown, True
        longest = max(
            (k for s in self._stops for k in range(1, len(s)) if self._held.endswith(s[:k])),
            default=0,
        )
        shown, self._held = self._held[: len(self._held) - longest], self._held[len(self._held) - longest :]
        return shown, False

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        text, self._held = self._held, ""
        return text
