"""`python -m bench.collectives`: collectives by tensor size and by the settings of NCCL, HCCL or gloo.

The library's all-reduce, all-gather and reduce-scatter are timed next to whorl's sum and gather in rank order. A
library reads its environment variables once, so every setting runs in new processes. Inputs are small whole numbers,
whose sums are exact in any order; a wrong result gets no speed.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, distributed

from whorl.bench.report import Benchmark, finish, table
from whorl.device import (
    COLLECTIVE_CHOICES,
    COLLECTIVE_SETTINGS,
    COLLECTIVES,
    default_device,
    device_count,
    device_name,
    require,
    synchronize,
    versions,
)
from whorl.engine.launch import Rank, RankPlace, start
from whorl.nn import Ranks
from whorl.options import Device, Json, exit_on_bad_usage

app = typer.Typer(add_completion=False)
WIDTH = 4096  # hidden size of Qwen3-235B-A22B
ROWS = {"cpu": (1, 16, 256), "cuda": (1, 16, 256, 2048, 8192), "npu": (1, 16, 256, 2048, 8192)}
SECONDS = 600  # time limit of one setting
PLAIN, OURS = "as the library comes", "as whorl sets it"
Setting = tuple[str, dict[str, str], bool]  # name, environment variables, whether whorl sets its own as well
Form = tuple[Callable[[], Tensor], Tensor, float]  # call, expected result, share of the bytes that a rank sends


def check(device: str | None, ranks: int | None) -> tuple[str, int]:
    """Return the device and the number of ranks; raises ValueError for fewer than 2 or more than devices."""
    device = require(device or default_device())
    num_devices = device_count(device)
    ranks = ranks or num_devices or 2
    if ranks < 2 or (num_devices is not None and ranks > num_devices):
        reason = "one rank has no peer" if num_devices is None else f"this machine has {num_devices} {device} device(s)"
        raise ValueError(f"bench collectives: --ranks is {ranks}, expected at least 2; {reason}")
    return device, ranks


def run(device: str, ranks: int, rows: Sequence[int] | None = None, repeats: int = 20) -> dict[str, Any]:
    """Time every collective, size and setting; returns the document with the environment it was measured in."""
    options = {"device": device, "ranks": ranks, "rows": list(rows or ROWS[device]), "repeats": repeats}
    return {
        "device": device_name(device),
        "library": COLLECTIVES[device],
        "ranks": ranks,
        "width": WIDTH,
        "versions": versions(),
        "settings": [
            _measure_in_new_processes(name, variables, options | {"tune": tune})
            for name, variables, tune in settings(device)
        ],
        "not_applicable": [
            name for other, variables in COLLECTIVE_SETTINGS.items() if other != device for name in variables
        ],
    }


def settings(device: str) -> Iterator[Setting]:
    """Yield the library's defaults, whorl's settings, and whorl's with one change at a time. User settings stay."""
    yield PLAIN, {}, False
    if any(name not in os.environ for name in COLLECTIVE_SETTINGS[device]):
        yield OURS, {}, True
    for name, choices in COLLECTIVE_CHOICES[device].items():
        for value in choices if name not in os.environ else ():
            yield f"{name}={value}", {name: value}, True


def _environment() -> dict[str, str]:
    """Return this environment, with the checkout among the folders that new processes import from."""
    folders = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}


def _measure_in_new_processes(name: str, variables: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.collectives", "--measure", json.dumps(options)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=_environment() | variables, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"name": name, "rows": [], "error": f"no result in {SECONDS} s"}
    if done.returncode:
        return {"name": name, "rows": [], "error": done.stderr.strip()[-2000:]}
    return {"name": name, "rows": json.loads(done.stdout), "error": None}


# ---- in the new processes


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Start new ranks and time all collectives; runs as rank 0."""
    place = RankPlace(rank=0, size=options["ranks"], local_rank=0, is_external=False)
    group = start(place, options["device"], "bench.collectives:follow", options, tune=options["tune"])
    try:
        group.collect("here")
        group.put("go", True)
        with group.together():
            group.join()
            return _rows(group, options)
    finally:
        group.close()


def follow(rank: Rank) -> None:
    """Take part in `measure` as one of the other ranks."""
    options = rank.get("settings")
    rank.publish("here", True)
    rank.get("go")
    rank.join()
    _rows(rank, options)


@torch.inference_mode()
def _rows(rank: Rank, options: dict[str, Any]) -> list[dict[str, Any]]:
    results = []
    for rows in options["rows"]:
        rows = -(-rows // rank.size) * rank.size
        for name, form in _forms(rank, rows).items():
            results.append({"collective": name, "rows": rows} | _time(rank, form, rows, options["repeats"]))
    distributed.barrier()
    return results


def _forms(rank: Rank, rows: int) -> dict[str, Form]:
    """Return the collectives to time, by name, over tensors [rows, WIDTH]; rows is a multiple of the ranks."""
    size, device = rank.size, rank.device
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    ranks = Ranks(rank=rank.rank, size=size)
    pattern = torch.arange(rows * WIDTH, device=device).view(rows, WIDTH).remainder(7).to(dtype)
    local, total = pattern + rank.rank, pattern * size + size * (size - 1) // 2
    part = slice(rank.rank * rows // size, (rank.rank + 1) * rows // size)
    columns = pattern[:, rank.rank * WIDTH // size : (rank.rank + 1) * WIDTH // size].contiguous()
    full, shard = torch.empty_like(local), torch.empty_like(local[part])
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor

    def all_reduce() -> Tensor:
        full.copy_(local)
        distributed.all_reduce(full)
        return full

    def all_gather() -> Tensor:
        gather(full, pattern[part].contiguous())
        return full

    def reduce_scatter() -> Tensor:
        scatter(shard, local)
        return shard

    once = (size - 1) / size
    return {
        "all_reduce": (all_reduce, total, 2 * once),
        "sum in rank order": (lambda: ranks.sum(local), total, 2 * once),
        "reduce_scatter": (reduce_scatter, total[part], once),
        "all_gather": (all_gather, pattern, once),
        "gather of columns": (lambda: ranks.gather(columns), pattern, once),
    }


def _time(rank: Rank, form: Form, rows: int, repeats: int) -> dict[str, Any]:
    call, expected, share = form
    is_equal = torch.tensor(int(torch.equal(call(), expected)))
    distributed.all_reduce(is_equal, distributed.ReduceOp.MIN, group=rank.control)
    times = []
    for _ in range(repeats):
        distributed.barrier(group=rank.control)
        synchronize(rank.device)
        began = time.perf_counter()
        call()
        synchronize(rank.device)
        times.append(time.perf_counter() - began)
    num_bytes, us = rows * WIDTH * expected.itemsize, statistics.median(times) * 1e6
    return {
        "bytes": num_bytes,  # of the full tensor
        "sent": round(num_bytes * share),  # by each rank, at least
        "equal": bool(is_equal),
        "us": us if is_equal else None,
        "algbw": num_bytes / us / 1e3 if is_equal else None,  # GB/s
    }


# ---- report


def is_good(result: dict[str, Any]) -> bool:
    """Return whether every setting ran and every result is right."""
    return all(
        setting["error"] is None and all(row["equal"] for row in setting["rows"]) for setting in result["settings"]
    )


def render(document: dict[str, Any]) -> str:
    """Return the document as text."""
    packages = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        f"{document['device']}: {packages}",
        f"{document['ranks']} ranks, {document['library']}, rows of {document['width']}",
    ]
    if names := document["not_applicable"]:
        lines.append(f"settings of other libraries, which have no effect here: {', '.join(names)}")
    for setting in document["settings"]:
        if setting["error"] is not None:
            lines.append(f"{setting['name']}: failed: {setting['error']}")
            continue
        cells = [["collective", "rows", "bytes", "sent by a rank", "us", "algbw"]]
        for row in setting["rows"]:
            speed = [f"{row['us']:.1f}", f"{row['algbw']:.2f} GB/s"] if row["equal"] else ["wrong: no speed", ""]
            cells.append([row["collective"], str(row["rows"]), f"{row['bytes']:,}", f"{row['sent']:,}", *speed])
        lines += ["", setting["name"], *table(cells)]
    return "\n".join(lines)


@app.command()
def main(
    device: Annotated[Device | None, typer.Option(help="Default: the best device of this machine.")] = None,
    ranks: Annotated[int | None, typer.Option(min=2, help="Default: one for each device; 2 on a CPU.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Rows of the tensor; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the median is reported.")] = 20,
    as_json: Json = False,
    options: Annotated[str | None, typer.Option("--measure", hidden=True)] = None,
) -> None:
    """Time collectives under each setting of NCCL, HCCL or gloo, next to whorl's rank-ordered ones."""
    if options is not None:
        print(json.dumps(measure(json.loads(options))))
        return
    with exit_on_bad_usage():
        where, count = check(device, ranks)
    finish(Benchmark(run=lambda: run(where, count, rows, repeats), render=render, is_good=is_good), as_json)


if __name__ == "__main__":
    app()
