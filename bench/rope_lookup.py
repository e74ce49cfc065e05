"""`python -m bench.rope_lookup`: looking up cos and sin once per step against once per layer.

Three variants rotate the queries and keys of every layer: the rows of the table are looked up once and shared
("hoisted"), looked up again in each layer ("per layer"), or gathered by the rotary operator from positions ("in
kernel"; positions on several axes are merged before it, in each layer). A case where the three disagree gets no speed.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from whorl.bench.provenance import Document
from whorl.bench.report import Benchmark, finish, table
from whorl.device import default_device, device_name, require, synchronize, versions
from whorl.options import Device, Json, exit_on_bad_usage
from whorl.rope_table import RopeTable, get_rope

app = typer.Typer(add_completion=False)
LAYERS = 48
TOKENS = {"cpu": (1, 64, 512), "cuda": (1, 64, 4096, 16384), "npu": (1, 64, 4096, 16384)}
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 4, 128  # Qwen3-30B-A3B
CASES: dict[str, dict[str, Any]] = {
    "rope": {},
    "mrope": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
}
Rotated = tuple[Tensor, Tensor | None]


def run(device: str, tokens: Sequence[int] | None = None, layers: int = LAYERS, repeats: int = 20) -> dict[str, Any]:
    """Return the median microseconds per step for each case and number of tokens, with the environment."""
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
    rope = get_rope(head_dim=HEAD_DIM, max_position=40960, rope_theta=1e6, **CASES[case])
    variants = _variants(rope, tokens, layers, device)
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


def render(document: Document) -> str:
    """Return the document as text."""
    packages = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    heads, kv_heads, head_dim = document["heads"]
    about = f"{document['layers']} layers, {heads}+{kv_heads} heads x {head_dim}, median microseconds per step"
    cells = [["case", "tokens", "hoisted", "per layer", "in kernel", "per layer / hoisted", "in kernel / hoisted"]]
    for row in document["rows"]:
        figures = ["outputs differ: no speed"]
        if row["equal"]:
            figures = [f"{row[f'{name}_us']:.0f}" for name in ("hoisted", "per_layer", "in_kernel")]
            figures += [f"{row['ratio']:.2f}x", f"{row['in_kernel_ratio']:.2f}x"]
        cells.append([row["case"], str(row["tokens"]), *figures])
    return "\n".join([f"{document['device']}: {packages}", about, *table(cells)])


def is_good(document: Document) -> bool:
    """Return whether the variants agree everywhere."""
    return all(row["equal"] for row in document["rows"])


@app.command()
def main(
    device: Annotated[Device | None, typer.Option(help="Default: the best device of this machine.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Tokens in a step; may be repeated.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers that share one lookup.")] = LAYERS,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the median is reported.")] = 20,
    as_json: Json = False,
) -> None:
    """Compare looking up cos and sin once per step with looking them up in every layer."""
    with exit_on_bad_usage():
        where = require(device or default_device())
    finish(Benchmark(run=lambda: run(where, tokens, layers, repeats), render=render, is_good=is_good), as_json)


if __name__ == "__main__":
    app()
