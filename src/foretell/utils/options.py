"""Settings whose fields are options of a command: what the command's help says of a field stands beside it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """The annotation of such a field. `name`: of the option where it is not that of the field, as --lr; `least`,
    `most`: bounds that the help shows.
    """

    help: str
    metavar: str | None = None
    name: str = ""
    least: float | None = None
    most: float | None = None
