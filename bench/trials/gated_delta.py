"""Gated delta layers on a GPU: what their arithmetic takes for granted of tensor cores, their bits, and their times.

    python bench/trials/gated_delta.py           # everything, under five minutes
    python bench/trials/gated_delta.py bits      # some sections: probes, bits, times, plans, errors

Prints one line a check; a line that begins with WRONG is a check that failed. Sizes are those of Qwen3.5-35B-A3B: 16
key and 32 value heads of 128 channels, in bf16.
"""

import functools
import itertools
import random
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl import ops
from whorl.ops import OPS
from whorl.ops.gated_delta import delta_tensors, rows_triton, rule_triton
from whorl.ops.gated_delta.layout import CHUNK
from whorl.timing import matmul_rate, measure

DEVICE, DTYPE = "cuda", torch.bfloat16
HK, HV, D, WIDTH = 16, 32, 128, 4
CHANNELS = 2 * HK * D + HV * D
RULE = ("state", "rounded", "keys", "deltas", "decays", "errors", "inverses")
Values = dict[str, Tensor]


def report(what: str, right: bool, more: object = "") -> None:
    print(f"{'right' if right else 'WRONG'}: {what} {more}", flush=True)


def differing(a: Tensor, b: Tensor) -> str:
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return f"{int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())} of {a.numel()} differ"


def same(what: str, a: Tensor, b: Tensor) -> None:
    report(what, differing(a, b).startswith("0 "), differing(a, b))


# ---- probes


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr,
                    EXTRA: tl.constexpr):  # fmt: skip
    """out = a [M, K] @ b [K, N], STEP of K at a time; EXTRA: then as many products with zeros are added."""
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, STEP)
    total = tl.zeros((M, N), tl.float32)
    for first in tl.static_range(0, K, STEP):
        a = tl.load(a_ptr + m * K + first + k[None, :])
        b = tl.load(b_ptr + (first + k)[:, None] * N + n)
        total = tl.dot(a, b, total)
    for _ in tl.static_range(EXTRA):
        a = tl.load(a_ptr + m * K + k[None, :])
        b = tl.load(b_ptr + k[:, None] * N + n)
        total = tl.dot((a * 0.0).to(a.dtype), b, total)
    tl.store(out_ptr + m * N + n, total)


def product(a: Tensor, b: Tensor, step: int, extra: int = 0, warps: int = 4) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, device=DEVICE)
    _product_kernel[(1,)](a.contiguous(), b.contiguous(), out, m, n, k, step, extra, num_warps=warps)
    return out


def probes() -> None:
    k, d = (torch.randn(64, n, device=DEVICE, dtype=DTYPE) for n in (128, 64))
    s = torch.randn(128, 64, device=DEVICE, dtype=DTYPE)
    for rows in (16, 64):
        same(f"(1) zero products leave {rows} rows alone", product(k[:rows], s, 64), product(k[:rows], s, 64, extra=3))
    whole = product(k.t(), d, 64)
    same("(2) contraction over tokens, 16 at a time", whole, product(k.t(), d, 16))
    swapped = torch.cat([product(d.t()[i : i + 16], k, 16, warps=1) for i in range(0, 64, 16)]).t()
    same("(2) the same with 16 rows and operands exchanged", whole, swapped)
    rows = torch.cat(
        [product(k[i : i + 16], s, 128, warps=w) for i, w in zip(range(0, 64, 16), (1, 2, 4, 8), strict=True)]
    )
    same("(4) 16 rows a tile against 64", product(k, s, 128), rows)
    columns = torch.cat([product(k, s[:, i : i + 16], 64) for i in range(0, 64, 16)], 1)
    same("(4) 16 columns a tile against 64", product(k, s, 64), columns)


# ---- bits


def draw(num_tokens: int) -> Values:
    values = OPS["gated_delta"].make(lengths=(num_tokens,), HK=HK, G=HV // HK, D=D, DV=D, dtype=DTYPE, device=DEVICE)
    return {name: values[name] for name in ("q", "k", "v", "g", "beta")}


def new_lanes(count: int) -> Values:
    """Lanes whose open chunks hold NaN: what is no row of a sequence must not be read."""
    kept, rows = delta_tensors(HK, HV, D, D, WIDTH, DTYPE)
    states = {name: torch.zeros(count, *shape, dtype=kind, device=DEVICE) for name, (shape, kind) in kept.items()}
    return states | {
        name: torch.full((count, *s), torch.nan, dtype=kind, device=DEVICE) for name, (s, kind) in rows.items()
    }


def in_lanes(values: Values, states: Values, spans: list[tuple[int, int, int]], most: int = 0) -> Tensor:
    """The rule over tokens `first` to `end` of sequences. spans: lane, first and end (exclusive)."""
    new = {n: torch.cat([x[first:end] for _, first, end in spans]) for n, x in values.items()}
    starts = torch.tensor([0, *(end - first for _, first, end in spans)]).cumsum(0).int().to(DEVICE)
    lanes = torch.tensor([lane for lane, _, _ in spans], device=DEVICE)
    lengths = torch.tensor([end for _, _, end in spans], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(new["v"], torch.nan)
    tables = {"lanes": lanes, "query_starts": starts, "context_lens": lengths}
    of_lanes = {name: states[name] for name in RULE}
    ops.gated_delta_lanes(**new, out=out, **of_lanes, **tables, scale=D**-0.5, most=most, backend="triton")
    return out


def by_cuts(values: Values, cuts: list[int], states: Values, lane: int = 0) -> Tensor:
    return torch.cat([in_lanes(values, states, [(lane, a, b)]) for a, b in itertools.pairwise([0, *cuts])])


def packed(values: Values, lengths: tuple[int, ...]) -> Tensor:
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    return ops.gated_delta(**values, starts=starts, scale=D**-0.5, backend="triton")


def random_cuts(length: int, seed: int) -> list[int]:
    generator, cuts = random.Random(seed), [0]
    while cuts[-1] < length:
        start = cuts[-1]
        end = min(length, start + generator.choice((1, 1, 2, 5, 16, 64, 128, 300)))
        cuts.append(min(end, start + CHUNK - start % CHUNK) if start % CHUNK else end)
    return cuts[1:]


def bits() -> None:
    length = 1000
    values = draw(length)
    expected = packed(values, (length,))
    report("finite", bool(expected.isfinite().all()))
    states = [new_lanes(1) for _ in range(4)]
    same("a prompt in lanes against training", by_cuts(values, [length], states[0]), expected)
    same("(3) row by row against training", by_cuts(values, list(range(1, length + 1)), states[1]), expected)
    for i in (2, 3):
        same("(3) cut anywhere against training", by_cuts(values, random_cuts(length, i), states[i]), expected)
    rows = length % CHUNK
    for name in RULE:
        kept = [x[name][0] if name in ("state", "rounded") else x[name][0, :, : min(rows, 16)] for x in states]
        if name in ("errors", "inverses"):  # rows of the last two blocks, here 16 to 39
            kept = [x[name][0, :, :8] for x in states]
        for other in kept[1:]:
            same(f"what a lane holds: {name}", other, kept[0])
    many = {name: torch.cat([x] * 3) for name, x in values.items()}
    together = packed(many, (length,) * 3)
    same("packed with others", together[length : 2 * length], expected)
    several, spans = new_lanes(5), [(4, 0, 320), (1, 0, 384), (2, 0, 500)]
    first = in_lanes(values, several, spans)
    same("three prompts in a call", first[320 + 384 :], expected[:500])
    after = in_lanes(values, several, [(1, 384, 390), (4, 320, 321), (2, 500, 504)], most=6)
    same(
        "their next rows, drafts among them",
        after,
        torch.cat([expected[384:390], expected[320:321], expected[500:504]]),
    )
    again = in_lanes(values, several, [(2, 501, 502), (1, 386, 387)], most=1)
    same("rows computed again after drafts were rejected", again, torch.cat([expected[501:502], expected[386:387]]))
    for plan in ROW_PLANS:
        with patched(rows_triton, "_plan", lambda *_, plan=plan: plan):
            states = new_lanes(1)
            by_cuts(values, [512], states)
            rows_of = [in_lanes(values, states, [(0, i, i + 1)], most=1) for i in range(512, 640)]
            same(f"rows by {plan}", torch.cat(rows_of), expected[512:640])
    x, weight = (
        torch.randn(700, CHANNELS, device=DEVICE, dtype=DTYPE),
        torch.randn(CHANNELS, WIDTH, device=DEVICE, dtype=DTYPE),
    )
    whole = ops.causal_conv(x, weight, torch.tensor([0, 700], dtype=torch.int32, device=DEVICE), backend="triton")
    states, y = new_lanes(1), []
    for a, b in itertools.pairwise([0, 1, 2, 3, 64, 100, *range(101, 140), 256, 500, 512, 700]):
        new = torch.empty(b - a, CHANNELS, device=DEVICE, dtype=DTYPE)
        tables = (
            torch.tensor(v, dtype=t, device=DEVICE)
            for v, t in (([0], torch.int64), ([0, b - a], torch.int32), ([b], torch.int32))
        )
        ops.causal_conv_lanes(x[a:b], weight, new, states["tail"], states["inputs"], *tables, backend="triton")
        y.append(new)
    same("the convolution, cut anywhere", torch.cat(y), whole)


class patched:
    """Set an attribute of a module for a block."""

    def __init__(self, module: Any, name: str, value: Any) -> None:
        self.module, self.name, self.value = module, name, value

    def __enter__(self) -> None:
        self.before = getattr(self.module, self.name)
        setattr(self.module, self.name, self.value)

    def __exit__(self, *_: object) -> None:
        setattr(self.module, self.name, self.before)


# ---- a decode step of a layer in one kernel


def layer_inputs(num_tokens: int) -> Values:
    """What the projections give a layer, and its parameters."""
    kind = {"device": DEVICE, "dtype": DTYPE}
    return {
        "qkv": torch.randn(num_tokens, CHANNELS, **kind),
        "ba": torch.randn(num_tokens, 2 * HV, **kind),
        "gate": torch.randn(num_tokens, HV, D, **kind),
        "weight": torch.randn(CHANNELS, WIDTH, **kind) / 2,
        "a_log": torch.linspace(-8, -2, HV, device=DEVICE),
        "dt_bias": torch.zeros(HV, device=DEVICE),
        "norm": torch.ones(D, device=DEVICE),
    }


_PARAMETERS = ("weight", "a_log", "dt_bias", "norm")


def in_parts(x: Values, out: Tensor, states: Values, tables: Values, most: int) -> None:
    """The layer by its five operators."""
    where, backend = tuple(tables.values()), {"backend": "triton"}
    y = torch.empty_like(x["qkv"])
    ops.causal_conv_lanes(x["qkv"], x["weight"], y, states["tail"], states["inputs"], *where, **backend)
    qk = ops.l2_norm(y[:, : 2 * HK * D].unflatten(1, (2 * HK, D)), **backend)
    v = y[:, 2 * HK * D :].unflatten(1, (HV, D))
    g, beta = ops.delta_gates(x["ba"][:, HV:], x["ba"][:, :HV], x["a_log"], x["dt_bias"], **backend)
    of_lanes, result = {name: states[name] for name in RULE}, torch.empty_like(out)
    inner = {"q": qk[:, :HK], "k": qk[:, HK:], "v": v, "g": g, "beta": beta, "out": result}
    ops.gated_delta_lanes(**inner, **of_lanes, **tables, scale=D**-0.5, most=most, **backend)
    out.copy_(ops.gated_rms_norm(result, x["gate"], x["norm"], **backend))


def in_one(x: Values, out: Tensor, states: Values, tables: Values, most: int) -> None:
    stored = {name: states[name] for name in ("tail", "inputs", *RULE)}
    ops.gated_delta_step(**x, out=out, **stored, **tables, scale=D**-0.5, most=most, backend="triton")


def tables_of(spans: list[tuple[int, int, int]]) -> Values:
    """spans: lane, first and end (exclusive) position of each sequence."""
    counts = torch.tensor([0, *(end - first for _, first, end in spans)])
    return {
        "lanes": torch.tensor([lane for lane, _, _ in spans], device=DEVICE),
        "query_starts": counts.cumsum(0).int().to(DEVICE),
        "context_lens": torch.tensor([end for _, _, end in spans], dtype=torch.int32, device=DEVICE),
    }


def step_bits() -> None:
    """Three sequences, whose prompts end at different rows: their next tokens in one kernel and in five."""
    prompts = {0: 70, 1: 126, 2: 190}
    for most, passes in ((1, 80), (4, 24), (16, 8)):
        one, parts = new_lanes(4), new_lanes(4)
        for lane, length in prompts.items():
            x, tables = layer_inputs(length), tables_of([(lane, 0, length)])
            out = torch.empty(length, HV, D, device=DEVICE, dtype=DTYPE)
            for states in (one, parts):
                in_parts(x, out, states, tables, 0)
        at, worst = dict(prompts), {}
        for _ in range(passes):
            ends = {lane: min(p + most, p + CHUNK - p % CHUNK) for lane, p in at.items()}
            spans = [(lane, p, ends[lane]) for lane, p in at.items()]
            total, tables = sum(end - p for _, p, end in spans), tables_of(spans)
            x, outs = layer_inputs(total + 2), [torch.full((total + 2, HV, D), 7, device=DEVICE, dtype=DTYPE)] * 2
            outs = [x.clone() for x in outs]
            in_parts(x, outs[0], parts, tables, most)
            outs[0][total:] = 0
            in_one(x, outs[1], one, tables, most)
            pairs = {"out": outs} | {name: [s[name][:3] for s in (parts, one)] for name in ("state", "tail")}
            for name, (a, b) in pairs.items():
                if not differing(a, b).startswith("0 "):
                    worst.setdefault(name, differing(a, b))
            at = ends
        report(f"a layer's step in one kernel, up to {most} tokens", not worst, worst or "0 differ")


def stepping(run: Callable[..., None], count: int, row: int, new: int = 1) -> Callable[[], None]:
    x, states, most = layer_inputs(count * new), new_lanes(count), new
    with torch.inference_mode():
        prompt = layer_inputs(CHUNK + row)
        out = torch.empty(CHUNK + row, HV, D, device=DEVICE, dtype=DTYPE)
        for lane in range(count):
            in_parts(prompt, out, states, tables_of([(lane, 0, CHUNK + row)]), 0)
    tables = tables_of([(lane, CHUNK + row, CHUNK + row + new) for lane in range(count)])
    out = torch.empty(count * new, HV, D, device=DEVICE, dtype=DTYPE)
    return lambda: run(x, out, states, tables, most)


def step_times() -> None:
    def timed(what: str, run: Callable[..., None], count: int, row: int, new: int = 1) -> None:
        runs = [stepping(run, count, row, new) for _ in range(max(2, 24 // count))]
        attempt(lambda: time(f"{what}, {count} x {new} at row {row}", *runs, num_bytes=row_bytes(count, row)))

    for count in (1, 64):
        timed("five kernels", in_parts, count, 32)
    for plan in ROW_PLANS:
        with patched(rows_triton, "_plan", lambda *_, plan=plan: plan):
            for count, row in ((1, 32), (64, 32), *(((64, 63),) if "maxnreg" not in plan else ())):
                timed(f"in two {tuple(plan.values())}", in_one, count, row)
            if plan["ROWS"] > 1:
                timed(f"in two {tuple(plan.values())}", in_one, 64, 34, 4)


# ---- errors


def errors() -> None:
    from whorl.judge import judge

    names = ("gated_delta", "gated_delta_lanes", "causal_conv", "causal_conv_lanes", "delta_gates", "l2_norm")
    for name in (*names, "gated_rms_norm", "output_gate"):
        for op in (OPS[name], OPS.get(f"{name}_backward")):
            if op is None or "triton" not in op.impls:
                continue
            cases = op.cases[1:2] if "gated_delta" in op.name else op.cases  # each of them is compiled
            for case, dtype in itertools.product(cases, (torch.bfloat16, torch.float32)):
                values = op._bind((), op.make(**case, dtype=dtype, device=DEVICE))
                if op.impls["triton"].accepts(**values) is not None:
                    continue
                copies = [{n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()} for _ in range(3)]
                copies[2] = {
                    n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
                    for n, v in copies[2].items()
                }
                runs = functools.partial(op, backend="triton"), op.reference, op.reference
                outs = [run(**copy) for run, copy in zip(runs, copies, strict=True)]
                if op.mutates:
                    outs = [tuple(copy[n] for n in op.mutates) for copy in copies]
                actual, reference, gold = (o if isinstance(o, tuple) else (o,) for o in outs)
                verdict = judge(actual, reference, gold, fp32_limit=4.0)
                if not verdict.passed:
                    report(f"{op.name} {case} {dtype}", right=False, more=verdict.problem)
            print(f"errors of {op.name} compared", flush=True)


# ---- times


def time(what: str, *runs: Callable[[], Any], num_bytes: float = 0, flops: float = 0) -> float:
    """Time a call; several runs take turns, so that what they read is not in the cache."""
    us = measure(runs, DEVICE).us
    more = f" {num_bytes / us / 1e6:6.2f} TB/s" * bool(num_bytes) + f" {flops / us / 1e6:6.0f} TFLOP/s" * bool(flops)
    print(f"{us:9.1f} us {what}{more}", flush=True)
    return us


def sizes(num_tokens: int) -> dict[str, float]:
    bytes_of_token = 2 * (2 * HK * D + 2 * HV * D) + 8 * HV
    flops = HV * (6 * D * D + 6 * CHUNK * D)
    return {"num_bytes": num_tokens * bytes_of_token, "flops": num_tokens * flops}


def decoding(count: int, row: int) -> Callable[[], None]:
    """One new token of each of `count` sequences, at row `row` of their chunks."""
    prompt, new, states = draw(CHUNK + row), draw(count), new_lanes(count)
    for lane in range(count):
        in_lanes(prompt, states, [(lane, 0, CHUNK + row)])
    tables = {
        "lanes": torch.arange(count, device=DEVICE),
        "query_starts": torch.arange(count + 1, device=DEVICE, dtype=torch.int32),
        "context_lens": torch.full((count,), CHUNK + row + 1, device=DEVICE, dtype=torch.int32),
    }
    out, of_lanes = torch.empty_like(new["v"]), {name: states[name] for name in RULE}
    return lambda: ops.gated_delta_lanes(**new, out=out, **of_lanes, **tables, scale=D**-0.5, most=1, backend="triton")


def row_bytes(count: int, row: int) -> float:
    """Bytes that one token of each sequence has to read, without the flush."""
    return count * (HV * (D * D * 2 + row * (D * 2 + 4) + 16 * (2 * D + 64)) + HK * row * D * 2)


def times() -> None:
    x = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    time("a copy of 1 GiB", x.clone, num_bytes=2 * x.nbytes)
    print(f"product {matmul_rate(DTYPE, DEVICE) / 1e12:.0f} TFLOP/s")
    for lengths in ((8192,), (32768,), (8192,) * 4, (4000, 1192, 3000)):
        values, total = draw(sum(lengths)), sum(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
        run = functools.partial(ops.gated_delta, **values, starts=starts, scale=D**-0.5, backend="triton")
        time(f"gated_delta of {lengths} tokens", run, **sizes(total))
        for name in ("_delta_chunk_kernel", "_delta_state_kernel"):
            with patched(rule_triton, name, _Nothing()):
                time(f"  (5) the same without {name}", run)
    for count, row in itertools.product((1, 8, 64, 256), (5, 32, 60)):
        runs = [decoding(count, row) for _ in range(max(1, 48 // count))]
        time(f"gated_delta_lanes, {count} sequences at row {row}", *runs, num_bytes=row_bytes(count, row))
    for count in (1, 64):
        state = torch.randn(count, HV, D, D, device=DEVICE)
        run = functools.partial(state.mul_, 0.999)
        time(f"plain recurrence, its bytes alone: {count} states read and written", run, num_bytes=state.nbytes * 2)
    for tokens in (1, 64, 8192):
        rest(tokens)


class _Nothing:
    """Stands for a kernel that is not launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


def rest(tokens: int) -> None:
    """The other operators of a layer."""
    x, weight = (
        torch.randn(tokens, CHANNELS, device=DEVICE, dtype=DTYPE),
        torch.randn(CHANNELS, WIDTH, device=DEVICE, dtype=DTYPE),
    )
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    time(
        f"causal_conv of {tokens} tokens",
        lambda: ops.causal_conv(x, weight, starts, backend="triton"),
        num_bytes=2 * x.nbytes,
    )
    qk = x[:, : 2 * HK * D].unflatten(1, (2 * HK, D))
    time(f"l2_norm of {tokens} tokens", lambda: ops.l2_norm(qk, backend="triton"), num_bytes=2 * qk.numel() * 2)
    a, b = (torch.randn(tokens, HV, device=DEVICE, dtype=DTYPE) for _ in range(2))
    a_log, bias = (torch.randn(HV, device=DEVICE) for _ in range(2))
    time(f"delta_gates of {tokens} tokens", lambda: ops.delta_gates(a, b, a_log, bias, backend="triton"))
    out, z = (torch.randn(tokens, HV, D, device=DEVICE, dtype=DTYPE) for _ in range(2))
    scale = torch.randn(D, device=DEVICE)
    time(
        f"gated_rms_norm of {tokens} tokens",
        lambda: ops.gated_rms_norm(out, z, scale, backend="triton"),
        num_bytes=3 * out.nbytes,
    )
    time(f"output_gate of {tokens} tokens", lambda: ops.output_gate(out, z, backend="triton"), num_bytes=3 * out.nbytes)


PLANS = [  # of the kernel that goes through a sequence's chunks: channels of a program, stages and warps
    {"BV": part, "STAGES": stages, "num_warps": warps}
    for part, stages, warps in (
        (64, 2, 4), (64, 3, 4), (64, 1, 4),
    )
]  # fmt: skip
ROW_PLANS: list[dict[str, int]] = [{"ROWS": rows, "num_warps": warps} for rows in (1, 8) for warps in (4, 8)]
ROW_PLANS += [{**plan, "maxnreg": most} for plan, most in zip(ROW_PLANS, (128, 128, 128, 128), strict=True)]
ROW_PLANS += [{"ROWS": 1, "num_warps": 4, "maxnreg": 168}]


def plans() -> None:
    """The plans of the kernel that goes through chunks."""
    values = draw(8192)
    starts = torch.tensor([0, 8192], dtype=torch.int32, device=DEVICE)
    run = functools.partial(ops.gated_delta, **values, starts=starts, scale=D**-0.5, backend="triton")
    expected = run()
    for plan in PLANS:
        with patched(rule_triton, "_plan", lambda *_, plan=plan, **__: plan):
            attempt(lambda plan=plan: time(f"prompt of 8192, {plan}: {differing(run(), expected)}", run))


def build(number: int) -> None:
    """Run each kernel of a plan once, so that it lies in Triton's cache."""
    if number < len(PLANS):
        with patched(rule_triton, "_plan", lambda *_, **__: PLANS[number]):
            packed(draw(8192), (8192,))
    else:
        with patched(rows_triton, "_plan", lambda *_: ROW_PLANS[number - len(PLANS)]):
            for count, new in ((1, 1), (64, 1), (1, 4), (64, 4)):
                stepping(in_one, count, 34, new)()
                in_lanes(draw(200), new_lanes(1), [(0, 0, 50)], most=1)


def built() -> None:
    """Compile the kernels of all plans side by side."""
    command = [sys.executable, __file__]
    count = len(PLANS) + len(ROW_PLANS)
    running = [subprocess.Popen([*command, f"build:{i}"], stdout=subprocess.DEVNULL) for i in range(count)]
    print(f"built: {[process.wait() for process in running]}", flush=True)


def attempt(run: Callable[[], Any]) -> None:
    try:
        run()
    except Exception as error:
        print(f"WRONG: {type(error).__name__}: {str(error)[:300]}", flush=True)
        traceback.print_exc(limit=-3)


class Rewarped:
    """A kernel with another number of warps."""

    def __init__(self, kernel: Any, warps: int) -> None:
        self.kernel, self.warps = kernel, warps

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda **kwargs: self.kernel[grid](**kwargs | {"num_warps": self.warps})


CHUNK_KERNELS = {f"{warps} warps": Rewarped(rule_triton._delta_chunk_kernel, warps) for warps in (1, 2, 4)}


def split() -> None:
    """The two kernels of a prompt by themselves."""
    values, starts = draw(8192), torch.tensor([0, 8192], dtype=torch.int32, device=DEVICE)
    run = functools.partial(ops.gated_delta, **values, starts=starts, scale=D**-0.5, backend="triton")
    expected = run()
    time("gated_delta of 8192 tokens", run)
    with patched(rule_triton, "_delta_chunk_kernel", _Nothing()):
        time("  its chunks one after the other", run)
    for name, kernel in CHUNK_KERNELS.items():
        with patched(rule_triton, "_delta_chunk_kernel", kernel):
            attempt(lambda name=name: print(f"  {name}: {differing(run(), expected)}"))
            with patched(rule_triton, "_delta_state_kernel", _Nothing()):
                attempt(lambda name=name: time(f"  chunks side by side, {name}", run))


SECTIONS = {"probes": probes, "bits": bits, "step_bits": step_bits, "step_times": step_times, "split": split}
SECTIONS |= {"built": built, "times": times, "plans": plans, "errors": errors}


def main() -> None:
    torch.manual_seed(0)
    for name in sys.argv[1:] or SECTIONS:
        print(f"---- {name}", flush=True)
        attempt(functools.partial(build, int(name[6:])) if name.startswith("build:") else SECTIONS[name])


if __name__ == "__main__":
    main()
