"""Benchmark of looking up cos and sin once per step against once per layer, over the depth of a model.

`python -m whorl.bench.rope_lookup [--device cuda] [--tokens 1 4096] [--layers 48] [--json]`. Three variants rotate the
queries and keys of every layer: the rows of the table are looked up once and shared ("hoisted"), looked up again in
each layer ("per layer"), or gathered by the rotary operator from positions ("in kernel"). A case where the three
disagree gets no speed.
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
Rotated = tuple[Tensor, Tensor | None]


def run(
    device: str | None = None, tokens: Sequence[int] | None = None, layers: int = LAYERS, repeats: int = 20
) -> dict[str, Any]:
    """Return the median microseconds per step for each case and number of tokens, with the environment."""
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
    variants = _variants(table, tokens, layers, device)
    outputs = [variant() for variant in variants.values()]
    row: dict[str, Any] = {
        "case": case,
        "tokens": tokens,
        "equal": all(_equal(outputs[0], other) for other in outputs[1:]),
    }
    del outputs
    if row["equal"]:
        row |= {f"{name}_us": us for name, us in _median_us(variants, repeats, device).items()}
        row["ratio"] = row["per_layer_us"] / row["hoisted_us"]
        row["in_kernel_ratio"] = row["in_kernel_us"] / row["hoisted_us"]
    return row


def _variants(table: RopeTable, tokens: int, layers: int, device: str) -> dict[str, Callable[[], Rotated]]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.randn(tokens, NUM_HEADS, HEAD_DIM, dtype=dtype, device=device)
    k = torch.randn(tokens, NUM_KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    axes = (3,) if table.config.is_mrope else ()
    positions = torch.randint(table.rows, (*axes, tokens), device=device)

    def hoisted() -> Rotated:
        rows = table.lookup(positions, seq_len=table.rows)
        for _ in range(layers):
            rotated = table.apply(q, k, rows)
        return rotated

    def per_layer() -> Rotated:
        for _ in range(layers):
            rotated = table.apply(q, k, table.lookup(positions, seq_len=table.rows))
        return rotated

    def in_kernel() -> Rotated:
        for _ in range(layers):
            rotated = table.apply(q, k, positions, seq_len=table.rows)
        return rotated

    return {"hoisted": hoisted, "per_layer": per_layer, "in_kernel": in_kernel}


def _equal(ours: Rotated, theirs: Rotated) -> bool:
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _median_us(variants: dict[str, Callable[[], Rotated]], repeats: int, device: str) -> dict[str, float]:
    """Time the variants in turn, so that a slow moment of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, variant in variants.items():
            synchronize(device)
            start = time.perf_counter()
            variant()
            synchronize(device)
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(samples) for name, samples in times.items()}


def _print(result: dict[str, Any]) -> None:
    console = Console()
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    console.print(f"{result['device']}: {packages}")
    heads, kv_heads, head_dim = result["heads"]
    table = Table(
        title=f"{result['layers']} layers, {heads}+{kv_heads} heads x {head_dim}, median microseconds per step"
    )
    for name in ("case", "tokens", "hoisted", "per layer", "in kernel", "per layer / hoisted", "in kernel / hoisted"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in result["rows"]:
        cells = [row["case"], str(row["tokens"])]
        if row["equal"]:
            cells += [f"{row[f'{name}_us']:.0f}" for name in ("hoisted", "per_layer", "in_kernel")]
            cells += [f"{row['ratio']:.2f}x", f"{row['in_kernel_ratio']:.2f}x"]
        else:
            cells.append("outputs differ: no speed")
        table.add_row(*cells)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m whorl.bench.rope_lookup", description=__doc__)
    parser.add_argument("--device", help="cpu, cuda or npu; default: the best device of this machine")
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
