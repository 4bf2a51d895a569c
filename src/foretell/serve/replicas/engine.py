"""The deployment of Ray Serve that holds an engine."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from foretell.serve.app import engine_app
from foretell.serve.errors import ApiError
from foretell.serve.loaded import LoadedModel
from foretell.serve.metrics.request_log import log_as_json
from foretell.serve.replicas.messages import Answer, ForwardedRequest
from foretell.serve.replicas.outlet import run_app
from foretell.serve.replicas.router import PrefixRouter
from foretell.serve.service import Service
from foretell.serve.settings import ServerSettings

NAME = "engine"
PIECES_PER_SECOND = 250
"""Pieces of all answers that a replica sends at most. A piece costs Ray 0.9 ms of processor time on both sides
together (2.60, measured); answers that run together wait longer between two pieces instead.
"""
HEALTH_SECONDS = 2.0
HEALTH_TIMEOUT = 30.0
BACKOFF_SECONDS = (0.01, 0.1)
"""Between two attempts to find a replica that is not full: the first, and the longest."""
FAILURE = "the replica cannot serve: "
"""Begins the sentence of a replica that could not load its model."""


@dataclass(frozen=True)
class ReplicaPlan:
    """What every replica does. `load` is sent to the replicas: a function, or an object, of an importable module."""

    settings: ServerSettings
    load: Callable[[], LoadedModel]
    replicas: int
    threads: int = 1
    """CPU threads of a replica."""
    gpus: int = 0
    """GPUs of a replica."""
    restarts: int | None = None
    """How often a replica that cannot load its model is started again; None: as often as Ray does."""


class EngineReplica:
    """An engine in a process of its own, with the endpoints of a server."""

    async def __init__(self, plan: ReplicaPlan) -> None:  # type: ignore[misc]
        log_as_json()
        settings = replace(plan.settings, api_keys=(), cors_origins=())
        self._service = Service(settings, plan.load)
        try:
            await self._service.start()
        except (ValueError, OSError) as error:
            raise RuntimeError(FAILURE + " ".join(str(error).split())) from None
        while not self._service.ready:
            await asyncio.sleep(0.01)
        self._app = engine_app(self._service)
        self._answers = 0

    async def answer(self, request: ForwardedRequest) -> Answer:
        """Answer an HTTP request."""
        self._answers += 1
        try:
            async for part in run_app(self._app, request, lambda: self._answers / PIECES_PER_SECOND):
                yield part
        finally:
            self._answers -= 1

    async def metrics(self) -> tuple[int, bytes]:
        """The number of the replica, and its metrics in Prometheus' text format."""
        return serve.get_replica_context().rank.rank, self._service.metrics.text()

    async def about(self) -> str:
        """The fingerprint of model and arithmetic, and the default method."""
        return f"{self._service.loaded.fingerprint}, {self._service.loaded.methods.default}"

    async def check_health(self) -> None:
        """Called by Ray, which replaces a replica that fails three times: one whose engine hangs, for example."""
        try:
            self._service.check_ready()
        except ApiError as error:
            raise RuntimeError(error.message) from None


def engine_deployment(plan: ReplicaPlan) -> serve.Application:
    """The deployment of the engine."""
    rows = plan.settings.limits.max_num_seqs
    first, longest = BACKOFF_SECONDS
    options = {} if plan.restarts is None else {"max_constructor_retry_count": plan.restarts}
    deployment = serve.deployment(
        name=NAME,
        num_replicas=plan.replicas,
        # One batch that runs and one that waits: more would be lost with a replica, fewer would leave rows empty.
        max_ongoing_requests=2 * rows,
        ray_actor_options={"num_cpus": plan.threads, "num_gpus": plan.gpus},
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=max(plan.settings.timeouts.shutdown, 1.0),
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"most": math.ceil(rows / 2)},
            initial_backoff_s=first,
            max_backoff_s=longest,
        ),
        **options,
    )(EngineReplica)
    return deployment.bind(plan)
