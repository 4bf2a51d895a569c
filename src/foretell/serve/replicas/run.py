"""Serves replicas on this machine: the gateway in this process, Ray and the replicas beside it."""

from collections.abc import Callable

from foretell.serve.replicas.engine import ReplicaPlan
from foretell.serve.replicas.gateway import Gateway
from foretell.serve.replicas.handle import RayReplicas
from foretell.serve.replicas.local import LocalCluster
from foretell.serve.run import Address, serve


def serve_replicas(plan: ReplicaPlan, address: Address, announce: Callable[[str, str], None]) -> None:
    """Serve until a signal. `announce` is called with what is served and the URL once the replicas are ready.

    Raises:
        ValueError: the address cannot be used, or a replica cannot load the model.
    """
    replicas = RayReplicas(LocalCluster(plan))
    gateway = Gateway(plan.settings, replicas)
    serve(gateway.app, gateway, address, lambda url: announce(f"{replicas.about}, replicas: {plan.replicas}", url))
