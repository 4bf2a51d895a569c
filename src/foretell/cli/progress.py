"""Progress of long work on standard error: a bar on a terminal, and regular lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PROGRESS_INTERVAL = 30.0
"""Seconds between lines of progress where standard error is no terminal."""


@contextmanager
def progress_bar(total: int | None) -> Iterator[Callable[[str], None]]:
    """A bar, or a line every `PROGRESS_INTERVAL`; the function that it yields counts one finished item and shows its
    name.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    done, last_line = 0, time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("warming up", total=total)

        def count(name: str) -> None:
            nonlocal done, last_line
            done, now = done + 1, time.monotonic()
            bar.update(task, advance=1, description=name)
            if not console.is_terminal and now - last_line >= PROGRESS_INTERVAL:
                last_line = now
                of = "" if total is None else f" of {total:,}"
                console.print(f"{done:,}{of}: {name}", highlight=False, markup=False, soft_wrap=True)

        yield count


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
