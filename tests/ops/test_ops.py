"""Every operator, every backend that can run here, every case: one rule for all.

A result may be at most twice as far from the fp64 result as the reference is; nothing else is tuned.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from whorl.device import is_interpreting, unavailable
from whorl.judge import LIMIT, adding_alike, judge
from whorl.ops import OPS, Op, rms_norm_triton
from whorl.ops.attention import qk_norm_rope_backward_triton
from whorl.ops.latent.pages import ONE_CACHE
from whorl.ops.moe.route import NO_GROUPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONSTANTS = ("cos_sin", "bias")  # tables and what only chooses experts: floating point, but never differentiated
Values = dict[str, Any]


def backends_here(op: Op) -> list[str]:
    return ["torch", *(b for b in op.impls if unavailable(b, DEVICE, by_name=True) is None)]


def num_rows(case: Values) -> int:
    """The interpreter takes milliseconds for each."""
    return math.prod(case["tokens"] if "tokens" in case else case["shape"][:-1])


def walk(
    ops: Iterable[Op] = OPS.values(),
    skip_torch: bool = False,
    index: int | None = None,
    slow_triton: bool = False,
    half: bool = False,
) -> list[Any]:
    """(operator, backend, case) for everything that can run here, or the case `index` of each.

    slow_triton: interpreted kernels in the slow tests alone; half: every second case of theirs.
    """
    most = 0 if slow_triton else 8

    def is_slow(backend: str, case: Values, i: int) -> bool:
        return backend == "triton" and is_interpreting() and (num_rows(case) > most or (half and i % 2 == 1))

    return [
        pytest.param(
            op,
            backend,
            case,
            id=f"{op.name}-{backend}-{i}",
            marks=[pytest.mark.slow] if is_slow(backend, case, i) else [],
        )
        for op in ops
        for backend in backends_here(op)[skip_torch:]
        for i, case in enumerate(op.cases)
        if index in (None, i)
    ]


def walk_dtypes() -> list[Any]:
    """And a dtype. Interpreted kernels take one of the two quickly, bf16 and fp32 by turns, and all of them slowly."""
    slow, cases = pytest.mark.slow, []
    for i, case in enumerate(walk()):
        backend = case.values[1]
        for j, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16)):
            is_slow = dtype == torch.float16 or (backend == "triton" and is_interpreting() and (i + j) % 2)
            marks = [*case.marks, slow] if is_slow else case.marks
            cases.append(pytest.param(*case.values, dtype, id=f"{case.id}-{dtype}", marks=marks))
    return cases


def is_backward(op: Op) -> bool:
    return op.name.endswith("_backward")


DIFFERENTIABLE = [op for op in OPS.values() if not op.forward_only and not is_backward(op)]


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


def assert_close(
    got: list[Any],
    expected: list[Any],
    gold: list[Any],
    what: str = "output",
    limit: float = LIMIT,
    totals: Sequence[int] = (),
) -> None:
    """`expected` is the reference in the same dtype, `gold` the reference in fp64."""
    for i, (g, e, o) in enumerate(zip(got, expected, gold, strict=True)):
        assert (g is None) == (e is None), f"{what} {i} is {g}, the reference gives {e}"
        if g is not None:
            broken = g.float().isnan() | (g.float().isinf() & o.double().isfinite())  # torch has no isnan of eight bits
            assert not broken.any(), f"{what} {i} is not finite in {broken.sum()} of {g.numel()} elements"
            verdict = judge([g], [e], [o], limit, totals=(0,) if i in totals else ())
            assert verdict.passed, f"{what} {i}: {verdict.problem}"


def memory_of(x: Tensor) -> Tensor:
    """All of the memory that a view is a view of."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def assert_only_stated_written(op: Op, before: Values, after: Values) -> None:
    for name, old in tensors_of(before).items():
        memories = [memory_of(old).clone(), memory_of(after[name]).clone()]
        if name in op.mutates:  # then only what lies between its elements must stay
            for memory in memories:
                memory.as_strided(old.shape, old.stride(), old.storage_offset()).zero_()
        assert torch.equal(*(m.view(torch.uint8) for m in memories)), f"{op.name} wrote into {name}"


def real_strides(x: Tensor) -> list[int]:
    """Without those of dims that have no second element."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1] if x.numel() else []


def check(op: Op, backend: str, values: Values) -> None:
    """One operator on one backend against its reference and the fp64 result."""
    choice = op.choose(**values, backend=backend)
    assert choice.backend == backend
    with adding_alike(values):
        expected = results(op, op.reference, duplicate(values))
    gold = results(op, op.reference, upcast(duplicate(values)))
    used = duplicate(values)
    got = results(op, lambda **v: op(**v, backend=backend), used)
    assert_close(got, expected, gold, totals=op.totals)
    for g, e in zip(got, expected, strict=True):
        assert op.mutates or g is None or real_strides(g) == real_strides(e), f"{g.stride()}, expected {e.stride()}"
    assert_only_stated_written(op, values, used)
    memories = {t.untyped_storage().data_ptr() for t in tensors_of(used).values() if t.numel()}
    for g in [] if op.mutates else got:
        assert g is None or g.untyped_storage().data_ptr() not in memories, f"{op.name} returns a view of its input"


def arguments(op: Op, case: Values, dtype: torch.dtype) -> Values:
    return op._bind((), op.make(**case, dtype=dtype, device=DEVICE))


def reason_against(op: Op, backend: str, values: Values) -> str | None:
    return None if backend == "torch" else op.impls[backend].accepts(**values)


def made(op: Op, backend: str, case: Values, dtype: torch.dtype) -> Values:
    """Arguments of a case; skips only with the backend's own reason. `test_accelerated_backends_take_the_cases` bounds
    how often that may be."""
    values = arguments(op, case, dtype)
    reason = reason_against(op, backend, values)
    if reason is not None:
        pytest.skip(f"{op.name}/{backend}: {reason}")
    return values


def few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device had one multiprocessor: programs then take many blocks each, as they do of real sizes."""
    for module in (rms_norm_triton, qk_norm_rope_backward_triton):
        monkeypatch.setattr(sys.modules[module.__name__], "multiprocessors", lambda _: 1)


def strided(values: Values) -> Values:
    """The same arguments, no element next to another."""

    def spread(x: Tensor) -> Tensor:
        return torch.stack((x, torch.full_like(x, 77)), -1)[..., 0]

    return {n: spread(v) if isinstance(v, Tensor) else v for n, v in values.items()}


# ---- forward


@pytest.mark.sampled("op", "backend", keep=5)
@pytest.mark.parametrize(("op", "backend", "case", "dtype"), walk_dtypes())
def test_agrees_with_the_reference(op: Op, backend: str, case: Values, dtype: torch.dtype) -> None:
    check(op, backend, made(op, backend, case, dtype))


@pytest.mark.parametrize(("op", "backend", "case"), walk(index=1))
def test_takes_any_strides(op: Op, backend: str, case: Values) -> None:
    values = strided(arguments(op, case, torch.float32))
    reason = reason_against(op, backend, values)
    if reason is None:
        check(op, backend, values)
    else:  # only what cannot be copied first may be refused
        assert op.mutates, reason


@pytest.mark.parametrize(("op", "backend", "case"), walk(index=2, slow_triton=True))
def test_gives_the_same_bits_twice(op: Op, backend: str, case: Values) -> None:
    values = made(op, backend, case, torch.bfloat16)
    first, second = (results(op, lambda **v: op(**v, backend=backend), duplicate(values)) for _ in range(2))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))


WITH_KERNELS = [op for op in OPS.values() if is_backward(op) and "triton" in op.impls]


@pytest.mark.parametrize("op", WITH_KERNELS, ids=lambda op: op.name)
def test_a_program_may_take_many_blocks(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    few_processors(monkeypatch)
    check(op, "triton", arguments(op, max(op.cases, key=num_rows), torch.float32))


NPU_ORDER = "reads the layouts bytes, bytes_tiled, int4_tiled, got int4_paired"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_accelerated_backends_take_the_cases(op: Op) -> None:
    """A backend that refuses everything would pass every other test here by being skipped."""
    for backend in backends_here(op)[1:]:
        refused = []
        for case in op.cases:
            reason = reason_against(op, backend, arguments(op, case, torch.bfloat16))
            # Two caches and torch_npu's layout of codes are Ascend's, and no model has them elsewhere. A router of
            # DeepSeek's groups is a small part of a model that no CPU runs fast.
            refused += [] if reason in (None, ONE_CACHE, NPU_ORDER, NO_GROUPS) else [reason]
        assert len(refused) <= (1 if op.mutates else 0), refused


IN_PLACE = [op for op in OPS.values() if op.name.endswith("_")]


@pytest.mark.parametrize("op", IN_PLACE, ids=lambda op: op.name)
def test_in_place_equals_functional(op: Op) -> None:
    for case in op.cases:
        values = arguments(op, case, torch.float32)
        backend = op.choose(**values).backend
        expected = flat(OPS[op.name.removesuffix("_")](**values, backend=backend))
        for got, e in zip(results(op, op, duplicate(values)), expected, strict=True):
            assert got is e is None or torch.equal(got, e)


def check_registration(op: Op, case: Values) -> None:
    """Schema, fake tensors, autograd registration and tracing."""
    values = arguments(op, case, torch.float32)
    if not num_rows(case):  # opcheck cannot copy an empty view
        values |= {n: v.new_empty(v.shape) for n, v in tensors_of(values).items() if not v.numel()}
    if not op.forward_only and not is_backward(op):
        values = {n: _wanting(n, v) for n, v in values.items()}
    # Its schema test multiplies, which torch cannot do in eight bits.
    is_fp8 = any(v.dtype == torch.float8_e4m3fn for v in tensors_of(values).values())
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    opcheck(op.node, *op._split(values), test_utils=checks[is_fp8:])


SLOW_TO_TRACE = ("qk_norm_rope", "qk_norm_rope_backward")


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, id=name, marks=[pytest.mark.slow] * (name in SLOW_TO_TRACE)) for name, op in OPS.items()],
)
def test_opcheck(op: Op) -> None:
    check_registration(op, op.cases[1])


@pytest.mark.slow
@pytest.mark.parametrize(("op", "backend", "case"), [p for p in walk() if "-torch-" in p.id])
def test_opcheck_of_every_case(op: Op, backend: str, case: Values) -> None:
    check_registration(op, case)


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
    pairs = [(o, c) for o, c in zip(flat(function(**values)), cotangents, strict=True) if c is not None]
    outs, grads = [o for o, _ in pairs], [c.to(o.dtype) for o, c in pairs]
    return list(torch.autograd.grad(outs, inputs, grads))


def cotangents_of(op: Op, values: Values, kind: str) -> list[Tensor | None]:
    """One for each output that has a gradient: indices have none."""
    outs = flat(op.reference(**values))
    return [COTANGENTS[kind](o) if o is not None and o.is_floating_point() else None for o in outs]


def check_gradients(op: Op, backend: str, values: Values, kind: str) -> None:
    cotangents = cotangents_of(op, values, kind)
    got = gradients(lambda **v: op(**v, backend=backend), values, cotangents)
    expected = gradients(lambda **v: op(**v, backend="torch"), values, cotangents)
    gold = gradients(lambda **v: op(**v, backend="torch"), upcast(values), cotangents)
    # The backward operators are held to the rule alone; here it is how they are called. 3: of three rows' roundings
    # the reference may be lucky, observed 2.01 in rms_norm's fp32 weight gradient.
    assert_close(got, expected, gold, what="gradient", limit=3)


@pytest.mark.parametrize(("op", "backend", "case"), walk(DIFFERENTIABLE, skip_torch=True, half=True))
def test_gradients_agree_with_the_reference(op: Op, backend: str, case: Values) -> None:
    check_gradients(op, backend, made(op, backend, case, torch.bfloat16), "random")


@pytest.mark.parametrize("kind", COTANGENTS)
@pytest.mark.parametrize(("op", "backend", "case"), walk(DIFFERENTIABLE, skip_torch=True, index=2, slow_triton=True))
def test_gradients_may_have_any_strides(op: Op, backend: str, case: Values, kind: str) -> None:
    check_gradients(op, backend, made(op, backend, case, torch.float32), kind)


WAYS = list(itertools.product(COTANGENTS, (torch.float16, torch.float32)))


def walk_ways() -> list[Any]:
    """Every case in one way, the ways by turns: an operator with six cases or more meets them all."""
    return [
        pytest.param(*case.values, *WAYS[i % len(WAYS)], id=f"{case.id}-{WAYS[i % len(WAYS)][0]}")
        for i, case in enumerate(walk(DIFFERENTIABLE, skip_torch=True))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "backend", "case", "kind", "dtype"), walk_ways())
def test_gradients_in_every_way(op: Op, backend: str, case: Values, kind: str, dtype: torch.dtype) -> None:
    check_gradients(op, backend, made(op, backend, case, dtype), kind)


@pytest.mark.parametrize(("op", "backend", "case"), [p for p in walk(DIFFERENTIABLE) if "-torch-" in p.id])
def test_the_stated_backward_is_the_derivative(op: Op, backend: str, case: Values) -> None:
    """In fp64, against torch's own derivative of the forward reference."""
    values = arguments(op, case, torch.float64)
    cotangents = cotangents_of(op, values, "random")
    got = gradients(lambda **v: op(**v, backend="torch"), values, cotangents)
    for g, e in zip(got, gradients(op.reference, values, cotangents), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
def test_gradcheck(op: Op) -> None:
    """Against finite differences, which know nothing of the code; first derivatives, then second ones."""
    for case in op.cases[:3]:
        values = {n: _wanting(n, v) for n, v in arguments(op, case, torch.float64).items()}
        names = [n for n, v in tensors_of(values).items() if v.requires_grad]

        def call(*inputs: Tensor, names: list[str] = names, values: Values = values) -> Any:
            out = op(**(values | dict(zip(names, inputs, strict=True))), backend="torch")
            return tuple(o for o in flat(out) if o is not None)

        inputs = tuple(values[n] for n in names)
        assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


# ---- sizes past 2^31 elements

_MANY = {"tokens": (2**19 + 40,), "heads": 32, "kv_heads": 4, "dim": 128}
LARGE: dict[str, Values] = {
    "rope": _MANY,
    "qk_norm_rope": _MANY,
    "rms_norm": {"shape": (2**19 + 40, 4096)},
    "add_rms_norm": {"shape": (2**19 + 40, 4096)},
    "glu": {"shape": (2**19 + 40, 4096)},
    "hadamard": {"shape": (2**24 + 40, 128)},
    "delta_gates": {"tokens": (2**26 + 40,), "heads": 32},
    "sparse_attention": {"tokens": (2**15 + 40,), "keys": 64, "topk": 16, "heads": 128, "dim": 576, "value_dim": 512},
    "linear": {"tokens": (2**19 + 40,), "size": (64, 4096)},
    "experts": {"tokens": (2**20 + 40,), "hidden": 2048, "width": 16, "experts": 8, "k": 2},
    "clipped_experts": {"tokens": (2**20 + 40,), "hidden": 2048, "width": 16, "experts": 8, "k": 2},
    "masked_attention": {"tokens": (2**17 + 40,), "keys": 64, "topk": 16, "heads": 128, "kv_heads": 1, "dim": 128},
}


def large(op: Op) -> Values:
    """A case of more than 2^31 elements: the one above, or the first that is timed with more rows."""
    name = op.name.removesuffix("_").removesuffix("_backward")
    if name in LARGE:
        return LARGE[name]
    case = op.bench_cases[0]
    assert "shape" in case, f"say in LARGE which case of {name} has more than 2^31 elements"
    return case | {"shape": (2**31 // math.prod(case["shape"][1:]) + 40, *case["shape"][1:])}


def last_tokens(x: Tensor, tokens: int, count: int = 64) -> Tensor:
    return x.narrow(x.shape.index(tokens), tokens - count, count) if tokens in x.shape else x


def check_last_tokens(op: Op, case: Values) -> None:
    """The last of many tokens against the reference of those alone."""
    tokens = (case["tokens"] if "tokens" in case else case["shape"])[0]
    values = arguments(op, case, torch.bfloat16)
    few = {n: v if n in CONSTANTS else last_tokens(v, tokens).clone() for n, v in tensors_of(values).items()}
    with adding_alike(values):
        expected = results(op, op.reference, duplicate(values | few))
    gold = results(op, op.reference, upcast(values | few))
    got = results(op, lambda **v: op(**v, backend="triton"), values)
    of_tokens = [i for i, g in enumerate(got) if tokens in g.shape]  # no weight gradients
    assert of_tokens
    got = [None if g is None else last_tokens(g, tokens) for g in got]
    assert_close(*([x[i] for i in of_tokens] for x in (got, expected, gold)))


# Inference has few tokens at a time; test_moe_training.py looks at the last ones of what chooses or moves tokens, and
# test_attention_bits.py at those that see the ones before.
MOVING = ("route", "permute", "unpermute", "grouped_matmul", "causal_attention", "packed_attention", "causal_conv")
MOVING += ("gated_delta",)
MANY = [
    op
    for op in OPS.values()
    if "triton" in op.impls
    and (not op.forward_only or op in IN_PLACE)
    and op.name.removesuffix("_backward") not in MOVING
]


@pytest.mark.slow
@pytest.mark.parametrize("op", MANY, ids=lambda op: op.name)
def test_the_last_of_many_tokens(op: Op) -> None:
    case = large(op)
    small = {"tokens": (70,), "heads": 2, "kv_heads": 1, "shape": (70, 16)}
    check_last_tokens(op, case | {n: v for n, v in small.items() if n in case})


@pytest.mark.gpu
@pytest.mark.parametrize("op", MANY, ids=lambda op: op.name)
def test_indices_past_two_to_the_31(op: Op) -> None:
    case = large(op)
    width = case["heads"] * case.get("dim", 1) if "heads" in case else case.get("hidden") or max(case.get("size", [0]))
    assert (math.prod(case["shape"]) if "shape" in case else case["tokens"][0] * width) > 2**31
    check_last_tokens(op, case)
