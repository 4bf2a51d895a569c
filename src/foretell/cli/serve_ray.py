"""The application that a Ray Serve config names: `import_path: foretell.cli.serve_ray:application`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer
from typer.main import get_command

from foretell.cli.serve import DEFAULT_REPLICAS, app
from foretell.cli.serve_plan import ServePlan

if TYPE_CHECKING:
    from ray.serve import Application

OF_RAY = ("ray", "host", "port", "uds", "ssl-certfile", "ssl-keyfile", "shutdown-timeout")
"""Options of `foretell serve` that the config of Ray Serve has in places of its own."""


def application(args: Mapping[str, Any]) -> "Application":
    """Gateway and engines. `args`: the options of `foretell serve` by their long names without dashes.

    Raises:
        ValueError: an option is unknown, wrong, or belongs elsewhere in the config.
    """
    from foretell.serve.replicas.application import application as build

    plan = read_plan(args)
    return build(plan.replica_plan(plan.replicas or DEFAULT_REPLICAS, plan.served.threads or 1, restarts=None))


def read_plan(args: Mapping[str, Any]) -> ServePlan:
    """The plan of a command line with these options.

    Raises:
        ValueError: see `application`.
    """
    if elsewhere := [name for name in args if name in OF_RAY]:
        raise ValueError(
            f"args of the application: {', '.join(elsewhere)} cannot be set there; the config of Ray Serve has "
            "http_options, and graceful_shutdown_timeout_s of a deployment"
        )
    plans = list[ServePlan]()
    try:
        # The address is Ray's, so that names of hosts are not limited unless `allowed-hosts` does.
        get_command(app)(["--ray", "--host=0.0.0.0", *_command_line(args)], standalone_mode=False, obj=plans.append)
    except typer.TyperException as error:
        raise ValueError(f"args of the application: {error.format_message()}") from error
    return plans[0]


def _command_line(args: Mapping[str, Any]) -> list[str]:
    line = list[str]()
    for name, value in args.items():
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        else:
            line += [f"--{name}={one}" for one in (value if isinstance(value, list) else [value])]
    return line
