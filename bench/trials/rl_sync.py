"""Syncs of a 30B model by CUDA IPC between two processes of one GPU, and NCCL's handshake: checked, then timed.

    python bench/trials/rl_sync.py [--layers 48]

It needs an NVIDIA GPU with room for two copies of the weights (120 GB for 48 layers). The receiver is whorl's model of
Qwen3-30B-A3B's shape with random weights; the sender is a second process with tensors of its own. Prints a table, and
exits with 1 if a weight is not the sender's or a time is above the issue's limits.
"""

import argparse
import base64
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

from whorl import nn
from whorl.engine.weights import build
from whorl.engine.weights.update import Places, Update
from whorl.models.qwen3 import Qwen3
from whorl.rl.transfers.memory import IpcTransfer
from whorl.rl.transfers.tensors import announced

CUDA = torch.device("cuda", 0)
MOST_TIMES_A_COPY, MOST_SECONDS_ONE_BY_ONE = 1.3, 0.150


def config(layers: int) -> dict[str, Any]:
    """Qwen3-30B-A3B's."""
    return Qwen3.tiny(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    )


def sent(layers: int, *, is_fused: bool) -> dict[str, torch.Tensor]:
    """The sender's tensors by name. Experts that are sent one by one are parts of one tensor, as a trainer has them."""
    generator = torch.Generator(CUDA).manual_seed(1)
    model = build(config(layers), device="meta", dtype=torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for name, place in nn.destinations(model).items():
        if ".experts." not in name:
            tensors[name] = torch.empty(place.shape, dtype=torch.bfloat16, device=CUDA).normal_(generator=generator)
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate_up = torch.empty(128, 1536, 2048, dtype=torch.bfloat16, device=CUDA).normal_(generator=generator)
        down = torch.empty(128, 2048, 768, dtype=torch.bfloat16, device=CUDA).normal_(generator=generator)
        if is_fused:
            tensors |= {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": down}
            continue
        for expert in range(128):
            tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate_up[expert, :768]
            tensors[f"{prefix}.{expert}.up_proj.weight"] = gate_up[expert, 768:]
            tensors[f"{prefix}.{expert}.down_proj.weight"] = down[expert]
    return tensors


def sender(layers: int, is_fused: bool, pipe: Any) -> None:
    tensors = sent(layers, is_fused=is_fused)
    uuid = str(torch.cuda.get_device_properties(CUDA).uuid)
    handles = [{uuid: reduce_tensor(tensor)[1]} for tensor in tensors.values()]
    info = {
        "names": list(tensors),
        "dtype_names": ["bfloat16"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }
    torch.cuda.synchronize()
    pipe.send(json.dumps({"update_info": info}))
    pipe.send(
        {name: float(tensor.float().sum()) for name, tensor in list(tensors.items())[:: max(1, len(tensors) // 50)]}
    )
    pipe.recv()  # until the receiver is done


def timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def sync(model: Any, places: Places, body: str, phases: dict[str, float]) -> None:
    """What the server does from the body of /update_weights to the end of the update."""
    began = time.perf_counter()
    info = json.loads(body)["update_info"]
    tensors = announced(info)
    update = Update(places)
    update.check({tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors})
    phases["parse and check"] = time.perf_counter() - began
    for batch in IpcTransfer(CUDA, packed=False).receive(info):
        phases["open handles"] = time.perf_counter() - began
        update.copy(batch)
    update.finish()
    torch.cuda.synchronize()
    phases["all"] = time.perf_counter() - began


def trial(layers: int, *, is_fused: bool) -> dict[str, Any]:
    """Run one sender against one receiver; return times in seconds, and whether the weights came."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=sender, args=(layers, is_fused, there))
    process.start()
    model = build(config(layers), device=CUDA, dtype=torch.bfloat16)
    places = Places(model)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    body, sums = here.recv(), here.recv()
    times: list[float] = []
    phases: dict[str, float] = {}
    for _ in range(4):
        times.append(timed(lambda: sync(model, places, body, phases)))
    copies = nn.destinations(model) | places.destinations
    now = {name: float(copies[name].into.float().sum()) for name in sums}
    is_right = all(abs(now[name] - total) <= 1e-3 * (1 + abs(total)) for name, total in sums.items())
    here.send("done")
    process.join(60)
    result = {"tensors": len(json.loads(body)["update_info"]["names"]), "GB": num_bytes / 1e9, "is_right": is_right}
    return result | {"first": times[0], "best": min(times[1:]), "copy": copy_seconds(num_bytes), "phases": phases}


def copy_seconds(num_bytes: int) -> float:
    """How long a copy of so many bytes takes, from one of 4 GB."""
    size = 4_000_000_000
    source, target = (torch.empty(size, dtype=torch.uint8, device=CUDA) for _ in range(2))
    return min(timed(lambda: target.copy_(source)) for _ in range(5)) * num_bytes / size


def nccl() -> str:
    """Join a group of one: the library loads, the id is read, the first all-reduce runs."""
    import ctypes

    from whorl.rl.transfers.nccl import Communicator, _library, _UniqueId

    unique = _UniqueId()
    assert _library().ncclGetUniqueId(ctypes.byref(unique)) == 0
    communicator = Communicator(bytes(unique), 0, 1, CUDA, 30.0)
    tensor = torch.arange(1000, device=CUDA)
    communicator.broadcast(tensor)
    communicator.close()
    return "nccl: a group of one joins and broadcasts"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    options = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")  # CUDA IPC needs plain segments
    print(torch.cuda.get_device_name(), torch.__version__)
    print(nccl())
    is_good = True
    for is_fused in (True, False):
        result = trial(options.layers, is_fused=is_fused)
        torch.cuda.empty_cache()
        limit = MOST_TIMES_A_COPY * result["copy"] if is_fused else MOST_SECONDS_ONE_BY_ONE
        is_good &= result["is_right"] and result["best"] <= limit
        print(
            f"{'fused' if is_fused else 'one by one'}: {result['tensors']} tensors, {result['GB']:.1f} GB: first "
            f"{1000 * result['first']:.0f} ms, then {1000 * result['best']:.1f} ms; a copy of the bytes "
            f"{1000 * result['copy']:.1f} ms; limit {1000 * limit:.1f} ms; right: {result['is_right']}; phases "
            + ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in result["phases"].items())
        )
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
