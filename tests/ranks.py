"""Several ranks on one machine: a test's function runs in processes of a gloo group, and none outlives its time.

The function is named "module:function" and gets its rank, the number of ranks and keyword arguments, which are JSON;
what it returns, JSON too, comes back in rank order.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run(function: str, world: int, timeout: float = 120, **arguments: Any) -> list[Any]:
    """What every rank's `function(rank, world, **arguments)` returns."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
    }
    command = [sys.executable, __file__, function, json.dumps(arguments), str(world)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    try:
        done = [process.communicate(timeout=timeout) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, (out, err)) in enumerate(zip(ranks, done, strict=True)):
        assert process.returncode == 0, f"rank {rank} of {function} failed:\n{out[-2000:]}\n{err[-6000:]}"
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def main(function: str, arguments: str, world: str, rank: str) -> None:
    import datetime

    import torch.distributed as dist

    dist.init_process_group("gloo", rank=int(rank), world_size=int(world), timeout=datetime.timedelta(seconds=60))
    module, name = function.split(":")
    found = getattr(importlib.import_module(module), name)(int(rank), int(world), **json.loads(arguments))
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
