"""What a command line of `foretell serve` asks for, and how it is run: in one process, or as replicas by Ray Serve."""

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from foretell.cli.served_model import ServedModel
from foretell.cli.setup import check_threads
from foretell.model.load.reference import resolve_reference
from foretell.model.load.split import Split
from foretell.serve.app import create_app
from foretell.serve.metrics.request_log import log_as_json
from foretell.serve.run import Address, serve
from foretell.serve.service import Service
from foretell.serve.settings import ServerSettings

if TYPE_CHECKING:
    from foretell.serve.replicas.engine import ReplicaPlan


@dataclass(frozen=True)
class ServePlan:
    """A server. `replicas`: engines in processes of their own; None: one engine in this process."""

    settings: ServerSettings
    served: ServedModel
    address: Address
    replicas: int | None

    def run(self) -> None:
        """Serve until a signal.

        Raises:
            ValueError: the address cannot be used, or the model cannot be loaded.
        """
        log_as_json()
        options = self.served.target_options
        if not Split(options.tensor_parallel, options.pipeline_parallel).leads:
            self.served.load()  # Runs its part of the model, and ends with the process that listens.
        elif self.replicas is None:
            self._run_here()
        else:
            self._run_replicas(self.replicas)

    def _run_here(self) -> None:
        service = Service(self.settings, self.served.load)

        def announce(url: str) -> None:
            loaded = service.loaded
            self._announce(f"{loaded.fingerprint}, {loaded.methods.default}", url)

        serve(create_app(service), service, self.address, announce)

    def _run_replicas(self, replicas: int) -> None:
        from foretell.serve.replicas.environment import prepare_environment

        processors = os.cpu_count() or 1
        threads = check_threads(self.served.threads or max(processors // replicas, 1))
        resolve_reference(self.served.model)  # A wrong name is told before Ray is started.
        prepare_environment()
        from foretell.serve.replicas.run import serve_replicas

        typer.echo(f"foretell: starting Ray; replicas: {replicas}, threads of each: {threads}", err=True)
        serve_replicas(self.replica_plan(replicas, threads, restarts=1), self.address, self._announce)

    def replica_plan(self, replicas: int, threads: int, restarts: int | None) -> "ReplicaPlan":
        """What every replica does. `threads`: of each; `restarts`: see `ReplicaPlan`."""
        from foretell.serve.replicas.engine import ReplicaPlan

        served = replace(self.served, threads=threads, sharing=replicas)
        return ReplicaPlan(self.settings, served.load, replicas, threads, int(served.device != "cpu"), restarts)

    def _announce(self, about: str, url: str) -> None:
        typer.echo(f"foretell: {self.settings.served_names[0]} ({about}) answers on {url}", err=True)
