"""The rule for correct outputs: the error against fp64 is at most twice the rounding error of the reference.

Tests, the self-test, benchmarks and the converters for training judge by the same functions. Names: *actual* is the
output under test; *reference* is the plain torch code in the same dtype; *gold* is the same code in fp64.
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
# Added to the reference's error, in eps of the output's size. With 1 / 16 a sum accumulated in bf16 would pass.
FLOOR = 1 / 128
# The floor where the reference may be exact by luck: with few elements, and in fp32. It allows one rounding, since
# LIMIT times it is eps / 2. In fp32 there is no coarser dtype that a sum could have been accumulated in by mistake.
FEW, FLOOR_OF_FEW = 32, 1 / 4
# The floor of an output that an operator declares a total: the roundings of its terms add up, and a single number of
# the reference may be close to gold by luck.
FLOOR_OF_TOTAL = 4
# The error of a single element, which the mean over many would hide, may be this many times the reference's largest.
OUTLIER = 8.0
# Limits for the reference on an accelerator against the reference on the host: sums run in another order, and a few
# values lie so close between two quantised codes that they round the other way.
ELSEWHERE, ELSEWHERE_CODES = 8.0, 0.01
# The limit for fp32 kernels on an accelerator: they use fast exponentials, and without tensor cores they add products
# one by one, where the vendor's library in the reference accumulates several partial sums. Observed: 2.6.
IN_FP32 = 4.0
# Floating-point arguments that are never differentiated: tables, and the bias that only selects experts.
CONSTANTS = ("cos_sin", "bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of a check. ratio: error over the reference's error; problem: None, or what is wrong."""

    ratio: float = 0.0
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None


def error_ratio(actual: Tensor, reference: Tensor, gold: Tensor, *, is_total: bool = False) -> float:
    """Return rms(actual - gold) / (rms(reference - gold) + floor); gold is fp64, the others are rounded outputs."""
    eps = torch.finfo(reference.dtype).eps
    is_lucky = gold.numel() < FEW or reference.dtype == torch.float32
    floor = eps * _rms(gold) * (FLOOR_OF_TOTAL if is_total else FLOOR_OF_FEW if is_lucky else FLOOR)
    error, allowed = _rms(actual.double() - gold), _rms(reference.double() - gold) + floor
    return error / allowed if allowed else math.inf if error else 0.0


def judge(
    actual: Sequence[Tensor],
    reference: Sequence[Tensor],
    gold: Sequence[Tensor],
    limit: float = LIMIT,
    fp32_limit: float | None = None,
    totals: Sequence[int] = (),
) -> Verdict:
    """Judge the outputs of one call: returns the worst ratio and the first problem.

    limit: the largest ratio allowed; fp32_limit: the same for fp32 outputs, by default `limit`; totals: indices of
    outputs that are one number each, as the operator declares.
    """
    if len(actual) != len(reference):
        return Verdict(ratio=math.inf, problem=f"{len(actual)} outputs, expected {len(reference)}")
    ratio = 0.0
    for i, (a, r, g) in enumerate(zip(actual, reference, gold, strict=True)):
        allowed = fp32_limit if fp32_limit is not None and r.dtype == torch.float32 else limit
        verdict = _judge_output(a, r, g, allowed, i in totals)
        ratio = max(ratio, verdict.ratio)
        if not verdict.passed:
            return Verdict(ratio=ratio, problem=f"output {i}: {verdict.problem}")
    return Verdict(ratio=ratio)


def _judge_output(actual: Tensor, reference: Tensor, gold: Tensor, limit: float, is_total: bool) -> Verdict:
    if actual.shape != reference.shape or actual.dtype != reference.dtype:
        seen, expected = ((list(t.shape), t.dtype) for t in (actual, reference))
        return Verdict(ratio=math.inf, problem=f"is {seen}, expected {expected}")
    if not actual.is_floating_point() or actual.dtype.itemsize == 1:  # indices and codes must be equal
        wrong = int((actual != reference).sum())
        if limit == ELSEWHERE and actual.dtype.itemsize == 1 and wrong <= max(4, ELSEWHERE_CODES * actual.numel()):
            return Verdict()
        return Verdict(ratio=math.inf if wrong else 0.0, problem=f"{wrong} elements differ" if wrong else None)
    finite = reference.isfinite()
    if not torch.equal(actual.isfinite(), finite) or not torch.equal(actual.isnan(), reference.isnan()):
        return Verdict(ratio=math.inf, problem="inf or NaN in other places than in the reference")
    if not finite.any():
        return Verdict()
    actual, reference, gold = actual[finite], reference[finite], gold[finite]
    ratio = error_ratio(actual, reference, gold, is_total=is_total)
    if is_total and ratio <= limit:
        return Verdict(ratio=ratio)
    if not ratio <= limit:
        error, own_error = _rms(actual.double() - gold), _rms(reference.double() - gold)
        return Verdict(ratio=ratio, problem=f"error is {error:.3g}, {ratio:.2f} times the reference's {own_error:.3g}")
    worst, own_error = ((t.double() - gold).abs().max().item() for t in (actual, reference))
    if worst > OUTLIER * limit / LIMIT * own_error + torch.finfo(actual.dtype).eps * gold.abs().max().item():
        return Verdict(ratio=ratio, problem=f"an element is off by {worst:.3g}, the reference by {own_error:.3g}")
    return Verdict(ratio=ratio)


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def answers(op: Op, run: Callable[..., Any], values: Values) -> list[Tensor]:
    """Return the outputs of `run(**values)` as a list, without absent ones (None).

    For an operator that works in place these are the arguments it wrote.
    """
    out = run(**values)
    if op.mutates:
        out = [values[n] for n in op.mutates]
    return [t for t in (out if isinstance(out, tuple | list) else (out,)) if t is not None]


def convert(values: Values, convert_tensor: Callable[[Tensor], Tensor]) -> Values:
    """Return the arguments with every tensor converted."""
    return {n: convert_tensor(v) if isinstance(v, Tensor) else v for n, v in values.items()}


def widened(values: Values) -> Values:
    """Return the arguments with every floating-point tensor in fp64."""
    return convert(values, lambda t: t.double() if t.is_floating_point() else t)


@contextlib.contextmanager
def adding_alike(values: Values) -> Iterator[None]:
    """Let the reference's products accumulate as the tensor cores of an NVIDIA GPU do, which truncate partial sums.

    The reference multiplies in fp32. Where an argument has 16 bits, it may use tf32 inside this context: 16-bit values
    are exact in tf32, and tensor cores multiply exactly, so only the accumulation differs from fp32.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    is_short = any(isinstance(v, Tensor) and v.dtype in (torch.bfloat16, torch.float16) for v in values.values())
    torch.backends.cuda.matmul.allow_tf32 = before or is_short
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def reference_device(backend: str, device: str) -> str:
    """Return the device to compute the reference on: that of the backend, or the host when the reference is judged."""
    return devices.HOST if backend == "torch" else devices.fp64_home(device)


def judge_call(op: Op, values: Values, backend: str, *, home: str | None = None) -> Verdict:
    """Judge one call in `backend` against the reference on device `home`, by default the device of the values.

    The verdict is negative, too, if the call wrote to an argument that it must not change.
    """
    before = convert(values, Tensor.clone)
    arguments = convert(values, Tensor.clone) if op.mutates else values
    actual = answers(op, lambda **v: op(**v, backend=backend), arguments)
    changed = [n for n, v in values.items() if isinstance(v, Tensor) and not torch.equal(v, before[n])]
    if changed:
        return Verdict(ratio=math.inf, problem=f"wrote to arguments that it must not change: {', '.join(changed)}")
    moved = before if home is None else convert(before, lambda t: t.to(home))
    wide = widened(convert(moved, Tensor.clone))  # cloned: integer codes are not widened, and may be written
    with adding_alike(moved):
        reference = answers(op, op.reference, moved)
    gold = answers(op, op.reference, wide)
    limits = _limits(values, backend, home)
    return judge([a.to(g.device) for a, g in zip(actual, gold, strict=False)], reference, gold, *limits, op.totals)


def _limits(values: Values, backend: str, home: str | None) -> tuple[float, float]:
    """Return the limits for outputs in general and for outputs in fp32."""
    places = {v.device.type for v in values.values() if isinstance(v, Tensor)}
    if backend == "torch":
        return (ELSEWHERE, ELSEWHERE) if home and places != {home} else (LIMIT, LIMIT)
    return LIMIT, LIMIT if places == {devices.HOST} else IN_FP32


def judge_gradient(op: Op, values: Values, backend: str, *, home: str | None = None) -> Verdict:
    """Judge the gradients of one call, in two steps.

    First the gradient that the operator declares, computed in torch, is judged against autograd of the reference. Then
    the backend's gradients are judged against the declared ones, because those are what it implements: they start from
    rounded outputs of the forward, where autograd of the reference has them unrounded.
    """
    names = [n for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point() and n not in CONSTANTS]
    moved = values if home is None else convert(values, lambda t: t.to(home))
    outputs = [o for o in answers(op, op.reference, moved) if o.is_floating_point()]
    grads = [torch.randn(o.shape, dtype=o.dtype).to(o.device) for o in outputs]  # the same numbers on every device
    gold = _gradients(op, op.reference, widened(moved), names, [g.double() for g in grads])
    with adding_alike(moved):
        reference = _gradients(op, op.reference, moved, names, grads)
        declared = _gradients(op, functools.partial(op, backend="torch"), moved, names, grads)
    verdict = judge(declared, reference, gold, ELSEWHERE)
    if not verdict.passed:
        return Verdict(ratio=verdict.ratio, problem=f"the declared gradient: {verdict.problem}")
    actual = _gradients(op, functools.partial(op, backend=backend), values, names, grads)
    limits = _limits(values, backend, home)
    return judge([a.to(g.device) for a, g in zip(actual, gold, strict=True)], declared, gold, *limits)


def _gradients(
    op: Op, run: Callable[..., Any], values: Values, names: Sequence[str], grads: Sequence[Tensor]
) -> list[Tensor]:
    leaves = {n: v.detach().requires_grad_() if n in names else v for n, v in values.items()}
    outs = [o for o in answers(op, run, leaves) if o.is_floating_point()]
    grads = [g.to(o.device) for o, g in zip(outs, grads, strict=True)]
    return list(torch.autograd.grad(outs, [leaves[n] for n in names], grads))


def guarded(check: Callable[[], Verdict]) -> Verdict:
    """Run a check; an exception of a backend is a failed case, so that the other cases still run."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*the torch reference runs on.*")
            return check()
    except Exception as error:  # a vendor's kernel may raise anything; it belongs in the report
        return Verdict(ratio=math.inf, problem=f"{type(error).__name__}: {str(error).splitlines()[0]}")
