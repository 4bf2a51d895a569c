"""Incremental detokenization and stop strings for streamed answers."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet


class Detokenizer:
    """Turns a growing list of tokens into text: the same text as that of all tokens decoded at once.

    Decodes a window of the last tokens. An incomplete character at the end is held back until it is complete. A run of
    `run_tokens`, whose text depends on the whole run, is held back until another token ends it.

    The `DecodeStream` of tokenizers (0.23) is not used: with byte fallback it shows bytes before their run ends, so
    that its text is not that of all tokens, or raises; and it does not give out what it holds back at the end.
    """

    _MOST_BEFORE = 8
    """Tokens of the text before it that are tried."""
    _MOST_HELD = 8
    """Tokens that are held back while they end with what may be an incomplete character."""
    _MOST_BYTES = 3
    """Of an incomplete character."""

    def __init__(self, decode: Callable[[Sequence[int]], str], run_tokens: AbstractSet[int] = frozenset()) -> None:
        self._decode, self._run_tokens = decode, run_tokens
        self._tokens: list[int] = []
        self._window_start = self._decoded = self._ended = 0
        """Where the window begins, up to where its text was passed on, and where the last run begins."""

    def follow(self, prompt: Sequence[int]) -> None:
        """Take the tokens for the continuation of a prompt: their first blank, which a decoder leaves out at the
        beginning of a text, is kept. Call it before the first `push`.
        """
        for count in range(1, min(len(prompt), self._MOST_BEFORE) + 1):
            before = list(prompt[-count:])
            text = self._decode(before)
            if text and not text.endswith("\ufffd"):
                self._tokens, self._decoded, self._ended = before, len(before), len(before)
                return

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._tokens.extend(tokens)
        for at in range(len(self._tokens) - len(tokens), len(self._tokens)):
            if self._tokens[at] not in self._run_tokens:
                self._ended = at + 1
        end = self._ended
        if end <= self._decoded:
            return ""
        known = self._decode(self._tokens[self._window_start : self._decoded])
        text = self._decode(self._tokens[self._window_start : end])
        if text.endswith("\ufffd"):
            end, text = self._complete(end, text)
        if len(text) <= len(known):
            return ""
        self._window_start, self._decoded = self._decoded, end
        return text[len(known) :]

    def _complete(self, end: int, text: str) -> tuple[int, str]:
        """The tokens, and their text, before what may be the beginning of a character, once many tokens are held back:
        they are no characters.
        """
        if end - self._decoded > self._MOST_HELD:
            last = end - self._MOST_BYTES
            for cut in range(last, last - self._MOST_BYTES, -1):
                part = self._decode(self._tokens[self._window_start : cut])
                if text.startswith(part):
                    return cut, part
        return end, ""

    def finish(self) -> str:
        """The text that was held back, complete or not."""
        known = self._decode(self._tokens[self._window_start : self._decoded])
        text = self._decode(self._tokens[self._window_start :])
        self._window_start = self._decoded = len(self._tokens)
        return text[len(known) :]


class StopStrings:
    """Ends streamed text before the first stop string, or after it with `include`; holds back text that may be the
    beginning of one.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops, self._include = [s for s in stops if s], include
        self._held = ""

    @property
    def active(self) -> bool:
        """Whether there is any stop string."""
        return bool(self._stops)

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be shown now, and the stop string that was found; of those that begin at the same place,
        the shortest.
        """
        if not self._stops:
            return text, None
        self._held += text
        hits = [(i, len(s), s) for s in self._stops if (i := self._held.find(s)) >= 0]
        if hits:
            start, length, stop = min(hits)
            shown, self._held = self._held[: start + length * self._include], ""
            return shown, stop
        held_back = max(
            (k for s in self._stops for k in range(1, min(len(s), len(self._held) + 1)) if self._held.endswith(s[:k])),
            default=0,
        )
        end = len(self._held) - held_back
        shown, self._held = self._held[:end], self._held[end:]
        return shown, None

    def finish(self) -> str:
        """The text that was held back: it was not a stop string."""
        text, self._held = self._held, ""
        return text
