"""The text of a growing answer: detokenized token by token, up to the first stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.tokenizer.stream import Detokenizer, StopStrings


@dataclass(frozen=True)
class NewText:
    """Text that new tokens give."""

    count: int
    """How many of the tokens count: those after a stop string do not."""
    text: str
    """What may be shown."""
    stop: str | None = None
    """The stop string that ended it."""


class AnswerText:
    """Detokenizes an answer. Stop strings are looked for in the text of the tokens after the first `min_tokens`."""

    def __init__(self, detokenizer: Detokenizer | None, stop_strings: StopStrings, min_tokens: int) -> None:
        self._detokenizer, self._stop_strings = detokenizer, stop_strings
        self._min_tokens, self._count = min_tokens, 0

    def push(self, tokens: Sequence[int], hidden: int = 0) -> NewText:
        """The text of new tokens; that of the last `hidden` ones is not shown."""
        shown = tokens[: len(tokens) - hidden]
        if self._detokenizer is None or not self._stop_strings.active:
            self._count += len(tokens)
            return NewText(len(tokens), "" if self._detokenizer is None else self._detokenizer.push(shown))
        text = ""
        for count, token in enumerate(shown, 1):
            self._count += 1
            part, stop = self._search(self._detokenizer.push([token]))
            text += part
            if stop is not None:
                return NewText(count, text, stop)
        self._count += hidden
        return NewText(len(tokens), text)

    def finish(self) -> NewText:
        """The text held back so far."""
        if self._detokenizer is None:
            return NewText(0, "")
        text, stop = self._search(self._detokenizer.finish())
        return NewText(0, text if stop is not None else text + self._stop_strings.finish(), stop)

    def _search(self, text: str) -> tuple[str, str | None]:
        return (text, None) if self._count <= self._min_tokens > 0 else self._stop_strings.push(text)
