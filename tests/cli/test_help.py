"""Help: it fits narrow terminals without cutting a name, explains topics, and completes in shells."""

import sys
from collections.abc import Iterator

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from command import expect_error, run_foretell
from foretell.cli import app, main
from foretell.cli.commands import COMMANDS, commands

WIDTHS = (80, 100)


def help_of(width: int, *words: str) -> str:
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, [*words, "--help"])
    assert result.exit_code == 0, result.output
    return result.output


def leaves() -> Iterator[tuple[str, ...]]:
    """Every command that has options of its own."""
    for entry in commands():
        if entry.is_of_group:
            continue
        from importlib import import_module

        command = get_command(import_module(entry.module).app)
        inner = getattr(command, "commands", {})
        yield from ((entry.name, name) for name in inner) if inner else [(entry.name,)]


@pytest.mark.parametrize("words", list(leaves()), ids=" ".join)
def test_help_fits_the_terminal_and_cuts_no_option(words: tuple[str, ...]) -> None:
    options = None
    for width in WIDTHS:
        text = help_of(width, *words)
        assert all(len(line) <= width for line in text.splitlines()), text
        shown = {word.rstrip(",") for line in text.splitlines() for word in line.split() if word.startswith("--")}
        assert not any("…" in name for name in shown)
        options = options or shown
        assert shown == options


@pytest.mark.parametrize(("topic", "part"), [("dtype", "int8-activations"), ("methods", "hybrid_model")])
def test_a_topic_is_one_screen(topic: str, part: str) -> None:
    lines = run_foretell("help", topic).stdout.splitlines()
    assert part in "\n".join(lines) and len(lines) <= 24 and max(map(len, lines)) <= 100


def test_help_on_sampling_has_every_parameter() -> None:
    text = run_foretell("help", "sampling").stdout
    assert all(option in text for option in ("--temperature", "--min-p", "--stop-token-id"))


def test_help_on_a_command_is_its_own_help() -> None:
    explained, own = (run_foretell(*words).stdout.splitlines() for words in (("help", "top"), ("top", "--help")))
    assert explained[0] == "Usage: foretell top [OPTIONS] [URL]" and explained[1:] == own[1:]
    assert "topics" not in expect_error("help", "dtyp") and "'dtype'" in expect_error("help", "dtyp")


def test_every_summary_of_the_engine_has_chinese_which_the_option_or_the_locale_chooses() -> None:
    english, chinese = (CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--lang", name]).output for name in ("en", "zh"))
    by_locale = CliRunner(env={"COLUMNS": "200", "LC_ALL": "zh_CN.UTF-8"}).invoke(app, ["--help"]).output
    assert chinese == by_locale and help_of(200) == english
    assert "\n".join(c.summary for c in COMMANDS if c.summary in chinese or c.summary not in english) == ""
    assert all(c.name in chinese for c in COMMANDS)
    assert "found 'fr'" in expect_error("--lang", "fr", "help")


@pytest.mark.parametrize(
    ("words", "cursor", "completed"),
    [("foretell gen", 1, "generate"), ("foretell generate --comp", 2, "--compare"), ("foretell bench ru", 2, "run")],
)
def test_bash_completes_commands_and_options(
    words: str, cursor: int, completed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"_FORETELL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": cursor}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["foretell"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.split() == [completed]
