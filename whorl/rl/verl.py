"""verl: `actor_rollout_ref.rollout.name=whorl`. Its handle of a server in an actor of Ray, and the trainer's side.

verl finds this module by the entry point group `verl.plugins` and imports it, which registers two classes. They extend
verl's, and verl imports them by name. Weights come by whorl's own transfers, which Ray's calls announce: the HTTP
server beside the actor has none of the routes of `--rl`.
"""

import asyncio
import os
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.plugin.platform import get_platform
from verl.utils.device import get_resource_name
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from .senders import Sender, announcement, make_sender

NAME = "whorl"
_SECONDS = 300.0  # for the trainer and the server to meet


class Replica(RolloutReplica):
    """verl's handle of one `Server`, on the node of its workers."""

    async def launch_servers(self) -> None:
        """Start the server where the workers are, with their devices, and wait until it is ready."""
        from .verl_server import Server

        if self.nnodes > 1:
            raise ValueError(f"verl: a replica of whorl is on one node, and this one needs {self.nnodes}: lower its tp")
        places = await asyncio.gather(*[worker.__ray_call__.remote(_place) for worker in self.workers])
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        server = (
            ray.remote(Server)
            .options(
                name=f"{NAME}_server_{kind}{self.replica_rank}_0{self.name_suffix}",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=places[0][0], soft=False),
                runtime_env={"env_vars": dict.fromkeys(get_platform().ray_noset_envvars(), "1")},
                max_concurrency=self.max_concurrency,
            )
            .remote(
                self.config,
                self.model_config,
                self.rollout_mode,
                self.replica_rank,
                ",".join(device for _, device in places),
            )
        )
        self.servers, self._server_handle = [server], server
        self._server_address = await server.launch.remote()


def _place(worker: Any) -> tuple[str, str]:
    """Return the node of a worker and its device, in the worker's process."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]


class Rollout(BaseRollout):
    """The trainer's side, in every worker of a replica; the first one speaks with the server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank, size = int(os.environ["RANK"]), self.config.tensor_model_parallel_size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._handle: Any = None
        self._sender: Sender | None = None

    @property
    def _server(self) -> Any:
        if self._handle is None:  # it starts after its workers
            self._handle = ray.get_actor(f"{NAME}_server_{self.replica_rank}_0")
        return self._handle

    async def resume(self, tags: list[str]) -> None:
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server.wake_up.remote(tags)

    async def release(self) -> None:
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        base_sync_done: bool = True,
    ) -> None:
        """Send weights, by Hugging Face's names. Every worker must call this: iterating them gathers their shards."""
        if wire_format != "named_tensors":
            raise ValueError(f"verl: wire_format {wire_format!r} is not for whorl, expected 'named_tensors'")
        if peft_config is not None:
            raise ValueError("verl: whorl takes whole weights from a trainer: set model.lora.merge to True")
        if self.is_leader_rank:
            await self._begin()
        most, size = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20, 0
        batch: list[tuple[str, Tensor]] = []
        async for name, tensor in ensure_async_iterator(weights):
            if not self.is_leader_rank:
                continue
            if batch and size + tensor.nbytes > most:
                await self._send(batch)
                batch, size = [], 0
            batch.append((name, tensor.detach().clone()))  # the next one may come in the same memory
            size += tensor.nbytes
        if self.is_leader_rank:
            await self._send(batch)
            await self._server.finish_update.remote(None if global_steps is None else str(global_steps))

    async def _begin(self) -> None:
        if self._sender is None:
            sender = make_sender(await self._server.transfer.remote(), _SECONDS)
            met = self._server.join.remote(sender.init_info)
            await asyncio.to_thread(sender.join)
            await met
            self._sender = sender
        await self._server.begin_update.remote()

    async def _send(self, batch: list[tuple[str, Tensor]]) -> None:
        assert self._sender is not None
        received = self._server.receive.remote(announcement(batch) | self._sender.prepare(batch))
        try:
            await asyncio.to_thread(self._sender.send)
        except RuntimeError:  # the server has closed the group: its answer says why
            await received
            raise
        await received


RolloutReplicaRegistry.register(NAME, lambda: Replica)
_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{Rollout.__name__}"
