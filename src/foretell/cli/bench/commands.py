"""The table of the commands of `foretell bench`."""

from collections.abc import Callable, Mapping

from foretell.cli import options
from foretell.cli.bench.peers import install
from foretell.cli.bench.recording import record_, replay_
from foretell.cli.bench.results import compare_, report_, schema
from foretell.cli.bench.run import run
from foretell.cli.bench.serve import serve_
from foretell.cli.bench.soak import soak
from foretell.cli.bench.step import step
from foretell.cli.commands import add_group_commands
from foretell.cli.errors import ErrorReportingGroup

app = options.group(
    "Measure methods against plain decoding and against other runtimes, in one interleaved run.", ErrorReportingGroup
)
_COMMANDS: Mapping[str, Callable[..., None]] = {
    "step": step, "run": run, "record": record_, "replay": replay_, "serve": serve_, "soak": soak,
    "compare": compare_, "schema": schema, "report": report_,
}  # fmt: skip
_peers = options.group("Runtimes that bench run compares with.")
_peers.command("install")(install)
app.add_typer(_peers, name="peers")
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
add_group_commands(app, "bench")
