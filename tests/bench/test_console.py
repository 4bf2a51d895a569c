"""Tables of `foretell bench` in the terminal."""

import pytest

from foretell.bench.console import print_sections
from foretell.bench.text_table import TextTable


def test_headings_of_a_default_run_are_whole_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    header = ("competitor", "tokens per pass", "tokens/s", "speed-up", "identical")
    print_sections({"means": TextTable(header, [("autoregressive/int8-activations", 1.0, 91.14, 1.0, "24/24")])})
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert all(word in shown for word in (*header[2:], "autoregressive/int8-activations"))
