"""Products of packed weights on a GPU: checks their bits, and times them with cold caches and several tiles.

    python bench/trials/packed.py bits                # check the bits for several numbers of tokens
    python bench/trials/packed.py time int4 int8 fp8  # print times; --plans tries other tiles; --seconds 400 stops then
    python bench/trials/packed.py compile int4        # fill Triton's cache with --jobs processes before `time`

The expected bits are those of `linear` on the unpacked weights rounded to bf16: K is summed in chunks of 1024 from
zero, and the chunks are added in order.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl import ops
from whorl.ops.moe.experts_triton import combine
from whorl.ops.quantised import few_tokens_hopper_triton as few
from whorl.ops.quantised import packed_experts_triton as tiles_of_experts
from whorl.ops.quantised import packed_linear_triton as tiles
from whorl.ops.quantised.layout import CHUNK, LAYOUTS, Weight, packed_int4, tiled_bytes, values

DEVICE, DTYPE = "cuda", torch.bfloat16
PEAK = 4.2e12  # bytes per second of a copy on an H200
COLD = 4e8  # bytes of weights to cycle through, several times the L2 cache
KINDS = {"int4": 128, "int4z": 32, "int8": 0, "fp8": 128, "fp8row": 0}  # columns that share a scale; 0: all
Shape = tuple[int, int]
LINEAR: dict[str, Shape] = {
    "30B qkv": (5120, 2048),
    "30B o": (2048, 4096),
    "235B qkv": (9216, 4096),
    "235B o": (4096, 8192),
}
EXPERTS: dict[str, tuple[int, int]] = {"30B": (2048, 768), "235B": (4096, 1536)}  # hidden and inner sizes
NUM_EXPERTS, CHOICES = 128, 8


@triton.jit
def _exact_kernel(x_ptr, w_ptr, y_ptr, T, N, K, CHUNK: tl.constexpr):
    """fp32 [T, N] of bf16 operands with the expected bits, in simple tiles."""
    t = tl.program_id(0) * 64 + tl.arange(0, 64)
    n = tl.program_id(1) * 64 + tl.arange(0, 64)
    total = tl.zeros((64, 64), tl.float32)
    for chunk in range(0, K, CHUNK):
        part = tl.zeros((64, 64), tl.float32)
        for start in range(chunk, tl.minimum(chunk + CHUNK, K), 32):
            k = start + tl.arange(0, 32)
            x = tl.load(x_ptr + t[:, None] * K + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
            w = tl.load(w_ptr + n[None, :] * K + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
            part = tl.dot(x, w, part)
        total += part
    tl.store(y_ptr + t[:, None] * N + n[None, :], total, mask=(t < T)[:, None] & (n < N)[None, :])


def exact_linear(x: Tensor, w: Tensor) -> Tensor:
    """Return x @ w.T in bf16 with the expected bits."""
    x, w = x.contiguous(), w.contiguous()
    y = torch.empty(len(x), len(w), device=DEVICE)
    grid = triton.cdiv(len(x), 64), triton.cdiv(len(w), 64)
    _exact_kernel[grid](x, w, y, *y.shape, x.shape[1], CHUNK=CHUNK, enable_fp_fusion=False)
    return y.to(DTYPE)


def make(kind: str, *shape: int) -> Weight:
    """Return a weight of random codes, with scales that keep outputs as large as inputs."""
    *lead, high, wide = shape
    columns = KINDS[kind]
    rows = 128 if kind == "fp8" else 1
    scale_shape = (*lead, -(-high // rows), -(-wide // (columns or wide)))
    spread = {"int4": 4.6, "int8": 74.0, "fp8": 8.0}[kind[:4].rstrip("zr")] * wide**0.5
    scales = (torch.rand(scale_shape, device=DEVICE) + 0.5) / spread
    zeros = torch.randint(5, 12, scale_shape, device=DEVICE).to(torch.uint8) if kind == "int4z" else None
    if kind.startswith("int4"):
        wide_words = -(-wide // 128) * 16
        if wide % 128 == 0:  # any random word is valid
            codes = torch.randint(-(2**31), 2**31, (*lead, high, wide_words), device=DEVICE, dtype=torch.int32)
        else:
            codes = packed_int4(torch.randint(0, 16, shape, device=DEVICE))
        return Weight(codes, scales.to(DTYPE), zeros, rows, columns, "int4_tiled")
    if kind == "int8":
        codes = tiled_bytes(torch.randint(-127, 128, shape, device=DEVICE, dtype=torch.int8))
        return Weight(codes, scales, zeros, rows, columns, "bytes_tiled")
    numbers = torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_(std=8)
    return Weight(tiled_bytes(numbers.to(torch.float8_e4m3fn)), scales, zeros, rows, columns, "bytes_tiled")


def unpacked(weight: Weight, columns: int) -> Tensor:
    """Return the values of a weight in bf16."""
    block, layout = (weight.rows, weight.columns), LAYOUTS[weight.layout]
    numbers = layout.unpack(weight.codes, columns)
    return values(numbers, weight.scales, weight.zeros, DTYPE, block=block, middle=layout.middle)


def take_experts(weight: Weight, *entries: int) -> Weight:
    """Return one expert of a stack of weights, or a range of them."""
    at = entries[0] if len(entries) == 1 else slice(*entries)
    zeros = None if weight.zeros is None else weight.zeros[at]
    return weight._replace(codes=weight.codes[at], scales=weight.scales[at], zeros=zeros)


def keywords(weight: Weight) -> dict[str, Any]:
    """Return the keyword arguments of the packed operators for a weight."""
    return {"rows": weight.rows, "columns": weight.columns, "layout": weight.layout}


# ---- bits


def count_differences(name: str, actual: Tensor, expected: Tensor) -> int:
    """Print whether two results are equal; returns the number of elements that differ."""
    count = int((actual != expected).sum())
    worst = float((actual.float() - expected.float()).abs().max())
    verdict = "DIFFER" if count else "equal"
    print(f"{verdict}  {name}: {count} of {actual.numel()} differ by {worst:.2e}", flush=True)
    return count


def linear_bits(kind: str, shape: Shape) -> int:
    """Check `packed_linear`; returns the number of wrong elements."""
    weight, x = make(kind, *shape), torch.randn(300, shape[1], device=DEVICE, dtype=DTYPE)
    bias = torch.randn(shape[0], device=DEVICE, dtype=DTYPE)
    expected = exact_linear(x, unpacked(weight, shape[1]))
    wrong = 0

    def run(rows: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.packed_linear(rows, *weight[:3], bias, **keywords(weight), backend="triton")

    for count in (1, 2, 8, 16, 64, 200, 300):
        wrong += count_differences(f"{kind} {shape} {count} rows", run(x[:count]), expected[:count])
    alone = torch.cat([run(x[i : i + 1]) for i in (0, 7, 63, 299)])
    wrong += count_differences(f"{kind} {shape} rows alone", alone, expected[[0, 7, 63, 299]])
    wrong += count_differences(f"{kind} {shape} bias, 1 and 300", run(x[7:8], bias), run(x, bias)[7:8])
    gold = x[:8].double() @ unpacked(weight, shape[1]).double().T
    error = float((run(x[:8]).double() - gold).abs().max() / gold.abs().max())
    print(f"        error against fp64 {error:.1e}", flush=True)
    return wrong + (error > 1e-2)


def experts_bits(kind: str, hidden: int, inner: int) -> int:
    """Check `packed_experts`; returns the number of wrong elements."""
    gate_up, down = make(kind, 16, 2 * inner, hidden), make(kind, 16, hidden, inner)
    x = torch.randn(300, hidden, device=DEVICE, dtype=DTYPE)
    ids = torch.rand(300, 16, device=DEVICE).argsort(-1)[:, :CHOICES].int()
    weights = torch.rand(300, CHOICES, device=DEVICE)
    parts = torch.zeros(300, CHOICES, hidden, device=DEVICE, dtype=DTYPE)
    for e in range(16):
        tokens, choices = (ids == e).nonzero(as_tuple=True)
        both = exact_linear(x[tokens], unpacked(take_experts(gate_up, e), hidden))
        gate, up = both.float().chunk(2, -1)
        activated = (gate / (1 + torch.exp(-gate)) * up).to(DTYPE)
        parts[tokens, choices] = exact_linear(activated, unpacked(take_experts(down, e), inner))
    expected = torch.empty_like(x)
    combine(parts.view(-1, hidden), weights, expected)
    wrong = 0
    for count in (1, 3, 4, 8, 64, 300):
        actual = ops.packed_experts(
            x[:count], *gate_up[:3], *down[:3], weights[:count], ids[:count], **keywords(gate_up), backend="triton"
        )
        wrong += count_differences(f"{kind} experts {hidden}x{inner} {count} tokens", actual, expected[:count])
    return wrong


def int8_bits() -> int:
    """Check products of int8 by int8 against integer arithmetic on the CPU; returns the number of wrong elements."""
    wrong = 0
    for high, wide in ((5120, 2048), (2048, 4096), (200, 1000)):
        codes = torch.randint(-127, 128, (high, wide), device=DEVICE, dtype=torch.int8)
        scales, x = torch.rand(high, device=DEVICE) / 1e3, torch.randn(300, wide, device=DEVICE, dtype=DTYPE)
        expected = ops.int8_linear(x.cpu(), codes.cpu(), scales.cpu(), backend="torch").to(DEVICE)
        for count in (1, 64, 300):
            actual = ops.int8_linear(x[:count], codes, scales, backend="triton")
            wrong += count_differences(f"int8 x int8 {high}x{wide} {count} rows", actual, expected[:count])
    return wrong


def bits() -> int:
    """Check all products; returns the number of wrong elements."""
    wrong = int8_bits()
    for kind in KINDS:
        for shape in ((5120, 2048), (2048, 4096), (4096, 8192), (200, 1536), (72, 1312)):
            if kind != "int4" or shape[1] % 128 == 0:
                wrong += linear_bits(kind, shape)
        wrong += experts_bits(kind, 2048, 768) + experts_bits(kind, 4096, 1536)
    print("all bits are equal" if not wrong else f"{wrong} results differ", flush=True)
    return wrong


# ---- times


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Return the median microseconds of a call, from a graph of all calls, each with different weights."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    samples = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(samples[2:])


def few_plans(kind: str, length: int, is_activated: bool, is_routed: bool, count: int) -> Iterator[dict[str, Any]]:
    """Yield tile sizes to try in the kernel for few tokens."""
    chunks = [c for c in (1, 2, 4, 8) if c <= triton.next_power_of_2(-(-length // CHUNK))]
    blocks = (512, 1024) if kind.startswith("int4") else (256, 512)
    blocks = blocks if count == 1 else (256,)
    highs = (2, 4) if is_activated else (1, 2)
    aheads = (False,) if is_routed or count > 1 else (False, True)
    for c, high, block, ahead in itertools.product(chunks, highs, blocks, aheads):
        if c * high <= 8:
            yield {"CHUNKS": c, "HIGH": high, "BLOCK_K": block, "AHEAD": ahead}


def tile_plans(count: int) -> Iterator[dict[str, Any]]:
    """Yield tile sizes to try in the tiled kernel."""
    near = {"NEAR": 8}
    if count <= 16:
        for stages, block in ((3, 256), (5, 128), (7, 128)):
            yield {"ROWS": 64, "TOKENS": 16, "BLOCK_K": block, "num_warps": 4, "num_stages": stages} | near
        return
    for rows, tokens, warps, stages in (
        (64, 64, 4, 3),
        (64, 64, 4, 5),
        (64, 32, 4, 4),
        (128, 64, 8, 4),
        (128, 128, 8, 3),
    ):
        yield {"ROWS": rows, "TOKENS": tokens, "BLOCK_K": 128, "num_warps": warps, "num_stages": stages} | near
    yield {"ROWS": 64, "TOKENS": 64, "BLOCK_K": 256, "num_warps": 4, "num_stages": 3} | near


def expert_tile_plans() -> Iterator[dict[str, Any]]:
    """Yield tile sizes to try in the tiled kernel of experts."""
    for tokens, block, stages in ((16, 128, 3), (16, 128, 5), (16, 256, 3), (32, 128, 4)):
        yield {"ROWS": 64, "TOKENS": tokens, "BLOCK_K": block, "num_warps": 4, "num_stages": stages}


Job = tuple[str, float, Callable[[dict[str, Any] | None, bool], float]]  # name, bytes, time of a plan (None: default)


def weight_bytes(weight: Weight) -> int:
    """Return the bytes of a packed weight with its scales and zeros."""
    return sum(t.nbytes for t in weight[:3] if isinstance(t, Tensor))


def linear_job(kind: str, name: str, count: int) -> tuple[Job, list[dict[str, Any]]]:
    """Return the job of a `packed_linear` and the plans to try."""
    high, wide = LINEAR[name]
    x, y = (torch.randn(count, n, device=DEVICE, dtype=DTYPE) for n in (wide, high))
    first = make(kind, high, wide)
    size = weight_bytes(first) + x.nbytes + y.nbytes

    def run(sizes: dict[str, Any] | None, is_short: bool) -> float:
        weights = [first] if is_short else [make(kind, high, wide) for _ in range(max(2, int(COLD / size)))]
        if sizes is None:
            calls = [lambda w=w: ops.packed_linear(x, *w[:3], **keywords(w), backend="triton") for w in weights]
            return microseconds(calls)
        launch = few.linear if "CHUNKS" in sizes else tiles.launch
        return microseconds([lambda w=w: launch(x, w, None, y, sizes) for w in weights])

    plans = [*(few_plans(kind, wide, False, False, count) if count <= 8 else ()), *tile_plans(count)]
    return (f"{kind} {name} {high}x{wide}, {count} tokens", size, run), plans


def experts_job(kind: str, name: str, count: int, is_up: bool) -> tuple[Job, list[dict[str, Any]]]:
    """Return the job of one of the two products of experts and its plans. Each call has different expert ids."""
    hidden, inner = EXPERTS[name]
    high, wide, out = (2 * inner, hidden, inner) if is_up else (hidden, inner, hidden)
    weight = make(kind, NUM_EXPERTS, high, wide)
    x = torch.randn(count if is_up else count * CHOICES, wide, device=DEVICE, dtype=DTYPE)
    y = torch.empty(count * CHOICES, out, device=DEVICE, dtype=DTYPE)
    draws = [torch.rand(count, NUM_EXPERTS, device=DEVICE) for _ in range(16)]
    sets = [draw.argsort(-1)[:, :CHOICES].int().contiguous() for draw in draws]
    used = statistics.mean(ids.unique().numel() for ids in sets)
    size = weight_bytes(weight) / NUM_EXPERTS * used + x.nbytes + y.nbytes
    options = {"pairs_per_row": CHOICES if is_up else 1, "is_activated": is_up}

    def run(sizes: dict[str, Any] | None, is_short: bool) -> float:
        chosen = sets[:1] if is_short else sets
        if sizes is None:
            sizes = few.experts_plan(count * CHOICES, high, wide, is_int4=weight.is_int4) if count <= 8 else None
            sizes = sizes or tiles_of_experts.plan(count)[0 if is_up else 1]
        if "CHUNKS" in sizes:
            return microseconds([lambda i=i: few.experts(x, weight, i, y, sizes, **options) for i in chosen])
        routings = [
            tiles_of_experts.route_by_expert(ids, NUM_EXPERTS) if count > 4 else (ids, ids, False) for ids in chosen
        ]
        launch = tiles_of_experts.launch
        return microseconds([lambda r=r: launch(x, weight, y, r, sizes, **options) for r in routings])

    plans = [*(few_plans(kind, wide, is_up, True, 1) if count <= 8 else ()), *expert_tile_plans()]
    product = "gate_up" if is_up else "down"
    return (f"{kind} {name} {product} {used:.0f} x {high}x{wide}, {count} tokens", size, run), plans


def jobs(kinds: list[str]) -> Iterator[tuple[Job, list[dict[str, Any]]]]:
    """Yield all jobs and the plans to try for each."""
    for kind, count in itertools.product(kinds, (1, 8, 64)):
        for name in reversed(EXPERTS):
            yield experts_job(kind, name, count, True)
            yield experts_job(kind, name, count, False)
        for name in LINEAR:
            yield linear_job(kind, name, count)


def report(job: Job, plans: list[dict[str, Any]], until: float) -> None:
    """Time a job with the default plan and, until the time is over, with others; print the best and the worst."""
    name, size, run = job
    floor = size / PEAK * 1e6
    ours = run(None, False)
    print(f"{name}: {size / 1e6:.1f} MB, floor {floor:.1f} us; default {ours:.1f} us ({floor / ours:.0%})", flush=True)
    times = []
    for sizes in plans:
        if time.time() > until:
            break
        try:
            times.append((run(sizes, False), sizes))
        except Exception as error:
            print(f"    {sizes}: {type(error).__name__} {str(error)[:120]}", flush=True)
    for us, sizes in sorted(times, key=lambda pair: pair[0])[:4]:
        print(f"    {us:7.1f} us {size / us / 1e6:5.2f} TB/s  {sizes}", flush=True)
    if times:
        us, sizes = max(times, key=lambda pair: pair[0])
        print(f"    {us:7.1f} us is the slowest of {len(times)}: {sizes}", flush=True)


def compile_all(kinds: list[str], share: tuple[int, int]) -> None:
    """Run a share of the plans once each, so that Triton's cache on disk has their kernels."""
    number = 0
    for (_, _, run), plans in jobs(kinds):
        for sizes in (None, *plans):
            number += 1
            if number % share[1] == share[0]:
                try:
                    run(sizes, True)
                except Exception as error:
                    print(f"{sizes}: {str(error)[:100]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bits", "time", "compile"))
    parser.add_argument("kinds", nargs="*", default=["int4", "int8", "fp8"])
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--share", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    until = time.time() + args.seconds
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    if args.what == "bits":
        sys.exit(bool(bits()))
    if args.what == "compile" and args.share < 0:
        command = [sys.executable, __file__, "compile", *args.kinds, "--jobs", str(args.jobs), "--share"]
        running = [subprocess.Popen([*command, str(i)]) for i in range(args.jobs)]
        sys.exit(max(process.wait() for process in running))
    if args.what == "compile":
        compile_all(args.kinds, (args.share, args.jobs))
        return
    for job, plans in jobs(args.kinds):
        if time.time() > until:
            print("no time left")
            break
        report(job, plans if args.plans else [], until)


if __name__ == "__main__":
    main()
