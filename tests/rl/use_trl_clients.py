"""TRL's own clients, unchanged, against a server: `use_trl_clients.py URL`. The package vllm is a double.

Prints what they returned, as JSON.
"""

import json
import sys
from typing import Any

import torch
from trainer import changed, free_port, weights
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient
from trl.generation.vllm_client import VLLMClient


def classic(url: str) -> dict[str, Any]:
    """What GRPO, Online DPO and GOLD do in server mode."""
    client = VLLMClient(base_url=url, group_port=free_port())
    prompts = [[70, 71, 72], [73, 74]]
    sampling = {"n": 2, "temperature": 1.0, "max_tokens": 5, "generation_kwargs": {"seed": 1, "ignore_eos": True}}
    before = client.generate(prompts, **sampling)
    client.init_communicator(device=torch.device("cuda"))  # without an index nothing of CUDA is called
    module = torch.nn.Module()
    for name, tensor in changed(weights(), 5).items():
        parent, _, last = name.rpartition(".")
        where = module
        for part in parent.split("."):
            if not hasattr(where, part):
                where.add_module(part, torch.nn.Module())
            where = getattr(where, part)
        where.register_parameter(last, torch.nn.Parameter(tensor))
    client.update_model_params(module)
    client.reset_prefix_cache()
    after = client.generate(prompts, **sampling)
    with client.weight_update():
        for name, tensor in weights().items():
            client.update_named_param(name, tensor)
    return {
        "world_size": client.get_world_size(),
        "before": before,
        "after": after,
        "again": client.generate(prompts, **sampling),
        "regex": client.generate(["abc"], max_tokens=6, structured_outputs_regex="[xy]{3}"),
        "chat": client.chat([[{"role": "user", "content": "hi"}]], max_tokens=4, logprobs=2),
        "teacher": client.get_sequence_logprobs([[70, 71, 72, 73]], [2], top_logprobs=5),
    }


def asynchronous(url: str) -> dict[str, Any]:
    """What AsyncGRPO does, whose trainer needs FlashAttention 3 and two GPUs: its transfer, driven by hand."""
    client = AsyncClient(url)
    tensors = changed(weights(), 6)
    info = {
        "names": list(tensors),
        "dtype_names": ["float32"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    transfer = WeightTransferClient(client, info)
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter(tensors.items()))
    transfer.resume()
    transfer.destroy()
    return {
        "max_model_len": client.get_max_model_len(),
        "dtype": client.get_dtype(),
        "lora": client.get_server_info()["lora_config"],
    }


if __name__ == "__main__":
    from accelerate import PartialState

    PartialState(cpu=True)  # accelerate's logger wants it
    print(json.dumps({"classic": classic(sys.argv[1]), "async": asynchronous(sys.argv[1])}))
