"""`whorl selftest`: checks every case of every operator in every backend of this machine by one rule.

`whorl.judge` has the rule: the error against fp64 is at most twice the rounding error of the reference.
"""

import functools
import inspect
import itertools
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from whorl import device as devices
from whorl.cases import describe, shrink
from whorl.judge import (
    ELSEWHERE,
    IN_FP32,
    LIMIT,
    Verdict,
    answers,
    convert,
    guarded,
    judge_call,
    judge_gradient,
    reference_device,
)
from whorl.ops import OPS, Op
from whorl.timing import bandwidth, is_short, measure

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPEED_TOKENS = 256  # without an accelerator the timed case has at most this many tokens


# ---- the report


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A failed check. what: the case and dtype; problem: what is wrong."""

    operator: str
    backend: str
    what: str
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The checks of one operator in one backend."""

    operator: str
    backend: str
    passed: int
    failed: int
    skipped: Mapping[str, int]  # number of cases that this backend does not accept, by reason
    worst_ratio: float
    speed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of a self-test."""

    device: str
    device_name: str
    versions: Mapping[str, str]
    rows: Sequence[Row]
    failures: Sequence[Failure]
    absent: Mapping[str, str]  # backends that cannot run here, with the reason

    @property
    def passed(self) -> bool:
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "limit": LIMIT, **asdict(self)}


def run(device: str | None = None, ops: Mapping[str, Op] = OPS, jobs: int = 1) -> Report:
    """Check every backend that can run on `device`, by default the best one here; a terminal shows a progress bar.

    jobs: parallel processes, which help on an accelerator, where most of the time is spent compiling kernels.
    """
    from whorl import __version__

    device = devices.require(device or devices.default_device())
    rows: list[Row] = []
    failures: list[Failure] = []
    absent: dict[str, str] = {}
    for more_rows, more_failures, more_absent in _tracked(_run_all(ops, device, jobs), len(ops)):
        rows += more_rows
        failures += more_failures
        absent |= more_absent
    failed = {(f.operator, f.backend) for f in failures}
    speeds = ("" if (r.operator, r.backend) in failed else _speed(ops[r.operator], r.backend, device) for r in rows)
    return Report(
        device=device,
        device_name=devices.device_name(device),
        versions={"whorl": __version__, **devices.versions()},
        rows=[replace(row, speed=speed) for row, speed in zip(rows, speeds, strict=True)],
        failures=failures,
        absent=absent,
    )


def default_jobs(device: str) -> int:
    """Return the number of processes for `device`: 1 on the CPU, else up to 8."""
    return 1 if devices.accelerator(device) is None else min(8, os.cpu_count() or 1)


Results = tuple[list[Row], list[Failure], dict[str, str]]


def _run_all(ops: Mapping[str, Op], device: str, jobs: int) -> Iterator[Results]:
    if jobs == 1:
        yield from (_run_operator(op, device) for op in ops.values())
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_run_named, ops, itertools.repeat(device))


def _tracked(results: Iterator[Results], total: int) -> Iterator[Results]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return iter(track(results, "operators", total, console=console, transient=True, disable=not sys.stderr.isatty()))


def _run_named(name: str, device: str) -> Results:  # runs in a process that has its own `OPS`
    return _run_operator(OPS[name], device)


def _run_operator(op: Op, device: str) -> Results:
    rows: list[Row] = []
    failures: list[Failure] = []
    absent: dict[str, str] = {}
    for backend in ("torch", *op.impls):
        reason = devices.unavailable(backend, device, by_name=True)
        if reason is not None:
            absent[backend] = reason
            continue
        row, new_failures = _run_backend(op, backend, device)
        rows.append(row)
        failures += new_failures
    return rows, failures, absent


def _run_backend(op: Op, backend: str, device: str) -> tuple[Row, list[Failure]]:
    passed, skipped, ratios = 0, Counter[str](), [0.0]
    failures: list[Failure] = []
    for name, reason, check in _checks(op, backend, device):
        if reason is not None:
            skipped[reason] += 1
            continue
        verdict = guarded(check)
        ratios.append(verdict.ratio)
        if verdict.problem is None:
            passed += 1
        else:
            failures.append(Failure(operator=op.name, backend=backend, what=name, problem=verdict.problem))
    row = Row(
        operator=op.name,
        backend=backend,
        passed=passed,
        failed=len(failures),
        skipped=dict(skipped),
        worst_ratio=max(ratios),
    )
    return row, failures


def _checks(op: Op, backend: str, device: str) -> Iterator[tuple[str, str | None, Callable[[], Verdict]]]:
    """Yield for every case in every dtype its name, why it is skipped (or None), and the check itself."""
    has_gradient = not op.forward_only and not op.name.endswith("_backward")
    defaults = {p.name: p.default for p in inspect.signature(op.reference).parameters.values()}
    for case in op.cases:
        for dtype in DTYPES:
            torch.manual_seed(0)
            values = op.make(**case, dtype=dtype, device=devices.HOST)  # the same numbers on every device
            values = convert(values, lambda t: t.to(device))
            reason = None if backend == "torch" else op.impls[backend].accepts(**defaults | values)
            name = f"{describe(case)}, {str(dtype).removeprefix('torch.')}"
            home = reference_device(backend, device)
            yield name, reason, functools.partial(judge_call, op, values, backend, home=home)
            if has_gradient:
                gradient = functools.partial(judge_gradient, op, values, backend, home=home)
                yield f"gradient of {name}", reason, gradient


def _speed(op: Op, backend: str, device: str) -> str:
    """Return time and bandwidth of the first benchmark case as text; "" where there is none, and in the interpreter."""
    if not op.bench_cases or devices.is_interpreting():
        return ""
    case = op.bench_cases[0]
    if devices.accelerator(device) is None:  # on the host matrix products of this size take seconds
        case = op.cases[1] if op.flops is not None else shrink(case, SPEED_TOKENS)
    values = op.make(**case, dtype=torch.bfloat16, device=device)
    num_bytes = op.bytes(values, tuple(answers(op, op.reference, values)))
    # References read sizes back from the device, which a graph cannot record.
    runs, short = [lambda: op(**values, backend=backend)], is_short(num_bytes, device)
    timing = measure(runs, device, short=short, recorded=backend != "torch")
    return f"{timing.us:.1f} us, {bandwidth(num_bytes, timing.us)} ({describe(case)}, bfloat16)"


def _rule(device: str) -> str:
    rule = f"error against fp64 at most {LIMIT:g} times that of the reference"
    if device == devices.HOST:
        return rule
    return f"{rule}, {IN_FP32:g} times in fp32; the reference here at most {ELSEWHERE:g} times that on the host"


def render(report: Report) -> str:
    """Return the report as text to paste into a bug report."""
    width = 2 + max(len(name) for name in ("operator", *(row.operator for row in report.rows)))
    lines = [
        "whorl selftest",
        f"device    {report.device}: {report.device_name}",
        "versions  " + ", ".join(f"{n} {v}" for n, v in report.versions.items()),
        f"rule      {_rule(report.device)}",
        "",
        f"{'operator':<{width}}{'backend':<11}{'passed':>7}{'failed':>7}{'skipped':>8}{'worst':>7}  speed",
    ]
    for row in report.rows:
        lines.append(
            f"{row.operator:<{width}}{row.backend:<11}{row.passed:>7}{row.failed:>7}"
            f"{sum(row.skipped.values()):>8}{row.worst_ratio:>7.2f}  {row.speed}".rstrip()
        )
    skipped = sorted({(r.backend, why) for r in report.rows for why in r.skipped})
    if skipped:
        lines += ["", "cases skipped because:", *(f"  {backend}: {why}" for backend, why in skipped)]
    if report.absent:
        lines += ["", "backends not available here:"]
        lines += [f"  {backend}: {why}" for backend, why in report.absent.items()]
    if report.failures:
        lines += ["", "failures:", *(f"  {f.operator}/{f.backend}, {f.what}: {f.problem}" for f in report.failures)]
    total, failed = sum(r.passed + r.failed for r in report.rows), len(report.failures)
    lines += ["", f"{total - failed} of {total} checks passed" + ("." if not failed else f", {failed} failed.")]
    return "\n".join(lines)
