"""One prompt answered by plain decoding and with drafts: both answers side by side, and what drafting gained."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from foretell.api import Answer, Model
from foretell.cli.batch import Batch
from foretell.cli.errors import print_error
from foretell.cli.interrupt import Interrupt
from foretell.cli.show import DraftHighlighter, coloured, print_status, summary_line
from foretell.engine.request import Update

if TYPE_CHECKING:
    from foretell.cli.prompts import PromptSpec
    from foretell.cli.setup import ModelSetup
    from foretell.engine.method import AnyMethod

_REFRESH_SECONDS = 0.1
_SIDE_BY_SIDE_WIDTH = 80
"""Columns of a terminal from which on the answers stand side by side."""


@dataclass(frozen=True)
class Comparison:
    """The same request, answered by plain and by speculative decoding."""

    plain: Answer
    speculative: Answer

    @property
    def identical(self) -> bool:
        """Whether both gave the same tokens."""
        return self.plain.tokens == self.speculative.tokens

    @property
    def speedup(self) -> float:
        """Tokens per second over those of plain decoding; 0 where an answer has a single token."""
        plain = self.plain.statistics.tokens_per_second
        return self.speculative.statistics.tokens_per_second / plain if plain else 0.0


class _Column:
    """An answer as it comes, with its pace."""

    def __init__(self, title: str, highlighter: DraftHighlighter) -> None:
        self.title, self.text, self._highlighter = title, Text(tab_size=4), highlighter
        self._tokens, self._started, self._seconds = 0, 0.0, 0.0

    @property
    def pace(self) -> str:
        """Tokens up to now, and the seconds from the first to the last of them."""
        return f"{self._tokens} tokens, {self._seconds:.1f} s"

    def write(self, update: Update) -> None:
        """Append the text of one update."""
        now = time.perf_counter()
        self._started = self._started or now
        self._seconds = now - self._started
        self._tokens += len(update.tokens)
        self.text.append_text(coloured(self._highlighter, update))


class _Display:
    """Two columns on a terminal, of which the last one grows; elsewhere nothing until an answer is complete."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._shown = console.is_terminal and console.width >= _SIDE_BY_SIDE_WIDTH
        self._columns: list[_Column] = []
        self._refreshed = 0.0

    def begin(self, column: _Column) -> None:
        """Add a column."""
        self._columns.append(column)

    def write(self, update: Update) -> None:
        """Write an update of the last column."""
        self._columns[-1].write(update)
        if self._shown and time.perf_counter() - self._refreshed > _REFRESH_SECONDS:
            self._live.start()
            self._live.update(self._table([column.pace for column in self._columns]), refresh=True)
            self._refreshed = time.perf_counter()

    def finish(self, answers: list[Answer]) -> None:
        """Leave the complete answers on the screen, each with a line below it; in a pipe, the last one alone."""
        self._live.stop()
        if not answers:
            return
        if self._shown:
            self._live.console.print(self._table([_footer(answer) for answer in answers]))
        else:
            print(answers[-1].text, flush=True)

    def _table(self, footers: list[str]) -> Table:
        table = Table(show_footer=True, expand=True)
        # A second answer may be missing after an error.
        for column, footer in zip(self._columns, footers, strict=False):
            table.add_column(column.title, footer, ratio=1, overflow="fold")
        table.add_row(*(column.text for column in self._columns))
        return table


def compare(setup: "ModelSetup", method: str, spec: "PromptSpec") -> int:
    """Answer a prompt by plain decoding, then by a method, and print both with the gain; returns the exit status.

    Raises:
        ValueError: the method is plain decoding; a method that keeps every bit changed the text.
    """
    plain, drafted = setup.other_method("autoregressive"), setup.shared_method(method)
    if drafted.name == plain.name:
        raise ValueError("--compare sets a method that drafts beside plain decoding; name one by --method")
    setup.inputs.require_used({drafted.name: drafted.inputs})
    warm_up(setup.model)
    display, answers = _Display(), list[Answer]()
    with Interrupt() as interrupt:
        for title, chosen in (("plain decoding", plain), (drafted.name, drafted)):
            batch = Batch(setup, setup.model.engine(chosen, rows=1), writer=display)
            display.begin(_Column(title, DraftHighlighter(setup.model.codec.detokenizer())))
            answers += [a.answer for a in batch.run([(1, spec)], interrupt)]
            if interrupt.requested or batch.errors:
                break
    display.finish(answers)
    for line in batch.errors:
        print_error(line.reason)
    if interrupt.requested:
        print_error("interrupted; nothing was compared")
        return 130
    if batch.errors:
        return 1
    comparison = Comparison(*answers)
    print_status(summary_line(answers[1:], 0.0))
    print_status(verdict(comparison, drafted))
    return 0


def warm_up(model: Model) -> None:
    """Read every weight once, so that the time of the first answer does not include it."""
    model.generate("Hello.", method="autoregressive", max_new_tokens=4)


def verdict(comparison: Comparison, method: "AnyMethod") -> Text:
    """What drafting gained, and whether the text is the same.

    Raises:
        ValueError: a method that keeps every bit of the text changed it.
    """
    speedup = comparison.speedup
    gain = f"{speedup:.2f} times plain decoding's speed" if speedup else "too few tokens to compare the speed"
    same = ("identical", "green") if comparison.identical else difference(comparison, method)
    return Text.assemble((gain, "bold"), " · ", same)


def difference(comparison: Comparison, method: "AnyMethod") -> str:
    """Why the texts are not identical; empty if they are.

    Raises:
        ValueError: a method that keeps every bit of the text changed it.
    """
    answer = comparison.speculative
    if comparison.identical:
        return ""
    # A request with one row is greedy, or it has a seed; both give one text where the acceptor keeps it.
    if answer.exact and method.accept.same_seed:
        raise ValueError(
            f"{method.name} changed the text, which it must not; please run `foretell verify {method.name}` and "
            "report its output"
        )
    if not answer.lossless:
        return "another text: the method is lossy"
    if not method.accept.same_seed:
        return "another sample of the same distribution"
    return "another text: equal up to rounding only, on this backend"


def _footer(answer: Answer) -> str:
    s = answer.statistics
    return f"{s.new_tokens} tokens, {s.decode_seconds:.1f} s, {s.tokens_per_pass:.2f} a pass"
