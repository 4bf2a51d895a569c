"""A progress bar for reading a long prompt."""

import sys
from threading import Timer

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foretell.engine.engine import Engine
from foretell.plan import PlanEngine

DELAY = 1.0
"""Seconds that a prompt is read before the bar appears."""


class PromptProgress:
    """Shows on standard error, if that is a terminal, how much of the prompts an engine has read."""

    def __init__(self, engine: Engine | PlanEngine, enabled: bool = True) -> None:
        self._engine, self._enabled = engine, enabled and sys.stderr.isatty()
        self._bar: Progress | None = None
        self._timer: Timer | None = None

    def __enter__(self) -> "PromptProgress":
        self.update()
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()

    def update(self) -> None:
        """Show what has been read since; call it after every step of the engine, before its text is printed."""
        if not self._enabled:
            return
        read, total = self._engine.prompt_progress
        if read == total:
            self._hide()
            return
        if self._bar is None:
            columns = TextColumn("[dim]reading the prompt"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=Console(file=sys.stderr), transient=True)
            self._bar.add_task("", total=total, completed=read)
            self._timer = Timer(DELAY, self._bar.start)
            self._timer.daemon = True
            self._timer.start()
        self._bar.update(self._bar.task_ids[0], completed=read, total=total)

    def _hide(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._timer = None
