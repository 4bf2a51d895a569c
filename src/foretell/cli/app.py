"""`foretell`: the table of commands.

The module of a command is imported only when the command is called, so that help appears at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from foretell.cli.errors import report_errors


@dataclass(frozen=True)
class Command:
    """A command: `module` holds a typer application named `app`, of one command or several."""

    name: str
    module: str
    summary: str


COMMANDS: Sequence[Command] = (
    Command("demo", "foretell.cli.demo", "Answer three prompts by plain and by speculative decoding, and compare."),
    Command("generate", "foretell.cli.generate", "Answer a prompt, or a file of prompts, with any decoding method."),
    Command("chat", "foretell.cli.chat", "Chat with a model in the terminal."),
    Command("serve", "foretell.cli.serve", "Serve a model over HTTP with OpenAI's API."),
    Command("top", "foretell.cli.top", "Watch a running server in the terminal."),
    Command("methods", "foretell.cli.methods", "List the decoding methods, or explain one of them."),
    Command("verify", "foretell.cli.verify", "Check on your model and machine that a method changes nothing."),
    Command("reproduce", "foretell.cli.reproduce", "Check what the papers claim, on a model here."),
    Command("bench", "foretell.cli.bench", "Measure methods against plain decoding and other runtimes."),
    Command("data", "foretell.cli.data", "Generate training data: the model answers its own prompts, or given ones."),
    Command("train", "foretell.cli.train", "Train a speculator on a model's own answers."),
    Command("diffusion", "foretell.cli.diffusion", "Decode and measure masked diffusion models, such as LLaDA."),
    Command("nat", "foretell.cli.nat", "Sequence-to-sequence models that do not decode from left to right."),
    Command("export", "foretell.cli.export", "Write a trained speculator in the format of another engine."),
    Command("quantize", "foretell.cli.quantize", "Write a model with few bits per weight (RTN, GPTQ, AWQ, HQQ)."),
    Command("compress", "foretell.cli.compress", "Prune a model, lower its rank or drop blocks; write it with a card."),
    Command("evaluate", "foretell.cli.evaluate", "Compare a dtype with the model's exact numbers: KL and perplexity."),
    Command("assess", "foretell.cli.assess", "Report what a compression changed: fidelity, knowledge, robustness."),
    Command("datastore", "foretell.cli.datastore", "Index a corpus for retrieval (REST)."),
    Command(
        "calibrate",
        "foretell.cli.calibrate",
        "Choose thresholds, placements, draft heads and temperatures from data.",
    ),
    Command("tune", "foretell.cli.tune", "Search for settings of a method on your prompts."),
    Command("cache", "foretell.cli.cache", "List or clear the packed weights that are kept for the next start."),
    Command("env", "foretell.cli.env", "Print processor, kernels, versions and paths: what a bug report needs."),
    Command("roofline", "foretell.cli.roofline", "Predict cost and speed-up without running a model."),
)
"""Every command, in the order of the help; a new one is a line here and a file beside this one."""

_COMPLETION_OPTIONS = ("install_completion", "show_completion")
"""Options that typer adds to an application that is run alone."""


class CommandGroup(TyperGroup):
    """The commands of `COMMANDS`: help shows the table, calling a command imports its module."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command; no arguments at all means `--help`."""
        with report_errors():
            return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the placeholder of a command by the real one."""
        name, placeholder, rest = super().resolve_command(ctx, args)
        module = next((c.module for c in COMMANDS if placeholder is not None and c.name == name), None)
        if module is None:
            return name, placeholder, rest
        command = get_command(import_module(module).app)
        command.params = [p for p in command.params if p.name not in _COMPLETION_OPTIONS]
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error becomes one sentence."""
        with report_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=CommandGroup,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _placeholder() -> None:
    """Represents a command in the help; its module is not imported yet."""


for _command in COMMANDS:
    app.command(_command.name, help=_command.summary)(_placeholder)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"foretell {version('foretell')}")
        raise typer.Exit
    return wanted


@app.callback()
def main_options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding for open-weight language models.

    Try it with the embedded model, which needs no download:

        foretell generate "Why is the sky blue?" --method sam_recycling

        foretell verify sam_recycling        [dim]checks that the method changes nothing[/]
    """


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="foretell")
