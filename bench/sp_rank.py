"""One rank of `python -m bench.sp`: times every variant of a Qwen3-shaped stack and counts the bytes it sends.

bench/sp.py starts it with its settings as JSON; rank 0 prints the result as JSON.
"""

import contextlib
import datetime
import json
import os
import socket
import statistics
import struct
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from bench.network import INTERFACE
from whorl.collectives import group_name
from whorl.ops import rms_norm
from whorl.passes import SequenceParallel, cost
from whorl.passes import compile as compile_model
from whorl.passes.report import Report

HEAD = 64  # channels of a head
LATENT = 2112 / 7168  # channels of DeepSeek's down-projections (1536 of q, 576 of kv) over its hidden size
# By name: the stack, and options of the sequence-parallel pass. The first variant of a stack is the baseline of its
# others: it has more `min_tokens` than any run, so the pass leaves its all-reduces as they are.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all-reduce": ("qwen3", {"min_tokens": 1 << 40}),
    "SP": ("qwen3", {"min_tokens": 1}),
    "SP + int8": ("qwen3", {"min_tokens": 1, "quantize": "int8"}),
    "MLA all-reduce": ("mla", {"min_tokens": 1 << 40}),
    "SP + MLA placement": ("mla", {"min_tokens": 1}),
}


# ---- the stack


def _weight(generator: torch.Generator, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=generator) * shape[1] ** -0.5, requires_grad=False)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in bf16, the dtype sent between ranks; computed in fp32, as many CPUs lack bf16 products."""
    return (x.float() @ weight.t()).bfloat16()


class Attention(nn.Module):
    """The heads of one rank. q, k and v come from the hidden states or, with a latent, from their down-projection."""

    def __init__(
        self, hidden: int, world: int, generator: torch.Generator, shared: torch.Generator, latent: int
    ) -> None:
        super().__init__()
        self.heads = max(1, hidden // HEAD // world)
        self.norm = nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16), requires_grad=False)
        self.down = _weight(shared, latent, hidden) if latent else None
        self.qkv = _weight(generator, 3 * self.heads * HEAD, latent or hidden)
        self.out = _weight(generator, hidden, self.heads * HEAD)

    def forward(self, x: Tensor) -> Tensor:
        y = rms_norm(x, self.norm)
        if self.down is not None:
            y = _multiply(y, self.down)
        q, k, v = (y.float() @ self.qkv.t()).view(-1, 3, self.heads, HEAD).permute(1, 2, 0, 3).unsqueeze(1)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)  # [1, heads, T, HEAD]
        return _multiply(attended[0].transpose(0, 1).flatten(1), self.out)


class Mlp(nn.Module):
    """One rank's part of a gated MLP."""

    def __init__(self, hidden: int, world: int, generator: torch.Generator) -> None:
        super().__init__()
        width = 3 * hidden // world
        self.norm = nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16), requires_grad=False)
        self.gate, self.up = (_weight(generator, width, hidden) for _ in range(2))
        self.down = _weight(generator, hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = rms_norm(x, self.norm)
        return _multiply(silu(_multiply(y, self.gate)) * _multiply(y, self.up), self.down)


class Stack(nn.Module):
    """Layers of attention and MLP, or of MLA attention alone, where every all-gather can be of the latent.

    Without a group nothing is summed: a barrier replaces each all-reduce, so that only compute is timed.
    """

    def __init__(self, kind: str, layers: int, hidden: int, world: int, group: str | None) -> None:
        super().__init__()
        shared = torch.Generator().manual_seed(1)
        per_rank = torch.Generator().manual_seed(2 + dist.get_rank())
        latent = round(hidden * LATENT / 8) * 8 if kind == "mla" else 0
        self.parts = nn.ModuleList()
        for _ in range(layers):
            self.parts.append(Attention(hidden, world, per_rank, shared, latent))
            self.parts.append(
                Attention(hidden, world, per_rank, shared, latent) if latent else Mlp(hidden, world, per_rank)
            )
        self.norm = nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16), requires_grad=False)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            y = part(x)
            if self.group is None:
                dist.barrier()
            else:
                y = torch.ops._c10d_functional.all_reduce(y, "sum", self.group)
                y = torch.ops._c10d_functional.wait_tensor(y)
            x = x + y
        return rms_norm(x, self.norm)


# ---- counting bytes


def payload_sent() -> int:
    """Return the bytes that this process has sent over TCP, without headers and retransmissions, by Linux's count."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
            sent, repeated = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
            total += sent - repeated
    return total


def interface_sent() -> int | None:
    """Return the bytes sent by the rank's network interface, with headers; None without such an interface."""
    counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    with contextlib.suppress(OSError):
        return int(counter.read_text())
    return None


# ---- measuring


def timed(run: Any, x: Tensor) -> tuple[float, int, int | None]:
    """Return the seconds, payload bytes and interface bytes of one call."""
    dist.barrier()
    before, interface = payload_sent(), interface_sent()
    start = time.perf_counter()
    run(x)
    seconds = time.perf_counter() - start
    dist.barrier()
    after = interface_sent()
    on_wire = None if interface is None or after is None else after - interface
    return seconds, payload_sent() - before, on_wire


def predicted(model: cost.CostModel, report: Report, tokens: int, is_rewritten: bool) -> float:
    """Return the seconds of all collectives of one forward, by the cost model."""
    world = report.size
    if not is_rewritten:
        return sum(model.all_reduce(c.row_bytes * tokens, world) for c in report.collectives)
    total = sum(model.reduce_scatter(c.row_bytes * tokens, world) for c in report.collectives)
    for gather in report.gathers:
        seconds = model.all_gather_quantized if gather.is_quantized else model.all_gather
        total += seconds(gather.row_bytes * tokens, world)
    return total


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Time all variants on this rank; returns the fitted cost model and a row for each variant."""
    tokens, hidden, layers, world = (settings[n] for n in ("tokens", "hidden", "layers", "ranks"))
    group = group_name(None)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    num_bytes = tokens * hidden * 2
    model = cost.measure(num_bytes=(max(num_bytes // 16, 1 << 13), num_bytes), repeats=settings["repeats"])
    runs: dict[str, Any] = {}
    compute: dict[str, Stack] = {}
    times: dict[str, list[tuple[float, int, int | None]]] = {}
    for name, (kind, options) in VARIANTS.items():
        runs[name] = compile_model(
            Stack(kind, layers, hidden, world, group), SequenceParallel(cost=model, **options), backend="eager"
        )
        compute[kind] = Stack(kind, layers, hidden, world, None)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = {name: run(x) for name, run in runs.items()}
        for stack in compute.values():
            stack(x)
        for _ in range(settings["repeats"]):  # in turn, so that other load of the machine affects all alike
            for name, run in (runs | compute).items():
                times.setdefault(name, []).append(timed(run, x))
    barrier_seconds = 2 * layers * _mean(statistics.median(timed(lambda x: dist.barrier(), x)[0] for _ in range(9)))
    return {
        "model": {collective: list(line) for collective, line in model.fitted.items()},
        "rows": [row(name, runs[name], times, outputs, model, tokens, barrier_seconds) for name in VARIANTS],
    }


def row(
    name: str,
    run: Any,
    times: dict[str, Any],
    outputs: dict[str, Tensor],
    model: cost.CostModel,
    tokens: int,
    barrier_seconds: float,
) -> dict[str, Any]:
    """Return the row of a variant, with means over ranks."""
    kind = VARIANTS[name][0]
    baseline = next(n for n, (k, _) in VARIANTS.items() if k == kind)
    is_rewritten = run.last_run == "rewritten"
    seconds = _mean(statistics.median(t[0] for t in times[name]))
    compute = max(0.0, _mean(statistics.median(t[0] for t in times[kind])) - barrier_seconds)
    difference = (outputs[name].float() - outputs[baseline].float()).norm() / outputs[baseline].float().norm()
    interfaces = [t[2] for t in times[name]]
    return {
        "name": name,
        "stack": kind,
        "baseline": baseline,
        "seconds": seconds,
        "compute_seconds": compute,
        "predicted_seconds": compute + predicted(model, run.report, tokens, is_rewritten),
        "payload_bytes": statistics.median(t[1] for t in times[name]),
        "interface_bytes": None if None in interfaces else statistics.median(interfaces),
        "report_bytes": run.report.bytes_after() if is_rewritten else run.report.bytes_before(),
        "is_rewritten": is_rewritten,
        "difference": difference.item(),
        "collectives": run.report.rewrites if is_rewritten else len(run.report.collectives),
    }


def _mean(value: float) -> float:
    """Return the mean over ranks."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main(settings: str) -> None:
    """Run as one rank; settings: those of `SpSettings` as JSON."""
    values = json.loads(settings)
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(seconds=values["timeout"])
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=limit)
    result = measure(values)
    if rank == 0:
        print(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
