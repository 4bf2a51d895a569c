"""Tables of `foretell bench` in the terminal."""

import pytest

from foretell.bench.console import print_sections, print_step_report
from foretell.bench.step import PassTiming, RatioGoal, StepReport
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


LONG = "share of a step outside the target pass, prompt lookup, batch 1"


@pytest.mark.parametrize("width", [80, 100])
def test_tables_of_a_step_break_between_words_only(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    names = "foretell bfloat16 tree", "transformers compiled bfloat16"
    passes = [
        PassTiming(competitor=name, tokens=n, median_ms=1000.5 + n, samples_ms=(1.0,), bytes=1e9)
        for name in names
        for n in (1, 2, 4, 8, 16, 32, 64)
    ]
    goals = [
        RatioGoal(name=name, value=1.827, goal=1.25, is_upper_bound=True)
        for name in (LONG, "chain of 8 over 1 token, bfloat16")
    ]
    report = StepReport(
        model="m", context=32, threads=2, bandwidth=6e9, machine={}, passes=tuple(passes), throughput=(),
        ratio_goals=tuple(goals),
    )  # fmt: skip
    print_step_report(report)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    words = [word for line in shown.splitlines() for cell in line.split("│") for word in cell.split()]
    wanted = {*LONG.split(), "1.827", "≤", "1.25", "missed", *" ".join(names).split()}
    assert wanted | {f"{1000.5 + n:.2f}" for n in (1, 2, 4, 8, 16, 32, 64)} <= set(words)
    assert all(f"n={n}" in shown for n in (1, 2, 4, 8, 16, 32, 64))


def test_columns_that_do_not_fit_follow_in_further_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    peers = [f"transformers-lookup-{n}/bfloat16" for n in range(4)]
    print_sections({"over": TextTable(("competitor", *peers), [("ngram/bfloat16", 1.5, 2.5, 3.5, 4.5)])})
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert all(name in shown for name in peers) and all(f"{n}.50" in shown for n in range(1, 5))
    assert shown.count("ngram/bfloat16") > 1
