"""`foretell roofline`: predicted cost of forward passes and speed-up of decoding methods."""

from collections.abc import Callable

import typer

from foretell.cli.errors import ErrorReportingGroup
from foretell.cli.roofline_calibration import calibrate_command
from foretell.cli.roofline_comparison import compare_command, published_command
from foretell.cli.roofline_load import load_command
from foretell.cli.roofline_page import export, view
from foretell.cli.roofline_plan import analyze_command, plan_command
from foretell.cli.roofline_tables import figure_command, hardware_command, models_command, table1_command

app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    help="Predict cost and speed-up from a model's configuration and a device's data sheet.",
    pretty_exceptions_enable=False,
)

_COMMANDS: dict[str, Callable[..., None]] = {
    "analyze": analyze_command,
    "plan": plan_command,
    "table1": table1_command,
    "figure": figure_command,
    "view": view,
    "export": export,
    "models": models_command,
    "hardware": hardware_command,
    "load": load_command,
    "published": published_command,
    "compare": compare_command,
    "calibrate": calibrate_command,
}
for name, command in _COMMANDS.items():
    app.command(name)(command)


if __name__ == "__main__":
    app(prog_name="foretell roofline")
