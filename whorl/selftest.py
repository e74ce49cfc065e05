"""`whorl selftest`: every operator, every backend this machine has, every case, under one rule.

The rule: an answer's error against fp64 is at most twice the reference's own rounding error in the same dtype.
Tests and benchmarks judge by the same functions.
"""

import contextlib
import functools
import inspect
import itertools
import math
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whorl import device as devices
from whorl.ops import OPS, Op

Values = dict[str, Any]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LIMIT = 2.0
# Added to the reference's error, relative to the answer: at eps / 16 a sum kept in bf16 would pass.
FLOOR = 1 / 128
# One rounding, half of LIMIT x eps / 2: with few elements the reference may be exact by luck, and so may its sums be
# in fp32, where there is no coarser dtype that they could have been kept in by mistake.
FEW, FLOOR_OF_FEW = 32, 1 / 4
# Of a total, which an operator states: the last digits of its terms add up, and one number is close to gold by luck.
FLOOR_OF_TOTAL = 4
# A single element, lost among many in the mean, may be this many times the reference's largest error off.
OUTLIER = 8.0
# The reference on an accelerator against the reference on the host: sums run in another order, and of the codes of a
# quantisation a few lie between two.
ELSEWHERE, ELSEWHERE_CODES = 8.0, 0.01
# What a kernel on an accelerator gives in fp32: its exponentials are fast ones, and without tensor cores it adds one
# product after the other, where the vendor's library, in the reference, adds several sums side by side. Observed: 2.6.
IN_FP32 = 4.0
CONSTANTS = ("cos_sin", "bias")  # floating point, but never differentiated: tables, and what only chooses experts
SPEED_TOKENS = 256  # where there is no accelerator the case timed is cut down to these


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`ratio`: error over the reference's own; `problem`: None, or what is wrong."""

    ratio: float = 0.0
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None


def error_ratio(got: Tensor, reference: Tensor, gold: Tensor, *, is_total: bool = False) -> float:
    """rms(got - gold) over rms(reference - gold); both are rounded answers, gold is in fp64."""
    eps = torch.finfo(reference.dtype).eps
    is_lucky = gold.numel() < FEW or reference.dtype == torch.float32
    floor = eps * _rms(gold) * (FLOOR_OF_TOTAL if is_total else FLOOR_OF_FEW if is_lucky else FLOOR)
    error, allowed = _rms(got.double() - gold), _rms(reference.double() - gold) + floor
    return error / allowed if allowed else math.inf if error else 0.0


def judge(
    got: Sequence[Tensor],
    reference: Sequence[Tensor],
    gold: Sequence[Tensor],
    limit: float = LIMIT,
    fp32_limit: float | None = None,
    totals: Sequence[int] = (),
) -> Verdict:
    """The verdict on the outputs of one call: the worst ratio, and the first problem. fp32_limit: `limit`, of fp32;
    totals: which of them are one number each, as an operator states."""
    if len(got) != len(reference):
        return Verdict(ratio=math.inf, problem=f"{len(got)} outputs, expected {len(reference)}")
    ratio = 0.0
    for i, (g, r, o) in enumerate(zip(got, reference, gold, strict=True)):
        allowed = fp32_limit if fp32_limit is not None and r.dtype == torch.float32 else limit
        verdict = _judge_output(g, r, o, allowed, i in totals)
        ratio = max(ratio, verdict.ratio)
        if not verdict.passed:
            return Verdict(ratio=ratio, problem=f"output {i}: {verdict.problem}")
    return Verdict(ratio=ratio)


def _judge_output(got: Tensor, reference: Tensor, gold: Tensor, limit: float, is_total: bool) -> Verdict:
    if got.shape != reference.shape or got.dtype != reference.dtype:
        found, wanted = ((list(t.shape), t.dtype) for t in (got, reference))
        return Verdict(ratio=math.inf, problem=f"is {found}, expected {wanted}")
    if not got.is_floating_point() or got.dtype.itemsize == 1:  # choices and codes are equal or wrong
        wrong = int((got != reference).sum())
        if limit == ELSEWHERE and got.dtype.itemsize == 1 and wrong <= max(4, ELSEWHERE_CODES * got.numel()):
            return Verdict()
        return Verdict(ratio=math.inf if wrong else 0.0, problem=f"{wrong} elements differ" if wrong else None)
    finite = reference.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(got.isnan(), reference.isnan()):
        return Verdict(ratio=math.inf, problem="inf or NaN where the reference has none, or the other way round")
    if not finite.any():
        return Verdict()
    got, reference, gold = got[finite], reference[finite], gold[finite]
    ratio = error_ratio(got, reference, gold, is_total=is_total)
    if is_total and ratio <= limit:
        return Verdict(ratio=ratio)
    if not ratio <= limit:
        error, own = _rms(got.double() - gold), _rms(reference.double() - gold)
        return Verdict(ratio=ratio, problem=f"error {error:.3g}, the reference's own is {own:.3g}: {ratio:.2f} times")
    worst, own = ((t.double() - gold).abs().max().item() for t in (got, reference))
    if worst > OUTLIER * limit / LIMIT * own + torch.finfo(got.dtype).eps * gold.abs().max().item():
        return Verdict(ratio=ratio, problem=f"one element is {worst:.3g} off, the reference's worst is {own:.3g}")
    return Verdict(ratio=ratio)


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


# ---- one case


def answers(op: Op, run: Callable[..., Any], values: Values) -> list[Tensor]:
    """The outputs of `run(**values)`; for an operator that works in place the arguments it wrote."""
    out = run(**values)
    if op.mutates:
        out = [values[n] for n in op.mutates]
    return [t for t in (out if isinstance(out, tuple | list) else (out,)) if t is not None]


def convert(values: Values, convert_tensor: Callable[[Tensor], Tensor]) -> Values:
    return {n: convert_tensor(v) if isinstance(v, Tensor) else v for n, v in values.items()}


def widened(values: Values) -> Values:
    return convert(values, lambda t: t.double() if t.is_floating_point() else t)


@contextlib.contextmanager
def adding_alike(values: Values) -> Iterator[None]:
    """Let a reference over 16-bit values add as kernels do on an NVIDIA GPU: tensor cores cut sums off, not round them.

    Such values are exact in tf32 and so are their products; only the sum differs from the one in fp32.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    is_short = any(isinstance(v, Tensor) and v.dtype in (torch.bfloat16, torch.float16) for v in values.values())
    torch.backends.cuda.matmul.allow_tf32 = before or is_short
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def home_of(backend: str, device: str) -> str:
    """Where the reference is computed: beside what is judged, but that of the reference itself on the host."""
    return devices.HOST if backend == "torch" else devices.fp64_home(device)


def judge_call(op: Op, values: Values, backend: str, *, home: str | None = None) -> Verdict:
    """One call in `backend`, against the reference computed on the device `home`: where the values are, unless said."""
    before = convert(values, Tensor.clone)
    mine = convert(values, Tensor.clone) if op.mutates else values
    got = answers(op, lambda **v: op(**v, backend=backend), mine)
    kept = [n for n, v in values.items() if isinstance(v, Tensor) and not torch.equal(v, before[n])]
    if kept:
        return Verdict(ratio=math.inf, problem=f"wrote to its arguments {', '.join(kept)}")
    there = before if home is None else convert(before, lambda t: t.to(home))
    wide = widened(there)
    with adding_alike(there):
        reference = answers(op, op.reference, there)
    gold = answers(op, op.reference, wide)
    limits = _limits_there(values, backend, home)
    return judge([g.to(o.device) for g, o in zip(got, gold, strict=False)], reference, gold, *limits, op.totals)


def _limits_there(values: Values, backend: str, home: str | None) -> tuple[float, float]:
    """For outputs, and for those in fp32."""
    places = {v.device.type for v in values.values() if isinstance(v, Tensor)}
    if backend == "torch":
        return (ELSEWHERE, ELSEWHERE) if home and places != {home} else (LIMIT, LIMIT)
    return LIMIT, LIMIT if places == {devices.HOST} else IN_FP32


def judge_gradient(op: Op, values: Values, backend: str, *, home: str | None = None) -> Verdict:
    """Gradients that arrive through autograd: those the operator states by those torch finds in the reference.

    A backend is judged by what it is given to compute: the stated gradients, from a forward that was rounded.
    """
    wanted = [n for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point() and n not in CONSTANTS]
    there = values if home is None else convert(values, lambda t: t.to(home))
    outputs = [o for o in answers(op, op.reference, there) if o.is_floating_point()]
    grads = [torch.randn(o.shape, dtype=o.dtype).to(o.device) for o in outputs]  # the same numbers on every device
    gold = _gradients(op, op.reference, widened(there), wanted, [g.double() for g in grads])
    with adding_alike(there):
        reference = _gradients(op, op.reference, there, wanted, grads)
        stated = _gradients(op, functools.partial(op, backend="torch"), there, wanted, grads)
    verdict = judge(stated, reference, gold, ELSEWHERE)
    if not verdict.passed:
        return Verdict(ratio=verdict.ratio, problem=f"the gradient as stated: {verdict.problem}")
    got = _gradients(op, functools.partial(op, backend=backend), values, wanted, grads)
    limits = _limits_there(values, backend, home)
    return judge([g.to(o.device) for g, o in zip(got, gold, strict=True)], stated, gold, *limits)


def _gradients(
    op: Op, run: Callable[..., Any], values: Values, wanted: Sequence[str], grads: Sequence[Tensor]
) -> list[Tensor]:
    leaves = {n: v.detach().requires_grad_() if n in wanted else v for n, v in values.items()}
    outs = [o for o in answers(op, run, leaves) if o.is_floating_point()]
    grads = [g.to(o.device) for o, g in zip(outs, grads, strict=True)]
    return list(torch.autograd.grad(outs, [leaves[n] for n in wanted], grads))


# ---- the report


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    operator: str
    backend: str
    what: str
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One operator in one backend."""

    operator: str
    backend: str
    passed: int
    failed: int
    skipped: Mapping[str, int]  # cases this backend does not take, by reason
    worst_ratio: float
    speed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
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
    """Try everything that can run on `device`, by default the best this machine has; a progress bar on a terminal.

    jobs: processes side by side; on an accelerator the time goes into compiling kernels.
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


def _run_named(name: str, device: str) -> Results:
    return _run_operator(OPS[name], device)


def _run_operator(op: Op, device: str) -> Results:
    rows: list[Row] = []
    failures: list[Failure] = []
    absent: dict[str, str] = {}
    for backend in ("torch", *op.impls):
        reason = devices.unavailable(backend, device, asked=True)
        if reason is not None:
            absent[backend] = reason
            continue
        row, wrong = _run_backend(op, backend, device)
        rows.append(row)
        failures += wrong
    return rows, failures, absent


def _run_backend(op: Op, backend: str, device: str) -> tuple[Row, list[Failure]]:
    passed, skipped, ratios = 0, Counter[str](), [0.0]
    failures: list[Failure] = []
    for what, reason, check in _checks(op, backend, device):
        if reason is not None:
            skipped[reason] += 1
            continue
        verdict = guarded(check)
        ratios.append(verdict.ratio)
        if verdict.problem is None:
            passed += 1
        else:
            failures.append(Failure(operator=op.name, backend=backend, what=what, problem=verdict.problem))
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
    """Every case in every dtype: its name, why it is left out or None, and what to do."""
    has_gradient = not op.forward_only and not op.name.endswith("_backward")
    defaults = {p.name: p.default for p in inspect.signature(op.reference).parameters.values()}
    for case in op.cases:
        for dtype in DTYPES:
            torch.manual_seed(0)
            values = op.make(**case, dtype=dtype, device=devices.HOST)  # the same numbers on every device
            values = convert(values, lambda t: t.to(device))
            reason = None if backend == "torch" else op.impls[backend].accepts(**defaults | values)
            what = f"{describe(case)}, {str(dtype).removeprefix('torch.')}"
            home = home_of(backend, device)
            yield what, reason, functools.partial(judge_call, op, values, backend, home=home)
            if has_gradient:
                gradient = functools.partial(judge_gradient, op, values, backend, home=home)
                yield f"gradient of {what}", reason, gradient


def guarded(check: Callable[[], Verdict]) -> Verdict:
    """A backend that raises has failed its case; the others still get their turn."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*the torch reference runs on.*")
            return check()
    except Exception as error:  # whatever a vendor's kernel raises belongs in the report
        return Verdict(ratio=math.inf, problem=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _speed(op: Op, backend: str, device: str) -> str:
    from whorl.bench.timing import bandwidth, is_short, measure

    if not op.bench_cases or devices.is_interpreting():
        return ""
    case = op.bench_cases[0]
    if devices.accelerator(device) is None:  # of products the host does seconds of work for each token
        case = op.cases[1] if op.flops is not None else shrink(case, SPEED_TOKENS)
    values = op.make(**case, dtype=torch.bfloat16, device=device)
    num_bytes = op.bytes(values, tuple(answers(op, op.reference, values)))
    # References read sizes back from the device, which no graph can record.
    runs, short = [lambda: op(**values, backend=backend)], is_short(num_bytes, device)
    timing = measure(runs, device, short=short, recorded=backend != "torch")
    return f"{timing.us:.1f} us, {bandwidth(num_bytes, timing.us)} ({describe(case)}, bfloat16)"


def shrink(case: Values, tokens: int) -> Values:
    """The case with no more rows than `tokens`; a row keeps its width."""
    small = dict(case)
    if "tokens" in case:
        small["tokens"] = tuple(min(n, tokens) for n in case["tokens"])
    elif "shape" in case:
        small["shape"] = (*(min(n, tokens) for n in case["shape"][:-1]), case["shape"][-1])
    return small


def describe(case: Values) -> str:
    """A case as people write it: sizes joined by x, everything else by name."""
    parts = []
    for name, value in case.items():
        if name in ("tokens", "shape"):
            parts.append(f"{'x'.join(map(str, value))}{' tokens' if name == 'tokens' else ''}")
        elif name == "heads":
            parts.append(f"{value}{'' if case.get('kv_heads') is None else '+' + str(case['kv_heads'])} heads")
        elif name == "dim":
            parts.append(f"of {value}")
        elif name != "kv_heads":
            parts.append(f"{name} {value}")
    return ", ".join(parts).replace(" heads, of ", " heads x ")


def _rule(device: str) -> str:
    rule = f"error against fp64 at most {LIMIT:g} times the reference's own"
    if device == devices.HOST:
        return rule
    return f"{rule}, {IN_FP32:g} times in fp32; the reference here {ELSEWHERE:g} times that on the host"


def render(report: Report) -> str:
    """The report as text to paste into a bug report."""
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
        lines += ["", "not here:", *(f"  {backend}: {why}" for backend, why in report.absent.items())]
    if report.failures:
        lines += ["", "failures:", *(f"  {f.operator}/{f.backend}, {f.what}: {f.problem}" for f in report.failures)]
    total, failed = sum(r.passed + r.failed for r in report.rows), len(report.failures)
    lines += ["", f"{total - failed} of {total} checks passed" + ("." if not failed else f", {failed} failed.")]
    return "\n".join(lines)
