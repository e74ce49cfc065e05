"""Collectives between ranks, by size, and what the settings of their library are worth.

`python -m whorl.bench.collectives [--ranks 2] [--rows 1 512] [--json]`. The library's all-reduce, all-gather and
reduce-scatter next to our sum and gather in rank order. A library reads its environment variables once, so every
setting gets new processes. Inputs are small whole numbers, whose sums are exact in any order: no speed for an answer
that is wrong.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed

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
from whorl.engine.launch import Place, Rank, start
from whorl.nn import Ranks

WIDTH = 4096  # hidden size of Qwen3-235B-A22B
ROWS = {"cpu": (1, 16, 256), "cuda": (1, 16, 256, 2048, 8192), "npu": (1, 16, 256, 2048, 8192)}
SECONDS = 600  # for one setting
PLAIN, OURS = "as the library comes", "as whorl sets it"
Setting = tuple[str, dict[str, str], bool]  # name, variables, whether ours are set beside them
Form = tuple[Callable[[], Tensor], Tensor, float]  # call, what it must give, share of the bytes that a rank must send


def run(
    device: str | None = None, ranks: int | None = None, rows: Sequence[int] | None = None, repeats: int = 20
) -> dict[str, Any]:
    """Every form, size and setting, with the environment they were measured in."""
    device = require(device or default_device())
    have = device_count(device)
    ranks = ranks or have or 2
    if ranks < 2 or (have is not None and ranks > have):
        found = f"this machine has {have} {device} device(s)" if have is not None else "one has nobody to talk to"
        raise ValueError(f"bench collectives: {ranks} ranks were asked for; at least 2 are needed, and {found}")
    asked = {"device": device, "ranks": ranks, "rows": list(rows or ROWS[device]), "repeats": repeats}
    return {
        "device": device_name(device),
        "library": COLLECTIVES[device],
        "ranks": ranks,
        "width": WIDTH,
        "versions": versions(),
        "settings": [_measure_apart(name, each, asked | {"tune": tune}) for name, each, tune in settings(device)],
        "not_applicable": [name for other, each in COLLECTIVE_SETTINGS.items() if other != device for name in each],
    }


def settings(device: str) -> Iterator[Setting]:
    """The library's own, ours, and ours with one change at a time. What the user has set stays in all of them."""
    yield PLAIN, {}, False
    if any(name not in os.environ for name in COLLECTIVE_SETTINGS[device]):
        yield OURS, {}, True
    for name, choices in COLLECTIVE_CHOICES[device].items():
        for value in choices if name not in os.environ else ():
            yield f"{name}={value}", {name: value}, True


def _measure_apart(name: str, variables: dict[str, str], asked: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "whorl.bench.collectives", "--measure", json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"name": name, "rows": [], "error": f"no result in {SECONDS} s"}
    if done.returncode:
        return {"name": name, "rows": [], "error": done.stderr.strip()[-2000:]}
    return {"name": name, "rows": json.loads(done.stdout), "error": None}


# ---- in processes of their own


def measure(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """On rank 0 of new ranks."""
    place = Place(rank=0, size=asked["ranks"], local_rank=0, is_given=False)
    crew = start(place, asked["device"], "whorl.bench.collectives:follow", asked, tune=asked["tune"])
    try:
        crew.collect("here")
        crew.put("go", True)
        with crew.together():
            crew.join()
            return _rows(crew, asked)
    finally:
        crew.close()


def follow(member: Rank) -> None:
    asked = member.get("settings")
    member.publish("here", True)
    member.get("go")
    member.join()
    _rows(member, asked)


@torch.inference_mode()
def _rows(member: Rank, asked: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for rows in asked["rows"]:
        rows = -(-rows // member.size) * member.size
        for name, form in _forms(member, rows).items():
            found.append({"collective": name, "rows": rows} | _time(member, form, rows, asked["repeats"]))
    distributed.barrier()
    return found


def _forms(member: Rank, rows: int) -> dict[str, Form]:
    size, device = member.size, member.device
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    ranks = Ranks(rank=member.rank, size=size)
    pattern = torch.arange(rows * WIDTH, device=device).view(rows, WIDTH).remainder(7).to(dtype)
    mine, total = pattern + member.rank, pattern * size + size * (size - 1) // 2
    part = slice(member.rank * rows // size, (member.rank + 1) * rows // size)
    columns = pattern[:, member.rank * WIDTH // size : (member.rank + 1) * WIDTH // size].contiguous()
    whole, piece = torch.empty_like(mine), torch.empty_like(mine[part])
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor

    def all_reduce() -> Tensor:
        whole.copy_(mine)
        distributed.all_reduce(whole)
        return whole

    def all_gather() -> Tensor:
        gather(whole, pattern[part].contiguous())
        return whole

    def reduce_scatter() -> Tensor:
        scatter(piece, mine)
        return piece

    once = (size - 1) / size
    return {
        "all_reduce": (all_reduce, total, 2 * once),
        "sum in rank order": (lambda: ranks.sum(mine), total, 2 * once),
        "reduce_scatter": (reduce_scatter, total[part], once),
        "all_gather": (all_gather, pattern, once),
        "gather of columns": (lambda: ranks.gather(columns), pattern, once),
    }


def _time(member: Rank, form: Form, rows: int, repeats: int) -> dict[str, Any]:
    call, expected, share = form
    is_equal = torch.tensor(int(torch.equal(call(), expected)))
    distributed.all_reduce(is_equal, distributed.ReduceOp.MIN, group=member.control)
    times = []
    for _ in range(repeats):
        distributed.barrier(group=member.control)
        synchronize(member.device)
        began = time.perf_counter()
        call()
        synchronize(member.device)
        times.append(time.perf_counter() - began)
    num_bytes, us = rows * WIDTH * expected.itemsize, statistics.median(times) * 1e6
    return {
        "bytes": num_bytes,  # of the whole tensor
        "sent": round(num_bytes * share),  # by each rank, at the least
        "equal": bool(is_equal),
        "us": us if is_equal else None,
        "algbw": num_bytes / us / 1e3 if is_equal else None,  # GB/s
    }


# ---- what it prints


def is_good(result: dict[str, Any]) -> bool:
    return all(each["error"] is None and all(row["equal"] for row in each["rows"]) for each in result["settings"])


def show(result: dict[str, Any]) -> None:
    console = Console()
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    console.print(f"{result['device']}: {packages}")
    console.print(f"{result['ranks']} ranks, {result['library']}, rows of {result['width']}")
    if result["not_applicable"]:
        console.print(f"of other libraries, and without effect here: {', '.join(result['not_applicable'])}")
    for each in result["settings"]:
        if each["error"] is not None:
            console.print(f"{each['name']}: failed: {each['error']}", markup=False)
            continue
        table = Table(title=each["name"], title_justify="left")
        for name in ("collective", "rows", "bytes", "sent by a rank", "us", "algbw"):
            table.add_column(name, justify="left" if name == "collective" else "right")
        for row in each["rows"]:
            speed = [f"{row['us']:.1f}", f"{row['algbw']:.2f} GB/s"] if row["equal"] else ["wrong: no speed", ""]
            table.add_row(row["collective"], str(row["rows"]), f"{row['bytes']:,}", f"{row['sent']:,}", *speed)
        console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m whorl.bench.collectives", description=__doc__)
    parser.add_argument("--device", help="cpu, cuda or npu; the best one here by default")
    parser.add_argument("--ranks", type=int, help="default: all devices; 2 on a CPU")
    parser.add_argument("--rows", type=int, nargs="+", help="of the tensor that is summed or gathered")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.measure:
        print(json.dumps(measure(json.loads(arguments.measure))))
        return 0
    result = run(arguments.device, arguments.ranks, arguments.rows, arguments.repeats)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if is_good(result) else 1


if __name__ == "__main__":
    raise SystemExit(main())
