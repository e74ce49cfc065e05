"""Runs the replicas as a deployment of Ray Serve, which starts, watches, places, scales and restarts them."""

import asyncio
import importlib.util
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from whorl.engine.settings import EngineSettings
from whorl.extras import how_to_install
from whorl.serve.engine_thread import QueueFull
from whorl.serve.settings import ServerSettings

from .forwarded import BLOCK, ForwardedRequest, Message, ReplicaLost
from .options import ClusterOptions
from .replica import Replica
from .routing import Routing, share

if TYPE_CHECKING:
    from fastapi import FastAPI

_LOG = logging.getLogger("whorl.serve")
APPLICATION, DEPLOYMENT = "whorl", "Replica"
_CHARACTERS = 4  # of a token, on average
_LOADS = 3  # attempts to start a replica, which loads the model
_HEALTH_SECONDS = 5.0  # between health checks of a replica
_ANSWER_SECONDS = 10.0  # for calls to all replicas
# Ray's resource names for kinds of devices.
_RESOURCES = {"cuda": "GPU", "npu": "NPU"}


def need_ray() -> None:
    """Raise ValueError when Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f"serve: --on ray needs ray, which is not installed: {how_to_install('ray')}")


def _ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise RuntimeError(f"serve: ray has no Ray Serve ({error}): {how_to_install('ray')}") from error
    return serve


def actor_options(engine: EngineSettings, options: ClusterOptions, resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the resources that a replica needs on its node, as Ray counts them. resources: of the whole cluster."""
    ranks = engine.num_ranks or 1
    known = [name for name in _RESOURCES.values() if resources.get(name)]
    name = next(iter(known), None) if engine.device is None else _RESOURCES.get(engine.device)
    if name is None:
        return {"num_cpus": options.replica_cpus or ranks}
    devices = {"num_gpus": ranks} if name == "GPU" else {"resources": {name: ranks}}
    return {"num_cpus": options.replica_cpus or 1, **devices}


def deployment_options(engine: EngineSettings, options: ClusterOptions, settings: ServerSettings) -> dict[str, Any]:
    """Return the options of Ray Serve's deployment, except for the replica's resources and the router."""
    at_once = engine.max_num_seqs
    deployment: dict[str, Any] = {
        "max_ongoing_requests": 2 * at_once,  # twice the batch, so that a finished sequence is replaced at once
        "max_queued_requests": settings.max_queue,
        # A replica that is being replaced finishes its requests.
        "graceful_shutdown_timeout_s": settings.timeout,
        "max_constructor_retry_count": _LOADS,
        "health_check_period_s": _HEALTH_SECONDS,
        "health_check_timeout_s": settings.stall_seconds,
    }
    if options.min_replicas is None:
        return deployment | {"num_replicas": options.start_with}
    scaling = {
        "min_replicas": options.min_replicas,
        "max_replicas": options.max_replicas,
        "initial_replicas": options.start_with,
        "target_ongoing_requests": max(1, at_once * 3 // 4),
    }
    return deployment | {"autoscaling_config": scaling}


class RayReplica(Replica):
    """A replica in a process of Ray."""

    def __init__(self, make: "Callable[[], FastAPI]", weights: int) -> None:
        _bind_grpc_port_to_loopback()
        super().__init__(make, weights)

    async def named_metrics(self) -> tuple[str, str]:
        """Return the replica's name and its metrics."""
        from ray.serve import get_replica_context

        return str(get_replica_context().replica_id.unique_id), await self.metrics()


def _bind_grpc_port_to_loopback() -> None:
    """Restrict the gRPC port that Ray Serve opens in every replica to this machine.

    The port is for calls between deployments. Ray opens it on all networks and without authentication; nothing here
    uses it.
    """
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", "127.0.0.1"))


class RayCluster:
    """Implements `forwarded.Replicas` on Ray.

    make: builds the application of one replica; Ray pickles it and calls it in the replica's process.
    """

    def __init__(
        self,
        make: "Callable[[], FastAPI]",
        *,
        engine: EngineSettings,
        options: ClusterOptions,
        settings: ServerSettings,
    ) -> None:
        self.routing = Routing(in_turn=options.routing == "round_robin")
        self.num_deployed = 0
        self._make, self._engine, self._options, self._settings = make, engine, options, settings
        self._handle: Any = None

    # ---- starting, replacing and stopping: called from any thread but the event loop's

    def start(self) -> None:
        """Start a cluster or join a running one, and deploy; returns when every replica takes requests."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self._options.ray_address is None:
            # Makes Ray bind its own ports to the loopback interface, on any system. Ray reads it when it is imported,
            # so nothing may have imported Ray before.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        serve = _ray_serve()
        if self._options.ray_address is None:
            most = max(self._options.max_replicas or 0, self._options.start_with)
            cores = most * actor_options(self._engine, self._options, {}).get("num_cpus", 1)
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, cores),  # replicas on one machine may share its cores
                include_dashboard=self._options.ray_dashboard,
                dashboard_host="127.0.0.1",
                logging_level=logging.WARNING,
            )
        else:
            ray.init(address=self._options.ray_address, logging_level=logging.WARNING)
        share(APPLICATION, self.routing)
        logging_config = {"log_level": "WARNING", "enable_access_log": False}
        serve.start(proxy_location="Disabled", logging_config=logging_config)  # our endpoint replaces Ray's proxy
        self._deploy()
        tokens = self._handle.broadcast("cached_tokens").results(timeout_s=_ANSWER_SECONDS)
        self.routing.held_blocks = max(1, min(tokens) * _CHARACTERS // BLOCK)

    def replace(self, make: "Callable[[], FastAPI] | None" = None) -> None:
        """Replace every replica by a new one, a few at a time, waiting until the new ones take requests.

        An old replica takes no more requests and finishes those it has. make: of the new replicas; None: as before.
        """
        self._make = make or self._make
        _LOG.info("replacing the replicas: weights %d", self.num_deployed + 1)
        self._deploy()
        _LOG.info("the replicas have been replaced: weights %d", self.num_deployed)

    def stop(self) -> None:
        """Stop the cluster; from a cluster that was running before, only remove our replicas."""
        import ray
        from ray import serve

        if not ray.is_initialized():  # `start` failed before it reached Ray
            return
        if self._options.ray_address is None:
            serve.shutdown()
        else:
            serve.delete(APPLICATION)
        ray.shutdown()

    def _deploy(self) -> None:
        """Deploy the present application; Ray replaces the replicas of an earlier deployment. Waits until they run."""
        import ray
        from ray import serve
        from ray.serve.config import RequestRouterConfig

        self.num_deployed += 1
        router = RequestRouterConfig(
            request_router_class="whorl.cluster.ray_router.PolicyRouter", request_router_kwargs={"name": APPLICATION}
        )
        resources = actor_options(self._engine, self._options, ray.cluster_resources())
        deployment = serve.deployment(
            RayReplica,
            name=DEPLOYMENT,
            ray_actor_options=resources,
            request_router_config=router,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
            **deployment_options(self._engine, self._options, self._settings),
        )
        target = deployment.bind(self._make, self.num_deployed)
        self._handle = serve.run(target, name=APPLICATION, route_prefix=None)

    # ---- on the event loop

    async def ask(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError

        response = self._handle.options(stream=True, method_name="answer").remote(request)
        try:
            async for message in response:
                yield message
        except RayActorError as error:
            name = self.routing.replica_of(request.attempt_id) or "(unknown)"
            raise ReplicaLost(f"replica {name} was lost") from error
        except BackPressureError as error:
            raise QueueFull(f"{self._settings.max_queue} requests wait already") from error
        finally:
            response.cancel()

    async def health(self) -> dict[str, int]:
        from ray import serve

        status = await asyncio.to_thread(serve.status)
        application = status.applications.get(APPLICATION)
        deployment = None if application is None else application.deployments.get(DEPLOYMENT)
        states = {} if deployment is None else deployment.replica_states
        return {str(getattr(state, "value", state)): count for state, count in states.items()}

    async def metrics(self) -> list[tuple[str, str]]:
        """Return the metrics of the replicas that answer in time."""
        results = self._handle.broadcast("named_metrics").results_async(
            timeout_s=_ANSWER_SECONDS, return_exceptions=True
        )
        return [result for result in await results if isinstance(result, tuple)]
