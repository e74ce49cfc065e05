"""`whorl bench ops`: times the benchmark cases of every operator next to its peers and to a copy of as many bytes.

A wrong output, of whorl or of a peer, gets no speed.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from whorl import device as devices
from whorl.bench import ops_report
from whorl.bench.options import OpsOptions
from whorl.bench.peer import Bound, Peer
from whorl.bench.peers import peers_of
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document, provenance
from whorl.bench.report import Benchmark, first_line
from whorl.cases import Values, describe, has_sequences, shrink
from whorl.judge import answers, guarded, judge_call, widened
from whorl.ops import OPS, Op
from whorl.timing import Timing, is_short, matmul_rate, measure, num_buffers

QUICK_TOKENS = 64
# Largest relative error of a peer, in eps. Peers round more often than whorl does (bf16 tables, bf16 products), so this
# only shows that they did the same work. Observed: 0.3 eps, and 0.7 eps for gradients.
PEER_ERROR = 4.0


def _and_backward(*names: str) -> tuple[str, ...]:
    return tuple(each for name in names for each in (name, f"{name}_backward"))


# Operators that have one name together.
GROUPS = {
    "sparse_attention": (*_and_backward("sparse_attention", "masked_attention"), "selection_mask"),
    "indexer": (
        "index_scores",
        "top_k",
        "lightning_indexer",
        "indexer_target",
        "indexer_kl",
        "indexer_kl_gradients",
        "hadamard",
    ),
    "moe": ("route", *_and_backward("permute", "unpermute", "grouped_matmul", "glu")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpsSettings:
    """Validated settings of `whorl bench ops`. quick: few tokens; compiled: time torch.compile too."""

    names: tuple[str, ...]
    device: str
    dtype: torch.dtype
    quick: bool
    compiled: bool

    @staticmethod
    def resolve(names: Sequence[str], options: OpsOptions) -> "OpsSettings":
        """Return the settings with defaults for this machine; raises ValueError for an unknown operator or device."""
        unknown = [n for n in names if n not in OPS and n not in GROUPS]
        if unknown:
            known = f"{', '.join(OPS)}, or the groups {', '.join(GROUPS)}"
            raise ValueError(f"bench ops: no operator {', '.join(unknown)}; expected {known}")
        selected = dict.fromkeys(op_name for name in names for op_name in GROUPS.get(name, (name,)))
        device = devices.require(options.device or devices.default_device())
        quick = devices.accelerator(device) is None if options.quick is None else options.quick
        return OpsSettings(
            names=tuple(selected) or tuple(OPS),
            device=device,
            dtype=getattr(torch, options.dtype),
            quick=quick,
            compiled=not quick if options.compiled is None else options.compiled,
        )

    def cases(self, op: Op) -> list[Values]:
        """Return the cases to time: the operator's benchmark cases or, for quick runs, small ones."""
        is_large = (
            op.flops is not None or (op.forward_only and not op.mutates) or any(map(has_sequences, op.bench_cases))
        )
        if self.quick and is_large:
            # The benchmark cases have weights of whole models, which even a few tokens would read, or long sequences.
            return list(op.cases[1:3])
        cases = [shrink(case, QUICK_TOKENS) if self.quick else case for case in op.bench_cases]
        return [case for i, case in enumerate(cases) if case not in cases[:i]]


def benchmark(names: Sequence[str], options: OpsOptions) -> Benchmark:
    """Return the benchmark, ready to run; raises ValueError for an unknown operator or device."""
    settings = OpsSettings.resolve(names, options)
    return Benchmark(run=lambda: run(settings), render=ops_report.render, is_good=is_good, draw=ops_report.write_plot)


def run(settings: OpsSettings) -> Document:
    """Time all cases; returns {"header": ..., "rows": [...]}. A terminal shows a progress bar."""
    work = [(OPS[name], case) for name in settings.names for case in settings.cases(OPS[name])]
    rows = []
    with Progress(len(work)) as progress:
        for op, case in work:
            with progress(f"{op.name}: {describe(case)}"):
                rows.append(_row(op, case, settings))
    copies = {row["bytes"]: row["copy_tb_s"] for row in rows if row["passed"]}
    return {"header": _header(settings) | {"copy_tb_s_by_bytes": copies}, "rows": rows}


def is_good(document: Document) -> bool:
    """Return whether every case is right."""
    return all(row["passed"] for row in document["rows"])


def _header(settings: OpsSettings) -> Document:
    notes = [
        "TB/s counts the bytes that must be read and written once; a peer's uses the same bytes, so it compares time.",
        "TFLOP/s counts the operations that the result needs, also for a peer that does more.",
    ]
    if settings.quick:
        notes.append(f"Quick: at most {QUICK_TOKENS} tokens per case; these are not the speeds of real sizes.")
    if not settings.compiled:
        notes.append("torch.compile is not timed; --compile adds it.")
    return {
        **provenance(settings.device, liger_kernel=_liger_version()),
        "dtype": _name(settings.dtype),
        "quick": settings.quick,
        "notes": notes,
    }


def _liger_version() -> str:
    if not devices.is_installed("liger_kernel"):
        return "not installed"
    try:
        return metadata.version("liger_kernel")
    except metadata.PackageNotFoundError:  # imported from a folder, not installed
        return "unknown version"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- one case


def _row(op: Op, case: Values, settings: OpsSettings) -> Document:
    device = settings.device
    make = functools.partial(op.make, **case, dtype=settings.dtype, device=device)
    torch.manual_seed(0)
    values = make()
    choice = op.choose(**values)
    verdict = guarded(lambda: judge_call(op, values, choice.backend, home=devices.fp64_home(device)))
    row: Document = {
        "op": op.name,
        "case": describe(case),
        "backend": choice.backend,
        "passed_over": choice.reasons,
        "passed": verdict.passed,
        "problem": verdict.problem,
    }
    if not verdict.passed:
        return row
    # The check fragments the allocator's memory, in which tensors of a few hundred MB are up to 10% slower.
    del values
    devices.empty_cache(device)
    torch.manual_seed(0)
    values = make()
    arguments = {n: v.clone() if n in op.mutates and v is not None else v for n, v in values.items()}
    num_bytes = op.bytes(values, tuple(answers(op, op.reference, arguments)))
    buffers = [arguments, *(make() for _ in range(num_buffers(num_bytes, device) - 1))]
    short = is_short(num_bytes, device)
    peers = [p for p in peers_of(op, values, compiled=settings.compiled) if not (short and p.through_autograd)]
    # A graph cannot record autograd: where a peer needs it, the whole row is timed call by call.
    recorded = not any(peer.through_autograd for peer in peers)
    calls = [functools.partial(op, **b, backend=choice.backend) for b in buffers]
    timing = measure(calls, device, short=short, recorded=recorded)
    copy = _copy(num_bytes, device, recorded)
    scale = _Scale(
        num_bytes=num_bytes,
        copy_us=copy.us,
        flops=0 if op.flops is None else op.flops(arguments),
        matmul_rate=0.0 if op.flops is None else _matmul_rate(settings.dtype, device),
    )
    row |= {"error_ratio": verdict.ratio, "bytes": num_bytes, "timing": timing.how, **scale.speeds(timing)}
    row |= {"copy_us": copy.us, "copy_tb_s": num_bytes / copy.us / 1e6}
    row |= {"flops": scale.flops, "matmul_tflop_s": scale.matmul_rate / 1e12} if scale.flops else {}
    row |= workspace(op, calls[0], device)
    torch.compiler.reset()
    gold = functools.cache(lambda: _gold(op, values, device))
    row["peers"] = []
    for peer in peers:
        peer_timing = _time_peer(peer, [values, *buffers[1:]], gold, device, short, recorded)
        speeds = {"note": peer_timing} if isinstance(peer_timing, str) else scale.speeds(peer_timing)
        row["peers"].append({"label": peer.label, **speeds})
    return row


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """The work of a row, which turns times into speeds. flops is 0 for an operator that is bound by memory."""

    num_bytes: int
    copy_us: float
    flops: int
    matmul_rate: float

    def speeds(self, timing: Timing) -> Document:
        us = timing.us
        speeds = {"us": us, "tb_s": self.num_bytes / us / 1e6, "share_of_copy": self.copy_us / us}
        if self.flops:
            rate = self.flops / us * 1e6
            speeds |= {"tflop_s": rate / 1e12, "share_of_matmul": rate / self.matmul_rate}
        return speeds if timing.hot_us is None else speeds | {"hot_us": timing.hot_us}


def workspace(op: Op, call: Callable[[], Any], device: str) -> Document:
    """Return the bytes of a call's results and the peak memory beyond arguments and results.

    Empty for the CPU, where memory is not counted, and for operators that work in place.
    """
    module = devices.accelerator(device)
    if module is None or op.mutates:
        return {}
    devices.synchronize(device)
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    results = call()
    devices.synchronize(device)
    result_bytes = module.memory_allocated() - before
    del results
    return {"result_bytes": result_bytes, "workspace_bytes": module.max_memory_allocated() - before - result_bytes}


_matmul_rate = functools.lru_cache(matmul_rate)


@functools.lru_cache(maxsize=1)
def _copy(num_bytes: int, device: str, recorded: bool) -> Timing:
    """Time a copy that reads and writes `num_bytes` in total, in the same way as the operator.

    The result is the faster of a memory copy and an element-wise kernel, which wins at some sizes.
    """
    pairs = [
        [torch.zeros(num_bytes // 8, dtype=torch.int32, device=device) for _ in range(2)]
        for _ in range(num_buffers(num_bytes, device))
    ]
    methods = (lambda to, source: to.copy_(source), lambda to, source: torch.bitwise_not(source, out=to))
    short = is_short(num_bytes, device)
    timings = [
        measure([functools.partial(method, *pair) for pair in pairs], device, short=short, recorded=recorded)
        for method in methods
    ]
    return min(timings, key=lambda timing: timing.us)


def _time_peer(
    peer: Peer,
    buffers: Sequence[Values],
    gold: Callable[[], list[Tensor]],
    device: str,
    short: bool,
    recorded: bool,
) -> Timing | str:
    """Return the peer's time, or why there is none. gold: returns the expected outputs."""
    try:
        bound = [peer.bind(values) for values in buffers]
        wrong = None if peer.is_contract else _peer_problem(bound[0], peer.select_expected(gold()))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Graph is empty.*")  # the error that follows gives the reason
            return wrong or measure([b.run for b in bound], device, short=short, recorded=recorded)
    except Exception as error:  # an exception of another library must not end the benchmark
        return f"did not run: {first_line(error)}"


def _gold(op: Op, values: Values, device: str) -> list[Tensor]:
    home = devices.fp64_home(device)
    moved = {n: v.to(home, copy=True) if isinstance(v, Tensor) else v for n, v in values.items()}
    return answers(op, op.reference, widened(moved))


def _peer_problem(bound: Bound, gold: Sequence[Tensor]) -> str | None:
    for actual, right in zip(bound.outputs(bound.run()), gold, strict=True):
        if not actual.is_floating_point():
            wrong = int((actual.to(right.device) != right).sum())
            if wrong:
                return f"wrong output: {wrong} of {right.numel()} elements differ"
            continue
        error = (actual.to(right.device).double() - right).square().mean().sqrt() / right.square().mean().sqrt()
        if not error <= PEER_ERROR * torch.finfo(actual.dtype).eps:
            return f"wrong output: relative error {error:.2g}"
    return None
