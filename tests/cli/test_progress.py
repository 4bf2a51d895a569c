"""Progress of long work where standard error is no terminal."""

import pytest

from foretell.cli.progress import TimeLeft, progress_bar


def test_a_pipe_gets_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("foretell.cli.progress.time.monotonic", lambda: clock[0])
    with progress_bar(9) as count:
        for number in range(9):
            clock[0] += 20
            count(f"question {number}")
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [f"{n + 1} of 9: question {n}" for n in (1, 3, 5, 7)]
    assert shown.out == ""


def test_the_time_left_is_that_of_the_pace_since_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("foretell.cli.progress.time.monotonic", lambda: clock[0])
    left = TimeLeft()
    # Resumed at a half: the first ten minutes do a tenth of the whole.
    assert left(0.5) == ""
    clock[0] += 600
    assert left(0.6) == "40 min left"
    clock[0] += 2400
    assert left(1.0) == "0 min left"
