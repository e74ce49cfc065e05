"""The routing policy as Ray Serve asks for it. Needs Ray, which copies what is in this module to wherever it routes:
state of this process is in `routing`."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .asked import Asked
from .routing import shared


class PolicyRouter(RequestRouter):
    """Asks a `Routing`. Every request to a deployment with this router has an `Asked` as its argument."""

    def initialize_state(self, **options: Any) -> None:
        self._routing = shared(options["name"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each replica by itself, the best first: the next one is asked where it is full."""
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        asked = _asked(pending_request)
        order = [name for name in self._routing.order(asked.blocks if asked else ()) if name in by_name]
        if asked is not None and order:
            # At once, so that requests of the same moment see each other; `on_request_routed` sets it right.
            self._routing.sent(asked.number, order[0], asked.blocks)
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (asked := _asked(pending_request)) is not None:
            self._routing.sent(asked.number, replica_id.unique_id, asked.blocks)

    def _tell(self) -> None:
        self._routing.keep(each.unique_id for each in self.curr_replicas)


def _asked(pending: PendingRequest | None) -> Asked | None:
    found = pending.args[0] if pending is not None and pending.args else None
    return found if isinstance(found, Asked) else None
