"""`foretell`: the application of all commands.

The module of a command is imported only when the command is called, so that help appears at once.
"""

import os
import sys
from importlib import import_module
from importlib.metadata import version
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from foretell.cli.commands import commands
from foretell.cli.errors import report_errors
from foretell.cli.garbage import collect_seldom
from foretell.cli.language import choose, translated

_COMPLETION_OPTIONS = ("install_completion", "show_completion")
"""Options that typer adds to an application that is run alone."""


class CommandGroup(TyperGroup):
    """The commands of `commands()`: help shows the table, calling a command imports its module."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command; none, or the language alone, means `--help`."""
        choose(None)
        with report_errors():
            return super().parse_args(ctx, args if args and args[:-1] != ["--lang"] else [*args, "--help"])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the help in the language of this process."""
        self.help = "\n".join(_translated_line(line) for line in (getdoc(main_options) or "").splitlines())
        for command in commands():
            if not command.is_of_group:
                shown: Any = self.commands[command.name]
                shown.help, shown.rich_help_panel = translated(command.summary), translated(command.panel)
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the placeholder of a command by the real one."""
        name, placeholder, rest = super().resolve_command(ctx, args)
        module = next((c.module for c in commands() if placeholder is not None and c.name == name), None)
        if module is None:
            return name, placeholder, rest
        command = get_command(import_module(module).app)
        command.params = [p for p in command.params if p.name not in _COMPLETION_OPTIONS]
        _lay_out_help(command)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error becomes one sentence."""
        with report_errors():
            return super().invoke(ctx)


def _translated_line(line: str) -> str:
    """A line of help, of which the part that is no command has a translation."""
    before, mark, note = line.partition("[dim]")
    if mark:
        return f"{before}{mark}{translated(note.removesuffix('[/]'))}[/]"
    return line.replace(line.strip(), translated(line.strip())) if line.strip() else line


def _lay_out_help(command: Any) -> None:
    """Let commands print their options in two columns: rich's tables cut names in narrow terminals. Groups keep rich's
    list of commands, which breaks lines where the other one cuts them.
    """
    inner = getattr(command, "commands", {})
    if not inner:
        command.rich_markup_mode = None
    for member in inner.values():
        _lay_out_help(member)


app = typer.Typer(
    cls=CommandGroup,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _placeholder() -> None:
    """Represents a command in the help; its module is not imported yet."""


for _command in commands():
    if not _command.is_of_group:
        app.command(_command.name, help=_command.summary, rich_help_panel=_command.panel)(_placeholder)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"foretell {version('foretell')}")
        raise typer.Exit
    return wanted


def _choose_language(language: str | None) -> str | None:
    if language is not None:
        choose(language)
    return language


@app.callback()
def main_options(
    language: Annotated[
        str | None,
        typer.Option(
            "--lang",
            metavar="en|zh",
            callback=_choose_language,
            is_eager=True,
            help="Language of this list and of the demo; default: that of the locale.",
        ),
    ] = None,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding for open-weight language models.

    Try it with the embedded model, which needs no download:

        foretell generate "List the planets of the solar system." --compare

        foretell verify sam_recycling        [dim]checks that the method changes nothing[/]
    """


def main() -> None:
    """Entry point of the console script."""
    for name in "stdin", "stdout", "stderr":
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    if os.environ.get("COLUMNS") == "0":  # not known; rich would write nothing
        del os.environ["COLUMNS"]
    collect_seldom()
    app(prog_name="foretell")
