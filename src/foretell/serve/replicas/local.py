"""A cluster of Ray on this machine alone, which lives as long as this process."""

import asyncio
import logging
import os
import signal
import threading

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from foretell.serve.replicas.engine import FAILURE, NAME, ReplicaPlan, engine_deployment

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LocalCluster:
    """Starts Ray and the replicas. The environment has been prepared (`environment.py`) before Ray was imported."""

    application = "foretell"

    def __init__(self, plan: ReplicaPlan) -> None:
        self._plan = plan

    async def connect(self) -> DeploymentHandle:
        """Start them.

        Raises:
            ValueError: a replica cannot load its model.
        """
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        await asyncio.to_thread(self._start_ray)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray has replaced them by its own.
                signal.signal(number, handler)
        return await asyncio.to_thread(self._deploy)

    async def disconnect(self) -> None:
        """End them, also while they are being started."""
        await asyncio.to_thread(ray.shutdown)

    def _start_ray(self) -> None:
        plan = self._plan
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, plan.replicas * plan.threads),
            include_dashboard=False,
            logging_level=logging.ERROR,
        )
        logging.getLogger("ray.serve").setLevel(logging.WARNING)

    def _deploy(self) -> DeploymentHandle:
        # What goes wrong is reported by the gateway, in its own words.
        config = LoggingConfig(enable_access_log=False, log_level="CRITICAL")
        serve.start(proxy_location="Disabled", logging_config=config)
        try:
            return serve.run(
                engine_deployment(self._plan), name=self.application, route_prefix=None, logging_config=config
            )
        except RuntimeError as error:
            raise ValueError(self._reason(error)) from error

    def _reason(self, error: RuntimeError) -> str:
        """Why the replicas could not be started: Ray reports the traceback of a replica, which ends with it."""
        status = serve.status().applications.get(self.application)
        deployment = None if status is None else status.deployments.get(NAME)
        lines = (str(error) if deployment is None else deployment.message).splitlines()
        failure = next((line for line in reversed(lines) if FAILURE in line), "")
        return failure.partition(FAILURE)[2] or "the replicas could not be started: " + next(iter(lines), str(error))
