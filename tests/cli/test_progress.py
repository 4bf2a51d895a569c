"""Progress of long work where standard error is no terminal."""

import pytest

from foretell.cli.progress import progress_bar


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
