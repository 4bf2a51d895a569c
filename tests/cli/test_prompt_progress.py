"""The progress bar of reading a prompt."""

import io
import sys
import time
from typing import Any

import pytest

from foretell.accept import Match
from foretell.cli import prompt_progress
from foretell.cli.interrupt import Interrupt, run_until_interrupt
from foretell.draft import NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import RootOnly
from foretell.testing import TINY, tiny_decoder


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


class SlowRunner(DecoderRunner):
    """Takes a while for every pass."""

    def forward(self, *args: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return super().forward(*args, **options)


def printed(monkeypatch: pytest.MonkeyPatch, prompts: int = 1, delay: float = 0.03) -> str:
    """What is on the terminal when prompts of 20 tokens have been read four by four, and answered."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(prompt_progress, "DELAY", delay)
    monkeypatch.setenv("TERM", "xterm")
    engine = Engine(SlowRunner(tiny_decoder(TINY)), Method(NoDrafter(), RootOnly(), Match()), rows=prompts, chunk=4)
    numbers = [engine.submit(Request([1] * 20, max_new_tokens=3)) for _ in range(prompts)]
    with Interrupt() as interrupt:
        updates = list(run_until_interrupt(engine, numbers, interrupt))
    assert sum(len(u.tokens) for u in updates) == 3 * prompts
    assert engine.prompt_progress == (0, 0)
    return terminal.getvalue()


def test_a_bar_shows_how_much_of_a_long_prompt_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = printed(monkeypatch)
    assert "reading the prompt" in shown and "/20" in shown


def test_short_prompts_and_several_prompts_have_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(monkeypatch, delay=60.0) == ""
    assert printed(monkeypatch, prompts=2) == ""


def test_progress_counts_the_tokens_of_prompts_alone() -> None:
    engine = Engine(DecoderRunner(tiny_decoder(TINY)), Method(NoDrafter(), RootOnly(), Match()), rows=2, chunk=4)
    engine.submit(Request([1] * 10, max_new_tokens=2))
    found = [engine.prompt_progress]
    while engine.busy:
        engine.step()
        found.append(engine.prompt_progress)
    assert found == [(0, 10), (4, 10), (8, 10), (0, 0), (0, 0)]
