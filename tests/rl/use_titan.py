"""TorchTitan's router and weights with whorl's generator, under Monarch: `use_titan.py FOLDER`. Prints JSON.

Writes into the folder what a test needs to compute the answers again: the model as Hugging Face has it, and the
weights of each step. In place of TorchTitan's trainer and controller, which need GPUs and vLLM: an actor that puts
weights of TorchTitan's own model into torchstore, and the controller's calls in its order.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchstore
from monarch.actor import Actor, endpoint, this_host
from monarch.config import configure
from monarch.spmd import setup_torch_elastic_env_async
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torchtitan.experiments.rl.routing import InterGeneratorRouter
from torchtitan.models.qwen3 import model_registry

from whorl.rl.titan import KEY, WhorlGenerator, check_config, sampling_params

PROMPTS = [[70, 71, 72, 73], list(range(60, 90))]
STEPS = 3
LONG = 120  # tokens: ten times as many as of the other answers
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2047,
}


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """A double of the class in `actors.generator`, which imports vLLM."""

    temperature: float = 0.8
    top_p: float = 0.95
    max_tokens: int = 100
    seed: int | None = None
    stop_token_ids: list[int] | None = None


@dataclass(kw_only=True, slots=True)
class Config:
    """A double of `VLLMGenerator.Config`: the fields that whorl's generator reads."""

    model_dtype: str = "float32"
    gpu_memory_limit: float = 0.9
    max_num_batched_tokens: int | None = None
    reset_prefix_cache_on_weight_sync: bool = True
    reset_running_requests_on_weight_sync: bool = True
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    parallelism: Any = field(
        default_factory=lambda: SimpleNamespace(
            data_parallel_degree=1, tensor_parallel_degree=1, expert_parallel_degree=1
        )
    )
    override: Any = field(default_factory=lambda: SimpleNamespace(imports=[]))
    checkpoint: Any = field(default_factory=lambda: SimpleNamespace(enable=False))
    cudagraph: Any = field(default_factory=lambda: SimpleNamespace(enable=False))
    debug: Any = field(default_factory=lambda: SimpleNamespace(seed=1, enable_structured_logging=True))


def state_dict(step: int) -> dict[str, Any]:
    """The weights of a step, of TorchTitan's model."""
    with torch.device("meta"):
        model = model_registry("debugmodel").model.build()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


class Trainer(Actor):
    """What of `PolicyTrainer` pushes weights."""

    @endpoint
    async def get_policy_version(self) -> int:
        return 0

    @endpoint
    async def push_model_state_dict(self, step: int) -> None:
        await torchstore.put_state_dict(state_dict(step), KEY)


def write(folder: Path) -> None:
    """Write the model, with the weights of step 0, and those of the other steps."""
    spec = model_registry("debugmodel")
    adapter = spec.state_dict_adapter(spec.model, None)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    words = {str(number): number for number in range(CONFIG["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(folder / "model" / "tokenizer.json"))
    for step in range(STEPS):
        path = folder / "model" / "model.safetensors" if step == 0 else folder / f"{step}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in adapter.to_hf(state_dict(step)).items()}, path)


async def mesh() -> Any:
    procs = this_host().spawn_procs(per_host={"gpus": 1})
    await setup_torch_elastic_env_async(procs)
    return procs


async def answers(router: Any, prefix: str, **sampling: Any) -> list[dict[str, Any]]:
    config = SamplingConfig(**{"temperature": 1.0, "top_p": 1.0, "max_tokens": 12, "seed": 3} | sampling)
    completions = [
        router.generate.call_one(
            prompt,
            request_id=f"{prefix}/{i}",
            routing_session_id=f"{i}",
            sampling_config=config,
            metrics_prefix="generator",
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    return [told(await completion) for completion in completions]


def told(completion: Any) -> dict[str, Any]:
    names = ("min_policy_version", "max_policy_version", "request_id", "token_ids", "token_logprobs", "finish_reason")
    values = {name: getattr(completion, name) for name in names}
    return values | {"class": type(completion).__module__, "metrics": sorted({each.key for each in completion.metrics})}


async def refusal(call: Any) -> str:
    try:
        await call
    except Exception as error:
        return str(error)
    return "nothing was refused"


async def main(folder: Path) -> dict[str, Any]:
    write(folder)
    waits = dict.fromkeys(("host_spawn_ready_timeout", "mesh_proc_spawn_max_idle", "actor_spawn_max_idle"), "300s")
    configure(**waits)  # the machine may do other things as well
    trainer_mesh, generator_mesh, router_mesh = [await mesh() for _ in range(3)]
    trainer = trainer_mesh.spawn("trainer", Trainer)
    generator = generator_mesh.spawn(
        "generator",
        WhorlGenerator,
        Config(),
        model_spec=model_registry("debugmodel"),
        model_path=str(folder / "model"),
        compile_config=None,
        max_num_seqs=8,
        output_dir=str(folder),
    )
    router = router_mesh.spawn(
        "generator_router", InterGeneratorRouter, InterGeneratorRouter.Config(), generators=[generator]
    )
    await trainer.get_policy_version.call_one()  # it has imported torchstore, which two threads at once may not
    await torchstore.initialize(mesh=trainer_mesh, strategy=torchstore.LocalRankStrategy())
    early = await refusal(generator.pull_model_state_dict.call_one(0))
    await router.start_engine_loop.call_one()
    result: dict[str, Any] = {"early": early, "refused": refused()}
    for step in range(STEPS):
        await trainer.push_model_state_dict.call(step)
        await router.pull_model_state_dict.call_one(step)
        await router.sync_log_step.call_one(step)
        result[f"step {step}"] = await answers(router, f"step {step}")
    await trainer.push_model_state_dict.call(0)
    started = time.monotonic()
    await answers(router, "short")
    spanning = asyncio.create_task(answers(router, "long", max_tokens=LONG))
    await asyncio.sleep(time.monotonic() - started)
    await router.pull_model_state_dict.call_one(STEPS)
    result["spanning"] = await spanning
    result["greedy"] = await answers(router, "greedy", temperature=0.0)
    result["closed"] = [str(each) for each in await router.close_generators.call_one()]
    result["after"] = await refusal(answers(router, "late"))
    return result


def refused() -> dict[str, str]:
    """What the generator says of configurations that it cannot honour."""
    ranks = SimpleNamespace(data_parallel_degree=1, tensor_parallel_degree=2, expert_parallel_degree=1)
    other = make_dataclass("Other", ["max_tokens", "stop_token_ids", "top_k"])(8, None, 5)
    calls: dict[str, Callable[[], Any]] = {
        "tensor_parallel": lambda: check_config(Config(parallelism=ranks)),
        "prefix": lambda: check_config(Config(reset_prefix_cache_on_weight_sync=False)),
        "sampling": lambda: sampling_params(other, room=8),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)
    return messages


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))), flush=True)
    os._exit(0)  # Monarch's processes end with this one
