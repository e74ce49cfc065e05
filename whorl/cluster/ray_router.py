"""Ray Serve's interface to the routing policy.

Ray copies this module to every process that routes, so the state of the endpoint's process is in `routing`.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .forwarded import ForwardedRequest
from .routing import shared


class PolicyRouter(RequestRouter):
    """Routes by a `Routing`. Every request to a deployment with this router has a `ForwardedRequest` as argument."""

    def initialize_state(self, **options: Any) -> None:
        self._routing = shared(options["name"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._update_routing()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._update_routing()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return one group for each replica, the best first: Ray tries the next group if a replica is full."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        request = _forwarded_request(pending_request)
        order = [name for name in self._routing.order(request.blocks if request else ()) if name in by_name]
        if request is not None and order:
            # Assigned before Ray decides, so that simultaneous requests see each other's cost; `on_request_routed`
            # corrects it if Ray takes another replica.
            self._routing.assign(request.attempt_id, order[0], request.blocks)
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (request := _forwarded_request(pending_request)) is not None:
            self._routing.assign(request.attempt_id, replica_id.unique_id, request.blocks)

    def _update_routing(self) -> None:
        self._routing.set_replicas(replica_id.unique_id for replica_id in self.curr_replicas)


def _forwarded_request(pending: PendingRequest | None) -> ForwardedRequest | None:
    argument = pending.args[0] if pending is not None and pending.args else None
    return argument if isinstance(argument, ForwardedRequest) else None
