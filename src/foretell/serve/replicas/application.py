"""The application of a Ray Serve config: gateways behind Ray's proxy, and the engines."""

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from foretell.serve.metrics.request_log import log_as_json
from foretell.serve.replicas.engine import ReplicaPlan, engine_deployment
from foretell.serve.replicas.gateway import Gateway
from foretell.serve.replicas.handle import OwnCluster, RayReplicas
from foretell.serve.settings import ServerSettings

NAME = "gateway"
MAX_ONGOING = 4096
"""Requests in a gateway; its own limits are lower, and their answer says when to come back."""


def _ingress() -> ASGIApp:
    """What Ray's proxy calls, made in every replica of the gateway."""

    without_gateway = Starlette()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # It begins before Ray knows the gateway, which has no need of it.
            await without_gateway(scope, receive, send)
            return
        await serve.get_replica_context().servable_object.gateway.app(scope, receive, send)

    return app


@serve.ingress(_ingress)
class GatewayReplica:
    """A gateway in a process of its own."""

    async def __init__(self, settings: ServerSettings, engines: DeploymentHandle) -> None:  # type: ignore[misc]
        log_as_json()
        cluster = OwnCluster(serve.get_replica_context().app_name, engines)
        self.gateway = Gateway(settings, RayReplicas(cluster))
        await self.gateway.start()


def application(plan: ReplicaPlan) -> serve.Application:
    """Gateway and engines."""
    deployment = serve.deployment(
        name=NAME,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=max(plan.settings.timeouts.shutdown, 1.0),
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
    )(GatewayReplica)
    return deployment.bind(plan.settings, engine_deployment(plan))
