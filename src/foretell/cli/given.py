"""Refuses options that a command line gives and that its command would not read."""

from collections.abc import Collection

import typer


def refuse_unused(ctx: typer.Context | None, parameters: Collection[str], reason: str, when: bool = True) -> None:
    """Refuse options that have no effect; `parameters`: their names in the function of the command. `ctx`: None where
    another command calls this function. `when`: whether they have none.

    Raises:
        ValueError: the command line gives one of them; the message names those that it gives, and the reason.
    """
    if ctx is None or not when:
        return
    given = [p.opts[0] for p in ctx.command.params if p.name in parameters and is_given(ctx, p.name)]
    if given:
        pronoun = "it" if len(given) == 1 else "them"
        raise ValueError(f"{', '.join(given)} would have no effect: {reason}; leave {pronoun} out")


def all_options(ctx: typer.Context, but: Collection[str]) -> dict[str, object]:
    """The values of all options and arguments of a command, defaults too, by their names; `but`: those left out."""
    return {p.opts[0]: ctx.params[p.name] for p in ctx.command.params if p.name in ctx.params and p.name not in but}


def is_given(ctx: typer.Context, parameter: str) -> bool:
    """Whether the command line gives this parameter, even if with its default value."""
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
