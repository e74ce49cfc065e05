"""Every operator, every backend that can run here, every case: one rule for all.

A result may be at most twice as far from the fp64 result as the reference is; nothing else is tuned.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from whorl.device import unavailable
from whorl.ops import OPS, Op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONSTANTS = ("cos_sin",)  # tables: floating point, but never differentiated
Values = dict[str, Any]


def backends_here(op: Op) -> list[str]:
    return ["torch", *(b for b in op.impls if unavailable(b, DEVICE, asked=True) is None)]


def walk(ops: Iterable[Op] = OPS.values(), skip_torch: bool = False) -> list[Any]:
    """(operator, backend, case) for everything that can run here."""
    return [
        pytest.param(op, backend, case, id=f"{op.name}-{backend}-{i}")
        for op in ops
        for backend in backends_here(op)[skip_torch:]
        for i, case in enumerate(op.cases)
    ]


def is_backward(op: Op) -> bool:
    return op.name.endswith("_backward")


DIFFERENTIABLE = [op for op in OPS.values() if not op.mutates and not is_backward(op)]
DTYPES = [
    torch.bfloat16,
    torch.float32,
    pytest.param(torch.float16, marks=pytest.mark.slow),
]


def tensors_of(values: Values) -> dict[str, Tensor]:
    return {n: v for n, v in values.items() if isinstance(v, Tensor)}


def duplicate(values: Values) -> Values:
    """The same arguments in memory of their own, strides and what lies between them included."""

    def own(x: Tensor) -> Tensor:
        memory = x.detach().untyped_storage().clone()
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(memory, x.storage_offset(), x.shape, x.stride())

    return {n: own(v) if isinstance(v, Tensor) else v for n, v in values.items()}


def upcast(values: Values) -> Values:
    return {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in values.items()}


def flat(out: Any) -> list[Tensor | None]:
    return list(out) if isinstance(out, tuple) else [out]


def results(op: Op, function: Callable[..., Any], values: Values) -> list[Tensor | None]:
    """What it returns, or, of an operator that works in place, what it wrote."""
    out = function(**values)
    return [values[n] for n in op.mutates] if op.mutates else flat(out)


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def assert_close(got: list[Any], expected: list[Any], gold: list[Any], what: str = "output") -> None:
    """The rule. `expected` is the reference in the same dtype, `gold` the reference in fp64."""
    for i, (g, e, o) in enumerate(zip(got, expected, gold, strict=True)):
        assert (g is None) == (e is None), f"{what} {i} is {g}, the reference gives {e}"
        if g is None:
            continue
        assert (g.shape, g.dtype) == (e.shape, e.dtype), (
            f"{what} {i}: {g.shape} {g.dtype}, expected {e.shape} {e.dtype}"
        )
        assert g.isfinite().all(), f"{what} {i} is not finite in {(~g.isfinite()).sum()} of {g.numel()} elements"
        mine, its = rms(g.double() - o), rms(e.double() - o)
        bound = 2 * its + torch.finfo(g.dtype).eps / 64 * rms(o)
        assert mine <= bound, f"{what} {i}: error {mine:.3g}, the reference's is {its:.3g}, allowed {bound:.3g}"


def assert_only_stated_written(op: Op, before: Values, after: Values) -> None:
    for name, old in tensors_of(before).items():
        new = after[name].clone() if name in op.mutates else after[name]
        memory, old_memory = (
            torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage()) for t in (after[name], old)
        )
        if name in op.mutates:
            memory, old_memory = memory.clone(), old_memory.clone()
            for m in (memory, old_memory):
                m.as_strided(old.shape, old.stride(), old.storage_offset()).zero_()
        del new
        assert torch.equal(memory.view(torch.uint8), old_memory.view(torch.uint8)), f"{op.name} wrote into {name}"


def check(op: Op, backend: str, values: Values) -> None:
    """One operator on one backend against its reference and the fp64 result."""
    choice = op.choose(**values, backend=backend)
    assert choice.backend == backend
    expected = results(op, op.reference, duplicate(values))
    gold = results(op, op.reference, upcast(duplicate(values)))
    used = duplicate(values)
    got = results(op, lambda **v: op(**v, backend=backend), used)
    assert_close(got, expected, gold)
    for g, e in zip(got, expected, strict=True):
        assert op.mutates or g is None or g.stride() == e.stride(), f"strides {g.stride()}, expected {e.stride()}"
    assert_only_stated_written(op, values, used)


def made(op: Op, backend: str, case: Values, dtype: torch.dtype) -> Values:
    """Arguments of a case; skips only with the backend's own reason."""
    values = op.make(**case, dtype=dtype, device=DEVICE)
    reason = None if backend == "torch" else op.impls[backend].accepts(**values)
    if reason is not None:
        pytest.skip(f"{op.name}/{backend}: {reason}")
    return values


def strided(values: Values) -> Values:
    """The same arguments, no element next to another."""

    def spread(x: Tensor) -> Tensor:
        return torch.stack((x, torch.full_like(x, 77)), -1)[..., 0]

    return {n: spread(v) if isinstance(v, Tensor) else v for n, v in values.items()}


# ---- forward


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "backend", "case"), walk())
def test_agrees_with_the_reference(op: Op, backend: str, case: Values, dtype: torch.dtype) -> None:
    check(op, backend, made(op, backend, case, dtype))


@pytest.mark.parametrize(("op", "backend", "case"), [p for p in walk() if p.id.endswith("-1")])
def test_takes_any_strides(op: Op, backend: str, case: Values) -> None:
    values = strided(op.make(**case, dtype=torch.float32, device=DEVICE))
    if backend != "torch" and op.impls[backend].accepts(**values) is not None:
        assert op.mutates, f"{op.name}/{backend} refuses strides: {op.impls[backend].accepts(**values)}"
        return
    check(op, backend, values)


@pytest.mark.parametrize(("op", "backend", "case"), [p for p in walk() if p.id.endswith("-1")])
def test_gives_the_same_bits_twice(op: Op, backend: str, case: Values) -> None:
    values = made(op, backend, case, torch.bfloat16)
    first, second = (results(op, lambda **v: op(**v, backend=backend), duplicate(values)) for _ in range(2))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_accelerated_backends_take_the_cases(op: Op) -> None:
    """A backend that refuses everything would pass every other test here by being skipped."""
    for backend in backends_here(op)[1:]:
        refused = []
        for case in op.cases:
            values = op.make(**case, dtype=torch.bfloat16, device=DEVICE)
            refused += [r] if (r := op.impls[backend].accepts(**values)) is not None else []
        assert len(refused) <= (1 if op.mutates else 0), refused


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_in_place_equals_functional(op: Op) -> None:
    if not op.mutates:
        pytest.skip("returns its results")
    for case in op.cases:
        values = op.make(**case, dtype=torch.float32, device=DEVICE)
        expected = flat(OPS[op.name.removesuffix("_")](**values, backend="torch"))
        for got, e in zip(results(op, op, duplicate(values)), expected, strict=True):
            assert got is e is None or torch.equal(got, e)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_opcheck(op: Op) -> None:
    """Schema, fake tensors, autograd registration and tracing, on a plain case and on one with every strange stride."""
    sliced = [c for c in op.cases if c.get("sliced")]
    for case in [op.cases[1], *sliced[:1]]:
        values = op.make(**case, dtype=torch.float32, device=DEVICE)
        if not op.mutates and not is_backward(op):
            values = {n: _wanting(n, v) for n, v in values.items()}
        opcheck(op.node, *op._split(values))


# ---- gradients


def _wanting(name: str, value: Any) -> Any:
    wants = isinstance(value, Tensor) and value.is_floating_point() and name not in CONSTANTS
    return value.detach().requires_grad_() if wants else value


COTANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": torch.randn_like,
    "of a sum": lambda o: torch.ones((), dtype=o.dtype, device=o.device).expand(o.shape),  # every stride 0
    "transposed": lambda o: torch.randn(o.shape[::-1], dtype=o.dtype, device=o.device).permute(*range(o.dim())[::-1]),
}


def gradients(function: Callable[..., Any], values: Values, cotangents: list[Tensor | None]) -> list[Tensor | None]:
    values = {n: _wanting(n, v) for n, v in values.items()}
    inputs = [v for v in tensors_of(values).values() if v.requires_grad]
    pairs = [(o, c) for o, c in zip(flat(function(**values)), cotangents, strict=True) if o is not None]
    outs, grads = [o for o, _ in pairs], [c.to(o.dtype) for o, c in pairs]
    return list(torch.autograd.grad(outs, inputs, grads))


def check_gradients(op: Op, backend: str, values: Values, kind: str) -> None:
    cotangents = [None if o is None else COTANGENTS[kind](o) for o in flat(op.reference(**values))]
    got = gradients(lambda **v: op(**v, backend=backend), values, cotangents)
    expected = gradients(lambda **v: op(**v, backend="torch"), values, cotangents)
    gold = gradients(lambda **v: op(**v, backend="torch"), upcast(values), cotangents)
    assert_close(got, expected, gold, what="gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("kind", COTANGENTS)
@pytest.mark.parametrize(("op", "backend", "case"), walk(DIFFERENTIABLE, skip_torch=True))
def test_gradients_agree_with_the_reference(op: Op, backend: str, case: Values, kind: str, dtype: torch.dtype) -> None:
    check_gradients(op, backend, made(op, backend, case, dtype), kind)


@pytest.mark.parametrize(("op", "backend", "case"), [p for p in walk(DIFFERENTIABLE) if "-torch-" in p.id])
def test_the_stated_backward_is_the_derivative(op: Op, backend: str, case: Values) -> None:
    """In fp64, against torch's own derivative of the forward reference."""
    values = op.make(**case, dtype=torch.float64, device=DEVICE)
    cotangents = [None if o is None else torch.randn_like(o) for o in flat(op.reference(**values))]
    got = gradients(lambda **v: op(**v, backend="torch"), values, cotangents)
    for g, e in zip(got, gradients(op.reference, values, cotangents), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
def test_gradcheck(op: Op) -> None:
    """Against finite differences, which know nothing of the code; first derivatives, then second ones."""
    for case in op.cases[:3]:
        values = {n: _wanting(n, v) for n, v in op.make(**case, dtype=torch.float64, device=DEVICE).items()}
        names = [n for n, v in tensors_of(values).items() if v.requires_grad]

        def call(*inputs: Tensor, names: list[str] = names, values: Values = values) -> Any:
            out = op(**(values | dict(zip(names, inputs, strict=True))), backend="torch")
            return tuple(o for o in flat(out) if o is not None)

        inputs = tuple(values[n] for n in names)
        assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


# ---- sizes past 2^31 elements

_MANY = {"tokens": (2**19 + 40,), "heads": 32, "kv_heads": 4, "dim": 128}
_SECTIONS = {"sections": [24, 20, 20], "layout": "interleaved"}
LARGE: dict[str, Values] = {
    "rope": _MANY,
    "mrope": _MANY | _SECTIONS,
    "qk_norm_rope": {"tokens": (2**19 + 40,), "heads": 24, "kv_heads": 4, "dim": 128},
    "rms_norm": {"shape": (2**19 + 40, 4096)},
    "add_rms_norm": {"shape": (2**19 + 40, 4096)},
    "swiglu": {"shape": (2**19 + 40, 4096)},
}


def _last_tokens(x: Any, tokens: int, count: int = 64) -> Any:
    if not isinstance(x, Tensor) or tokens not in x.shape:
        return x
    return x.narrow(x.shape.index(tokens), tokens - count, count)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_indices_past_two_to_the_31(op: Op) -> None:
    """The last tokens of more than 2^31 elements, alone and in their place, are the same."""
    case = LARGE[op.name.removesuffix("_").removesuffix("_backward")]
    tokens = (case.get("tokens") or case["shape"])[0]
    values = op.make(**case, dtype=torch.bfloat16, device="cuda")
    assert max(t.numel() for t in tensors_of(values).values()) > 2**31
    few = duplicate({n: _last_tokens(v, tokens).clone() if isinstance(v, Tensor) else v for n, v in values.items()})
    if values.get("positions") is None or "cos_sin" in values:
        few["cos_sin"] = values.get("cos_sin")
    few = {n: v for n, v in few.items() if n in values}
    got = results(op, lambda **v: op(**v, backend="triton"), values)
    expected = results(op, lambda **v: op(**v, backend="triton"), few)
    compared = 0
    for g, e in zip(got, expected, strict=True):
        if tokens in g.shape:
            compared += 1
            assert torch.equal(_last_tokens(g, tokens), e)
    assert compared
