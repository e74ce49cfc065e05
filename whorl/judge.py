"""Whether an answer is right: its error against fp64 is at most twice the reference's own rounding error.

Tests, the self-test, benchmarks and converters of training judge by the same functions.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl import device as devices
from whorl.cases import Values
from whorl.ops import Op

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
    wide = widened(convert(there, Tensor.clone))  # codes that are written are nobody else's
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


def guarded(check: Callable[[], Verdict]) -> Verdict:
    """A backend that raises has failed its case; the others still get their turn."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*the torch reference runs on.*")
            return check()
    except Exception as error:  # whatever a vendor's kernel raises belongs in the report
        return Verdict(ratio=math.inf, problem=f"{type(error).__name__}: {str(error).splitlines()[0]}")
