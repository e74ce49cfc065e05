"""What TRL's clients import of vLLM, over gloo in place of NCCL: the version, addresses, and the sender of weights."""

import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed

__version__ = "0.31.0"
_WAIT = timedelta(seconds=60)
LLM = RequestOutput = SamplingParams = object  # TRL names them, and does not use them here


class StructuredOutputsParams:
    pass


def get_ip() -> str:
    return "127.0.0.1"


def get_open_port() -> int:
    with socket.socket() as probe:
        probe.bind((get_ip(), 0))
        return int(probe.getsockname()[1])


class Communicator:
    def __init__(self, host: str, port: int, size: int) -> None:
        store = distributed.TCPStore(
            host, port, size, is_master=True, timeout=_WAIT, wait_for_workers=False, use_libuv=False
        )
        self.group = SimpleNamespace(store=store, socket=None)
        self._gloo: Any = distributed.ProcessGroupGloo(distributed.PrefixStore("gloo", store), 0, size, _WAIT)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._gloo.broadcast([tensor], options).wait()


def trainer_init(info: dict[str, Any], rank: int = 0) -> Communicator:
    return Communicator(info["master_address"], info["master_port"], info["world_size"])


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, Tensor]],
    group: Communicator,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
    buffer_size_bytes: int = 1 << 30,
) -> None:
    rows: list[Tensor] = []
    for item in iterator:
        rows.append(post_iter_func(item).contiguous().view(-1).view(torch.uint8))
        if sum(row.numel() for row in rows) > buffer_size_bytes:
            group.broadcast(torch.cat(rows), src)
            rows = []
    if rows:
        group.broadcast(torch.cat(rows), src)


def _module(name: str, *functions: Any) -> None:
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []  # a package
    for function in functions:
        setattr(module, function.__name__, function)


for _name in ("utils", "distributed", "distributed.weight_transfer"):
    _module(f"vllm.{_name}")
_module("vllm.sampling_params", StructuredOutputsParams)
_module("vllm.utils.network_utils", get_ip, get_open_port)
_module("vllm.distributed.weight_transfer.nccl_common", trainer_init)
_module("vllm.distributed.weight_transfer.packed_tensor", packed_nccl_broadcast_producer)
