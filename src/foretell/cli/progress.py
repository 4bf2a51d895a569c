"""Progress of long work on standard error: a bar on a terminal, and regular lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PROGRESS_INTERVAL = 30.0
"""Seconds between lines of progress where standard error is no terminal."""


@contextmanager
def progress(first: str) -> Iterator[Callable[[float, str], None]]:
    """A bar, or a line every `PROGRESS_INTERVAL`; the function that it yields takes the share that is done and a text.
    The bar begins with the text `first`.
    """
    console, last_line = Console(stderr=True), time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(first, total=1.0)

        def show(share: float, text: str) -> None:
            nonlocal last_line
            now = time.monotonic()
            bar.update(task, completed=share, description=text)
            if not console.is_terminal and now - last_line >= PROGRESS_INTERVAL:
                last_line = now
                console.print(text, highlight=False, markup=False, soft_wrap=True)

        yield show


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """The progress of so many items; the function that it yields counts one finished item and shows its name."""
    numbers = count(1)
    with progress("warming up") as show:
        yield lambda name: show((n := next(numbers)) / max(n, total), f"{n:,} of {total:,}: {name}")


class TimeLeft:
    """Estimates how long work still takes, from the share that is done since the first look."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def __call__(self, share: float) -> str:
        """The time left in minutes, once a share of the work was done since the first look; else an empty text."""
        now = time.monotonic()
        self._first = self._first or (now, share)
        start, first = self._first
        if share <= first:
            return ""
        return f"{(now - start) / (share - first) * max(0.0, 1 - share) / 60:,.0f} min left"
