"""Answers on the terminal: drafted tokens in colour as they stream, and what they cost in a closing line."""

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from foretell.api import Answer
from foretell.engine.engine import Update
from foretell.tokenizer.stream import Detokenizer

DRAFTED_STYLE = "green"
"""Colour of tokens that were drafted and accepted."""
PROGRESS_INTERVAL = 30.0
"""Between lines of progress where nobody watches a terminal."""
_CONTROL_CHARACTERS = {i: None for i in (*range(32), 127, *range(128, 160)) if chr(i) not in "\n\t"}


class DraftHighlighter:
    """Tells which characters of an answer were drafted.

    The engine's text stays as it is: it may come in other pieces than the tokens do (characters of several tokens,
    held-back stop strings), so each of its characters takes the origin of the token that completed it.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._drafted: list[bool] = []

    def segments(self, update: Update) -> Iterator[tuple[str, bool]]:
        """The update's text in runs of one origin, and whether each was drafted."""
        for i, token in enumerate(update.tokens):
            self._drafted += [i < update.accepted] * len(self._detokenizer.push([token]))
        known = self._drafted[: len(update.text)]
        del self._drafted[: len(update.text)]
        known += [False] * (len(update.text) - len(known))
        for drafted, run in groupby(zip(update.text, known, strict=True), key=lambda pair: pair[1]):
            yield "".join(character for character, _ in run), drafted


class AnswerWriter:
    """Writes an answer as it comes: coloured on a terminal, untouched anywhere else."""

    def __init__(self, painter: DraftHighlighter) -> None:
        self._highlighter, self._console = painter, Console(highlight=False, soft_wrap=True)
        self._plain = not self._console.is_terminal

    def write(self, update: Update) -> None:
        """Show one update."""
        if self._plain:
            sys.stdout.write(update.text)
            sys.stdout.flush()
            return
        for text, drafted in self._highlighter.segments(update):
            self._console.print(
                Text(text.translate(_CONTROL_CHARACTERS), style=DRAFTED_STYLE if drafted else "", tab_size=4), end=""
            )

    def finish(self) -> None:
        """Finish the line."""
        sys.stdout.write("\n")
        sys.stdout.flush()


def summary_line(answers: Sequence[Answer], seconds: float) -> Text:
    """One line on speed and method; `seconds` is the time that several answers took together."""
    if len(answers) == 1:
        rate = answers[0].statistics.tokens_per_second
    else:
        rate = sum(a.statistics.new_tokens for a in answers) / seconds if seconds else 0.0
    passes = sum(a.statistics.target_passes for a in answers)
    mean = sum(a.statistics.new_tokens for a in answers) / passes if passes else 0.0
    line = Text.assemble(
        (f"{rate:.1f} tokens/s", "bold"), f" · {mean:.2f} tokens per pass · {answers[0].method} · ", style="dim"
    )
    if len(answers) > 1:
        line = Text(f"{len(answers)} answers · ", style="dim") + line
    if answers[0].lossless:
        line.append("lossless" if answers[0].exact else "lossless up to rounding", "dim")
    else:
        line.append("LOSSY", "bold red not dim").append(f" · {_fidelity_loss(answers)}", "dim")
    return line.append(f" · {answers[0].backend}", "dim")


def _fidelity_loss(answers: Sequence[Answer]) -> str:
    """What a lossy method changed, per decided token."""
    prices = [a.statistics.fidelity for a in answers]
    tokens = max(1, sum(p.tokens for p in prices))
    changed = sum(p.changed for p in prices) / tokens
    variation = sum(p.variation for p in prices) / tokens
    divergence = sum(p.divergence for p in prices) / tokens
    return f"{changed:.0%} of tokens changed, total variation {variation:.3f}, KL {divergence:.3f} per token"


def print_status(line: Text) -> None:
    """A line on standard error, out of the way of the answer."""
    Console(file=sys.stderr, highlight=False, soft_wrap=True).print(line)
