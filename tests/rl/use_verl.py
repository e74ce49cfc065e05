"""verl's own classes with whorl as their rollout, on Ray: `use_verl.py FOLDER`. Prints what they returned, as JSON.

The GPUs are a resource of that name, which no process uses. verl's trainer of PPO needs real ones; what stands in for
it is a worker of verl's that has weights and sends them when verl's checkpoint manager says so.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import verl
from hydra import compose, initialize_config_dir
from omegaconf import open_dict
from safetensors.torch import load_file
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import get_rollout_replica_class

PROMPTS = [[70, 71, 72, 73], list(range(60, 90))]


class Trainer(Worker):
    """What of `ActorRolloutRefWorker` sends weights. step n has the file n of the folder."""

    def __init__(self, folder: str, rollout_config: Any, model_config: Any) -> None:
        super().__init__()
        self.folder = folder
        self.rollout = get_rollout_class("whorl")(rollout_config, model_config, None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str = "auto", **more: Any) -> int:
        num = 0

        def tensors() -> Any:
            nonlocal num
            for pair in load_file(f"{self.folder}/steps/{global_steps}.safetensors").items():
                num += 1
                yield pair

        await self.rollout.resume(tags=["weights"])
        await self.rollout.update_weights(tensors(), global_steps=global_steps, **more)
        await self.rollout.resume(tags=["kv_cache"])
        return num


def config_of(folder: str, transfer: str) -> Any:
    path = str(Path(verl.__file__).parent / "trainer" / "config")
    rollout = "actor_rollout_ref.rollout"
    overrides = {
        "actor_rollout_ref.model.path": f"{folder}/model",
        f"{rollout}.name": "whorl",
        f"{rollout}.dtype": "float32",
        f"{rollout}.tensor_model_parallel_size": 2,
        f"{rollout}.n_gpus_per_node": 2,
        f"{rollout}.prompt_length": 64,
        f"{rollout}.response_length": 512,
        f"{rollout}.max_num_seqs": 16,
        f"{rollout}.logprobs_mode": "raw_logprobs",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 1,
        f"+{rollout}.engine_kwargs.whorl.transfer": transfer,
        f"+{rollout}.engine_kwargs.whorl.num_blocks": 256,
        f"+{rollout}.engine_kwargs.whorl.block_size": 8,
        f"+{rollout}.engine_kwargs.whorl.tp_segments": 2,  # so that one rank has the bits of two
    }
    with initialize_config_dir(path, version_base=None):
        return compose("ppo_trainer", [f"{name}={value}" for name, value in overrides.items()])


def refusal(work: Any) -> str:
    try:
        ray.get(work)
    except Exception as error:
        return str(error).splitlines()[-1]
    return "nothing was refused"


async def sampled(client: Any, **params: Any) -> list[dict[str, Any]]:
    params = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "max_tokens": 12, "logprobs": True, "seed": 3} | params
    answers = [
        client.generate(f"r{i}", prompt_ids=prompt, sampling_params=params | {"ignore_eos": True})
        for i, prompt in enumerate(PROMPTS)
    ]
    return [answer.model_dump() for answer in await asyncio.gather(*answers)]


async def interrupted(replica: Any) -> dict[str, Any]:
    """A long request is aborted; one that comes then waits, and another is rejected."""
    server = replica.server_handle
    params = {"max_tokens": 500, "ignore_eos": True, "logprobs": True, "temperature": 1.0}
    running = server.generate.remote(PROMPTS[0], params, "long")
    await asyncio.sleep(0.5)
    await replica.abort_all_requests()
    aborted = await running
    parked = server.generate.remote(PROMPTS[0], params | {"max_tokens": 4}, "parked")
    await asyncio.sleep(0.3)
    waits = not ray.wait([parked], timeout=0)[0]
    await replica.abort_all_requests(reject_request=True)
    rejected = await server.generate.remote(PROMPTS[0], params, "late")
    await replica.resume_generation()
    return {
        "aborted": aborted.model_dump(),
        "waits": waits,
        "rejected": rejected.model_dump(),
        "parked": (await parked).model_dump(),
    }


async def hybrid(config: Any, folder: str) -> dict[str, Any]:
    """Trainer and server share their devices: verl's manager of servers, its client and its checkpoint manager."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    pool = RayResourcePool([2], use_gpu=True, max_colocate_count=1)
    trainer = RayClassWithInitArgs(ray.remote(Trainer), folder, rollout, model)
    group = RayWorkerGroup(pool, trainer, name_prefix="trainer")
    manager = await LLMServerManager.create(config, group)
    (replica,) = manager.get_replicas()
    client = manager.get_client()
    weights = CheckpointEngineManager(omega_conf_to_dataclass(rollout.checkpoint_engine), group, [replica])
    told: dict[str, Any] = {"replica": type(replica).__name__, "start": await sampled(client)}
    for step in (1, 2):
        await weights.sleep_replicas()
        await weights.update_weights(global_steps=step)
        told[f"step {step}"] = await sampled(client)
    told["greedy"] = await sampled(client, temperature=0)
    told["interrupted"] = await interrupted(replica)
    await replica.release_kv_cache()
    told["sent"] = ray.get(group.update_weights(global_steps=1))
    await replica.resume_kv_cache()
    told["again"] = await sampled(client)
    told["flush"] = refusal(group.update_weights(global_steps=1, wire_format="delta_flush"))
    told["adapter"] = refusal(group.update_weights(global_steps=1, peft_config={"r": 8}))
    for name, params in (("parameter", {"beam_width": 2}), ("n", {"n": 2})):
        told[name] = refusal(replica.server_handle.generate.remote(PROMPTS[0], params, "bad"))
    told["picture"] = refusal(replica.server_handle.generate.remote(PROMPTS[0], {}, "bad", image_data=["x"]))
    told["address"] = replica.server_address
    return told


async def standalone(config: Any) -> dict[str, Any]:
    """A server with devices of its own, beside verl's worker that receives weights. It does not sleep."""
    with open_dict(config):
        config.actor_rollout_ref.rollout.tensor_model_parallel_size = 1
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    replica = get_rollout_replica_class("whorl")(5, rollout, config.actor_rollout_ref.model, gpus_per_node=1)
    await replica.init_standalone()
    await replica.sleep()
    await replica.wake_up()
    params = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": True}
    answers = [await replica.server_handle.generate.remote(prompt, params, f"{prompt}") for prompt in PROMPTS]
    return {"answers": [answer.model_dump() for answer in answers], "workers": len(replica.workers)}


async def main(folder: str, transfer: str) -> dict[str, Any]:
    config = config_of(folder, transfer)
    told = {"class": str(get_rollout_class("whorl")), "replica": str(get_rollout_replica_class("whorl"))}
    return told | {"hybrid": await hybrid(config, folder), "standalone": await standalone(config)}


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # ports on the loopback interface alone
    ray.init(address="local", num_cpus=8, num_gpus=3, include_dashboard=False)
    try:
        print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2]))))
    finally:
        ray.shutdown()
