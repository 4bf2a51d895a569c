"""Ray Serve's side of the routing: which replica gets a request."""

from collections import defaultdict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from foretell.serve.replicas.messages import ForwardedRequest
from foretell.serve.replicas.prefixes import Prefix, PrefixIndex


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Routes requests with a known prefix to the replica that has read it, unless others have much less to do.

    Ray's own `PrefixCacheAffinityRouter` (2.60) asks an actor for every request, and waits for a replica that is full.
    """

    def initialize_state(self, most: float) -> None:
        """Called by Ray with `request_router_kwargs`; see `PrefixIndex`."""
        self._index: PrefixIndex[ReplicaID] = PrefixIndex(most)
        self._running: defaultdict[ReplicaID, set[str]] = defaultdict(set)
        """Requests by replica."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas, best first. Ray takes the first one that is not full."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        ranked = self._index.rank(_prefix(pending_request), {number: self._load(number) for number in by_id})
        return [[by_id[number]] for number in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has accepted a request."""
        self._running[replica_id].add(pending_request.metadata.internal_request_id)
        self._index.record(_prefix(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """An answer is over."""
        self._running[replica_id].discard(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica has died."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The set of replicas has changed."""
        super().update_replicas(replicas)
        for gone in self._running.keys() - {replica.replica_id for replica in replicas}:
            self._forget(gone)

    def _forget(self, replica: ReplicaID) -> None:
        self._running.pop(replica, None)
        self._index.forget(replica)

    def _load(self, replica: ReplicaID) -> int:
        """Requests of a replica. Ray's own count is there before the replica has accepted, but is forgotten in time."""
        return max(self.replica_queue_len_cache.get(replica) or 0, len(self._running[replica]))


def _prefix(pending: PendingRequest | None) -> Prefix:
    request = pending.args[0] if pending is not None and pending.args else None
    return request.prefix if isinstance(request, ForwardedRequest) else Prefix()
