"""The commands of the command line: a table here, and those that other packages add.

An entry point of the group `foretell.commands` names a sequence of `Command`. `foretell.lab` registers its commands in
this way, and so can any other package.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

ENTRY_POINTS = "foretell.commands"


@dataclass(frozen=True)
class Command:
    """A command, or a command of a group where `name` has two words, such as `train free`.

    `module` is imported when the command is called. A command: the module holds a typer application named `app`, of one
    command or several. A command of a group: it holds a function of the last word's name; `summary` is not read.
    """

    name: str
    module: str
    summary: str = ""
    panel: str = "Commands"
    """Heading of the help."""

    @property
    def is_of_group(self) -> bool:
        """Whether it is a command of a group."""
        return " " in self.name

    def function(self) -> Callable[..., None]:
        """The function of a command of a group."""
        function: Callable[..., None] = getattr(import_module(self.module), self.name.split()[-1])
        return function


COMMANDS: Sequence[Command] = (
    Command("demo", "foretell.cli.demo", "Answer three prompts by plain and by speculative decoding, and compare."),
    Command("generate", "foretell.cli.generate", "Answer a prompt, or a file of prompts, with any decoding method."),
    Command("chat", "foretell.cli.chat", "Chat with a model in the terminal."),
    Command("serve", "foretell.cli.serve", "Serve a model over HTTP with OpenAI's API."),
    Command("top", "foretell.cli.top", "Watch a running server in the terminal."),
    Command("inspect", "foretell.cli.inspect", "Print what will be read of a model, without its weights."),
    Command("models", "foretell.cli.models", "List the models on this machine and the speculators that fit them."),
    Command("methods", "foretell.cli.methods", "List the decoding methods, or explain one of them."),
    Command("verify", "foretell.cli.verify", "Check on your model and machine that a method changes nothing."),
    Command("bench", "foretell.cli.bench", "Measure methods against plain decoding and other runtimes."),
    Command("data", "foretell.cli.data", "Generate training data: the model answers its own prompts, or given ones."),
    Command("train", "foretell.cli.train", "Train a speculator on a model's own answers."),
    Command("export", "foretell.cli.export", "Write a trained speculator in the format of another engine."),
    Command("datastore", "foretell.cli.datastore", "Index a corpus for retrieval (REST)."),
    Command("calibrate", "foretell.cli.calibrate", "Choose thresholds, placements and temperatures from data."),
    Command("cache", "foretell.cli.cache", "List or clear the packed weights that are kept for the next start."),
    Command("help", "foretell.cli.help", "Explain what commands share: dtype, methods, sampling."),
    Command("env", "foretell.cli.env", "Print processor, kernels, versions and paths: what a bug report needs."),
    Command("roofline", "foretell.cli.roofline", "Predict cost and speed-up without running a model."),
)
"""The engine's commands, in the order of the help; a new one is a line here and a file beside this one."""


@cache
def commands() -> Sequence[Command]:
    """All commands: the engine's, then those of entry points, which cannot replace one. A broken package is skipped."""
    known = {command.name: command for command in COMMANDS}
    for point in entry_points(group=ENTRY_POINTS):
        try:
            added = list(point.load())
        except Exception as error:  # A package can raise anything when it is imported.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            warnings.warn(f"the commands {point.value} of another package cannot be loaded ({reason})", stacklevel=2)
            continue
        for command in added:
            known.setdefault(command.name, command)
    return tuple(known.values())


def add_group_commands(app: Any, group: str, **settings: Any) -> tuple[str, ...]:
    """Add the commands of a group that other packages register to its typer application; returns their names."""
    added = [command for command in commands() if command.name.startswith(f"{group} ")]
    for command in added:
        app.command(command.name.split()[-1], **settings)(command.function())
    return tuple(command.name.split()[-1] for command in added)
