"""cos/sin looked up once a step against once a layer, over a model's depth.

`python -m whorl.bench.rope_lookup [--device cuda] [--tokens 1 4096] [--layers 48] [--json]`. Three ways to rotate the
queries and keys of every layer: rows looked up once and shared, rows looked up again in each layer, and positions
gathered by the rotary operator itself. No speed is given for a case where the three disagree.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from whorl.device import default_device, device_name, require, synchronize, versions
from whorl.rope_table import RopeTable, get_rope

LAYERS = 48
TOKENS = {"cpu": (1, 64, 512), "cuda": (1, 64, 4096, 16384), "npu": (1, 64, 4096, 16384)}
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 4, 128  # Qwen3-30B-A3B
CASES: dict[str, dict[str, Any]] = {
    "rope": {},
    "mrope": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
}
Turned = tuple[Tensor, Tensor | None]


def run(
    device: str | None = None, tokens: Sequence[int] | None = None, layers: int = LAYERS, repeats: int = 20
) -> dict[str, Any]:
    """Median microseconds a step for each case and number of tokens, with the environment they were measured in."""
    device = require(device or default_device())
    sizes = tokens or TOKENS[device]
    return {
        "device": device_name(device),
        "versions": versions(),
        "layers": layers,
        "heads": [NUM_HEADS, NUM_KV_HEADS, HEAD_DIM],
        "rows": [_measure(case, size, layers, repeats, device) for case in CASES for size in sizes],
    }


@torch.inference_mode()
def _measure(case: str, tokens: int, layers: int, repeats: int, device: str) -> dict[str, Any]:
    table = get_rope(head_dim=HEAD_DIM, max_position=40960, rope_theta=1e6, **CASES[case])
    ways = _ways(table, tokens, layers, device)
    found = [way() for way in ways.values()]
    row: dict[str, Any] = {"case": case, "tokens": tokens, "equal": all(_equal(found[0], other) for other in found[1:])}
    del found
    if row["equal"]:
        row |= {f"{name}_us": each for name, each in _median_us(ways, repeats, device).items()}
        row["ratio"] = row["per_layer_us"] / row["hoisted_us"]
        row["in_kernel_ratio"] = row["in_kernel_us"] / row["hoisted_us"]
    return row


def _ways(table: RopeTable, tokens: int, layers: int, device: str) -> dict[str, Callable[[], Turned]]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.randn(tokens, NUM_HEADS, HEAD_DIM, dtype=dtype, device=device)
    k = torch.randn(tokens, NUM_KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    axes = (3,) if table.config.is_mrope else ()
    positions = torch.randint(table.rows, (*axes, tokens), device=device)

    def hoisted() -> Turned:
        rows = table.lookup(positions, seq_len=table.rows)
        for _ in range(layers):
            turned = table.apply(q, k, rows)
        return turned

    def per_layer() -> Turned:
        for _ in range(layers):
            turned = table.apply(q, k, table.lookup(positions, seq_len=table.rows))
        return turned

    def in_kernel() -> Turned:
        for _ in range(layers):
            turned = table.apply(q, k, positions, seq_len=table.rows)
        return turned

    return {"hoisted": hoisted, "per_layer": per_layer, "in_kernel": in_kernel}


def _equal(ours: Turned, theirs: Turned) -> bool:
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _median_us(ways: dict[str, Callable[[], Turned]], repeats: int, device: str) -> dict[str, float]:
    """The ways take turns, so that a slow moment of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            synchronize(device)
            start = time.perf_counter()
            way()
            synchronize(device)
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def _print(result: dict[str, Any]) -> None:
    console = Console()
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    console.print(f"{result['device']}: {packages}")
    heads, kv_heads, head_dim = result["heads"]
    table = Table(title=f"{result['layers']} layers, {heads}+{kv_heads} heads x {head_dim}, median microseconds a step")
    for name in ("case", "tokens", "hoisted", "per layer", "in kernel", "per layer / hoisted", "in kernel / hoisted"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in result["rows"]:
        cells = [row["case"], str(row["tokens"])]
        if row["equal"]:
            cells += [f"{row[f'{name}_us']:.0f}" for name in ("hoisted", "per_layer", "in_kernel")]
            cells += [f"{row['ratio']:.2f}x", f"{row['in_kernel_ratio']:.2f}x"]
        else:
            cells.append("answers differ: no speed")
        table.add_row(*cells)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m whorl.bench.rope_lookup", description=__doc__)
    parser.add_argument("--device", help="cpu, cuda or npu; the best one here by default")
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens in a step")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args(argv)
    result = run(arguments.device, arguments.tokens, arguments.layers, arguments.repeats)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)
    return 0 if all(row["equal"] for row in result["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
