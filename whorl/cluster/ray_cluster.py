"""Replicas as a deployment of Ray Serve: started, asked, replaced. Ray starts, watches and restarts them; how many
there are and where they run is its business."""

import asyncio
import importlib.util
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from whorl.engine.settings import EngineSettings
from whorl.serve.engine_thread import QueueFull
from whorl.serve.settings import ServerSettings

from .asked import Asked, Message, ReplicaLost
from .options import ClusterOptions
from .prompt_blocks import BLOCK
from .replica import Replica
from .routing import Routing, share

if TYPE_CHECKING:
    from fastapi import FastAPI

_LOG = logging.getLogger("whorl.serve")
APPLICATION, DEPLOYMENT = "whorl", "Replica"
_CHARACTERS = 4  # of a token, about
_LOADS = 3  # attempts to load a model before it is given up
_HEALTH_SECONDS = 5.0  # between questions to a replica
_ANSWER_SECONDS = 10.0  # for what every replica is asked at once
# What Ray calls the devices of a kind.
_RESOURCES = {"cuda": "GPU", "npu": "NPU"}


def need_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ValueError("serve: --on ray needs ray, which is not installed: pip install 'whorl[ray]'")


def _ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise RuntimeError(f"serve: ray has no Ray Serve ({error}): pip install 'whorl[ray]'") from error
    return serve


def actor_options(engine: EngineSettings, options: ClusterOptions, resources: Mapping[str, float]) -> dict[str, Any]:
    """What a replica takes of a node, as Ray counts it. resources: of the whole cluster."""
    ranks = engine.tp or 1
    known = [name for name in _RESOURCES.values() if resources.get(name)]
    name = next(iter(known), None) if engine.device is None else _RESOURCES.get(engine.device)
    if name is None:
        return {"num_cpus": options.replica_cpus or ranks}
    taken = {"num_gpus": ranks} if name == "GPU" else {"resources": {name: ranks}}
    return {"num_cpus": options.replica_cpus or 1, **taken}


def deployment_options(engine: EngineSettings, options: ClusterOptions, settings: ServerSettings) -> dict[str, Any]:
    """Of Ray Serve's deployment, but for what a replica takes of a node and the router."""
    at_once = engine.max_num_seqs
    found: dict[str, Any] = {
        "max_ongoing_requests": 2 * at_once,  # as many again, so that a step never waits for the next request
        "max_queued_requests": settings.max_queue,
        # One that is replaced finishes what it has.
        "graceful_shutdown_timeout_s": settings.timeout,
        "max_constructor_retry_count": _LOADS,
        "health_check_period_s": _HEALTH_SECONDS,
        "health_check_timeout_s": settings.stall_seconds,
    }
    if options.min_replicas is None:
        return found | {"num_replicas": options.start_with}
    scaling = {
        "min_replicas": options.min_replicas,
        "max_replicas": options.max_replicas,
        "initial_replicas": options.start_with,
        "target_ongoing_requests": max(1, at_once * 3 // 4),
    }
    return found | {"autoscaling_config": scaling}


class RayReplica(Replica):
    """In a process of Ray's."""

    def __init__(self, make: "Callable[[], FastAPI]", weights: int) -> None:
        _keep_port_to_this_machine()
        super().__init__(make, weights)

    async def named_metrics(self) -> tuple[str, str]:
        from ray.serve import get_replica_context

        return str(get_replica_context().replica_id.unique_id), await self.metrics()


def _keep_port_to_this_machine() -> None:
    """Ray Serve opens a port in every replica, for calls from one deployment to another: to all networks, and without
    asking who calls. Nobody calls ours."""
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", "127.0.0.1"))


class RayCluster:
    """`asked.Replicas`, on Ray. make: the application of one replica; it travels to where replicas run."""

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

    # ---- its life, from any thread but the event loop's

    def start(self) -> None:
        """A new cluster, or part of a running one; returns when every replica takes requests."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self._options.ray_address is None:
            # Its own ports, too, are then on the loopback interface alone, on any system. Read when Ray is imported,
            # which nothing may have done before.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        serve = _ray_serve()
        if self._options.ray_address is None:
            most = max(self._options.max_replicas or 0, self._options.start_with)
            cores = most * actor_options(self._engine, self._options, {}).get("num_cpus", 1)
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, cores),  # replicas on one machine share its cores
                include_dashboard=self._options.ray_dashboard,
                dashboard_host="127.0.0.1",
                logging_level=logging.WARNING,
            )
        else:
            ray.init(address=self._options.ray_address, logging_level=logging.WARNING)
        share(APPLICATION, self.routing)
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        serve.start(proxy_location="Disabled", logging_config=quiet)  # the endpoint is ours
        self._deploy()
        tokens = self._handle.broadcast("cached_tokens").results(timeout_s=_ANSWER_SECONDS)
        self.routing.held_blocks = max(1, min(tokens) * _CHARACTERS // BLOCK)

    def replace(self, make: "Callable[[], FastAPI] | None" = None) -> None:
        """Every replica by a new one, a few at a time, each when the one before takes requests.

        One that goes takes no more requests and finishes those it has.
        """
        self._make = make or self._make
        _LOG.info("replacing the replicas: weights %d", self.num_deployed + 1)
        self._deploy()
        _LOG.info("the replicas have been replaced: weights %d", self.num_deployed)

    def stop(self) -> None:
        """Of a cluster that was there before only our replicas go."""
        import ray
        from ray import serve

        if not ray.is_initialized():  # it never began
            return
        if self._options.ray_address is None:
            serve.shutdown()
        else:
            serve.delete(APPLICATION)
        ray.shutdown()

    def _deploy(self) -> None:
        import ray
        from ray import serve
        from ray.serve.config import RequestRouterConfig

        self.num_deployed += 1
        router = RequestRouterConfig(
            request_router_class="whorl.cluster.ray_router.PolicyRouter", request_router_kwargs={"name": APPLICATION}
        )
        taken = actor_options(self._engine, self._options, ray.cluster_resources())
        deployment = serve.deployment(
            RayReplica,
            name=DEPLOYMENT,
            ray_actor_options=taken,
            request_router_config=router,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
            **deployment_options(self._engine, self._options, self._settings),
        )
        target = deployment.bind(self._make, self.num_deployed)
        self._handle = serve.run(target, name=APPLICATION, route_prefix=None)

    # ---- on the event loop

    async def ask(self, asked: Asked) -> AsyncGenerator[Message, None]:
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError

        response = self._handle.options(stream=True, method_name="answer").remote(asked)
        try:
            async for message in response:
                yield message
        except RayActorError as error:
            name = self.routing.where(asked.number) or "that is not known"
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
        """Of those that answer in time."""
        results = self._handle.broadcast("named_metrics").results_async(
            timeout_s=_ANSWER_SECONDS, return_exceptions=True
        )
        return [found for found in await results if isinstance(found, tuple)]
