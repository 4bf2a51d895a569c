"""The replicas of a deployment of Ray Serve, by its handle."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from foretell.serve.errors import overloaded, server_error
from foretell.serve.replicas.engine import NAME
from foretell.serve.replicas.messages import Answer, ForwardedRequest, Piece, ReplicaLostError

log = logging.getLogger(__name__)
LOST_ERRORS = (
    RayActorError, ActorUnavailableError, DeploymentUnavailableError, RequestCancelledError, TaskCancelledError
)  # fmt: skip
METRICS_SECONDS = 5.0
"""For all replicas to report their metrics."""


class Cluster(Protocol):
    """Where a deployment runs."""

    application: str

    async def connect(self) -> DeploymentHandle:
        """The handle of the engines, which run then.

        Raises:
            ValueError: they cannot be started.
        """

    async def disconnect(self) -> None:
        """End what `connect` has started."""


class OwnCluster:
    """The cluster that this process is a replica of, which starts and ends everything itself."""

    def __init__(self, application: str, engines: DeploymentHandle) -> None:
        self.application, self._engines = application, engines

    async def connect(self) -> DeploymentHandle:
        """The handle."""
        return self._engines

    async def disconnect(self) -> None:
        """Nothing is to be done."""


class RayReplicas:
    """Replicas of the engine in a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._handle: DeploymentHandle | None = None
        self.about = ""
        """What a replica serves: fingerprint and default method."""

    async def start(self) -> None:
        """See `Replicas.start`."""
        self._handle = await self._cluster.connect()
        self.about = await self._handle.about.remote()

    async def stop(self) -> None:
        """See `Replicas.stop`."""
        await self._cluster.disconnect()

    async def answer(self, request: ForwardedRequest) -> Answer:
        """See `Replicas.answer`."""
        response = self._connected.options(stream=True).answer.remote(request)
        over = False
        try:
            async for part in response:
                over = isinstance(part, Piece) and not part.more
                yield part
        except BackPressureError:
            raise overloaded("too many requests are waiting; try again later", 1) from None
        except LOST_ERRORS as error:
            over = True
            raise ReplicaLostError(" ".join(str(error).split())) from None
        except RayTaskError as error:
            over = True
            log.exception("a replica has failed")
            raise server_error("an error of the server; its log has more") from error
        finally:
            if not over:
                response.cancel()

    async def running(self) -> int:
        """See `Replicas.running`."""
        status = await asyncio.to_thread(serve.status)
        application = status.applications.get(self._cluster.application)
        deployment = None if application is None else application.deployments.get(NAME)
        return 0 if deployment is None else deployment.replica_states.get("RUNNING", 0)

    async def metrics(self) -> Sequence[tuple[int, bytes]]:
        """See `Replicas.metrics`; a replica that dies meanwhile is left out."""
        try:
            replies = await self._connected.broadcast("metrics").results_async(timeout_s=METRICS_SECONDS)
        except (*LOST_ERRORS, TimeoutError):
            return []
        return sorted(replies)

    @property
    def _connected(self) -> DeploymentHandle:
        assert self._handle is not None, "the replicas are not started"
        return self._handle
