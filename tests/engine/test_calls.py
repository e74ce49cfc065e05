"""Calls of a kind that was seen before: nothing is decided again, and nothing is let through."""

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from awkward import CALLS, store_rows, twice
from test_ops_errors import WRONG, arguments
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from whorl import ops
from whorl.device import BACKENDS
from whorl.ops import OPS, _plan
from whorl.ops._op import operator
from whorl.ops._tracing import is_readable


@operator()
def shifted(
    x: Tensor, by: Tensor | None = None, sizes: Sequence[int] | None = None, *, far: bool = False, scale: float = 1.0
) -> Tensor:
    """x: [...]"""
    return x + 1 if by is None else x + by


del OPS["shifted"]  # not for the tests that walk the registry


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Backends chosen for `shifted`, by their own `accepts`."""
    ops.register_backend("shifter", device="cpu", package="torch")
    choices: list[str] = []

    def accepts(**_: Any) -> None:
        choices.append("asked")

    shifted.impl("shifter", accepts=accepts)(lambda x, by, sizes, far, scale: x + (1 if by is None else by))
    yield choices
    shifted.impls, shifted._is_plain_on_host = {}, True
    del BACKENDS["shifter"]


def test_a_kind_is_chosen_once(chosen: list[str]) -> None:
    for grad in (False, True, False, True):
        for _ in range(3):
            out = shifted(torch.zeros(2, 3, requires_grad=grad))
            assert torch.equal(out, torch.ones(2, 3))
            assert out.requires_grad == grad
    assert len(chosen) == 2  # with a gradient and without


X = torch.zeros(4, 6)
OTHER_KINDS: dict[str, Callable[[], Any]] = {
    "dtype": lambda: shifted(X.half()),
    "rank": lambda: shifted(X[0]),
    "shape": lambda: shifted(X[:, :4].contiguous()),
    "strides": lambda: shifted(X.t().contiguous().t()),
    "address": lambda: shifted(torch.zeros(25)[1:].view(4, 6)),
    "gradient": lambda: shifted(X.clone().requires_grad_()),
    "a tensor more": lambda: shifted(X, X),
    "flag": lambda: shifted(X, far=True),
    "number": lambda: shifted(X, scale=2.0),
    "asked for": lambda: shifted(X, backend="shifter"),
    "device": lambda: shifted(X.to("meta"), backend="torch"),
}


@pytest.mark.parametrize("how", OTHER_KINDS)
def test_another_kind_is_chosen_anew(how: str, chosen: list[str]) -> None:
    shifted(X)
    before = len(shifted._plans)
    for _ in range(2):
        OTHER_KINDS[how]()
        shifted(X)
    assert len(shifted._plans) == before + 1
    assert len(chosen) == (1 if how == "device" else 2)


def test_using_is_part_of_the_kind(chosen: list[str]) -> None:
    shifted(X)
    with shifted.using("torch"):
        shifted(X)
    with shifted.using("shifter"):
        shifted(X)
    with shifted.using("triton"), pytest.raises(RuntimeError, match="shifted: backend 'triton' was requested"):
        shifted(X)
    assert len(chosen) == 2


def test_a_list_is_compared_by_its_values(chosen: list[str]) -> None:
    sizes = [1, 2]
    for _ in range(3):
        shifted(X, sizes=sizes)
    assert len(chosen) == 1
    sizes[0] = 2
    shifted(X, sizes=sizes)
    assert len(chosen) == 2
    for _ in range(3):
        shifted(X, sizes=[[1], [2]])  # cannot be hashed, so it is chosen every time
    assert len(chosen) == 5


def test_a_slower_backend_is_taken_only_where_no_other_is(chosen: list[str]) -> None:
    def slower(x: Tensor, **_: Any) -> str | None:
        return "the other is faster at 4 rows" if x.shape[0] == 4 else None

    ops.register_backend("plodder", device="cpu", package="torch", priority=5)
    try:
        shifted.impl("plodder", slower=slower)(lambda x, by, sizes, far, scale: x + 1)
        choice = shifted.choose(X)
        assert (choice.backend, choice.reasons) == ("shifter", {"plodder": "the other is faster at 4 rows"})
        assert shifted.choose(X[:2]).backend == "plodder"
        assert shifted.choose(X, backend="plodder").backend == "plodder"
        del shifted.impls["shifter"]
        assert shifted.choose(X).backend == "plodder", "slower than nothing"
    finally:
        del BACKENDS["plodder"]


def test_a_changed_implementation_is_seen(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(shifted(X), X + 1)
    monkeypatch.setitem(
        shifted.impls, "shifter", _plan.Impl("shifter", lambda x, by, sizes, far, scale: x + 5, lambda **_: None)
    )
    assert torch.equal(shifted(X), X + 5)
    monkeypatch.undo()
    assert torch.equal(shifted(X), X + 1)
    del shifted.impls["shifter"]
    monkeypatch.setattr(shifted, "reference", lambda **_: X + 7)
    assert torch.equal(shifted(X, backend="torch"), X + 7)


def test_plans_are_bounded_and_keep_no_tensor(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "MAX_KINDS", 8)
    refs = []
    for n in range(1, 40):
        x, by = torch.zeros(n, requires_grad=True), torch.zeros(n)
        refs += [weakref.ref(x), weakref.ref(by)]
        shifted(x, by, scale=float(n))
        assert len(shifted._plans) <= 8
    del x, by
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    num_chosen = len(chosen)
    shifted(torch.zeros(39, requires_grad=True), torch.zeros(39), scale=39.0)
    assert len(chosen) == num_chosen, "the newest was forgotten"


def test_many_threads_decide_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "MAX_KINDS", 4)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for n in range(300):
            size = 1 + (n * seed) % 11
            out = shifted(torch.zeros(size), torch.full((size,), float(size)))
            if not torch.equal(out, torch.full((size,), float(size))):
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(shifted._plans) <= 4 + len(threads)


# ---- no check is lost


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("grad", [False, True])
def test_wrong_input_after_right_input(name: str, grad: bool) -> None:
    """A good call, each wrong one, and it again: what was remembered of the first lets none of them through."""
    op = OPS[name]
    grad = grad and not op.forward_only

    def fresh_arguments() -> dict[str, Any]:
        values = arguments(name)
        return values | {n: values[n].requires_grad_() for n in ("q", "x", "qkv") if grad and n in values}

    for change, message in WRONG[name].values():
        op(**fresh_arguments())
        for _ in range(2):
            values = fresh_arguments()
            with pytest.raises(ValueError, match=rf"^{name}: .*{message}"), torch.set_grad_enabled(grad):
                op(**(values | change(arguments(name))))


def _only_small(x: Tensor, most: int) -> None:
    if is_readable(x) and x.numel() and int(x.max()) > most:
        raise ValueError(f"small: x has {int(x.max())}, expected {most} at most")


@operator(check=_only_small)
def small(x: Tensor, most: int = 3) -> Tensor:
    """x: [...]"""
    return x + 0


del OPS["small"]


def test_values_are_looked_at_in_every_call() -> None:
    x = torch.tensor([1, 2])
    for _ in range(2):
        small(x)
        x[0] = 9
        with pytest.raises(ValueError, match="small: x has 9, expected 3 at most"):
            small(x)
        small(x, 9)
        x[0] = 1
    assert all(plan.check is not None for plan in small._plans.values())


def test_a_check_that_looks_at_no_values_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(ops.rms_norm, "check", lambda **arguments: seen.append("checked"))
    ops.rms_norm._plans.clear()
    x, weight = torch.randn(5, 24), torch.randn(24)
    for _ in range(3):
        ops.rms_norm(x, weight)
    assert seen == ["checked"]
    ops.rms_norm._plans.clear()


def test_a_kind_seen_without_a_gradient_refuses_one_still() -> None:
    arguments = [torch.zeros(8, 2), torch.zeros(8, 2), torch.ones(3, 2), torch.ones(3, 2), torch.tensor([1, 4, 6])]
    arguments[2].requires_grad_()
    with torch.no_grad():
        store_rows(*arguments)
    with pytest.raises(RuntimeError, match="store_rows: is for inference and has no gradient"):
        store_rows(*arguments)


def test_autocast_is_asked_in_every_call() -> None:
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    plain = ops.linear(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.linear(x, weight), plain)
        assert torch.equal(ops.linear(x.requires_grad_(), weight), plain)


# ---- gradients that autograd computes without the torch op


X_WEIGHT = (torch.randn(3, 8), torch.randn(8))


def gradients(function: Callable[..., Any]) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in X_WEIGHT]
    function(*leaves).square().sum().backward()
    return [leaf.grad for leaf in leaves]


def test_the_torch_op_and_the_direct_way_have_the_same_gradients() -> None:
    direct, through_op = gradients(ops.rms_norm), gradients(ops.rms_norm.node)
    assert all(torch.equal(a, b) for a, b in zip(direct, through_op, strict=True))


def test_checkpoints_compute_again() -> None:
    expected = gradients(ops.rms_norm)
    for reentrant in (False, True):
        actual = gradients(functools.partial(checkpoint, ops.rms_norm, use_reentrant=reentrant))
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_what_was_saved_and_then_overwritten_is_noticed() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    source = x * 1
    out = ops.rms_norm(source, torch.ones(8))
    source.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_only_saved_tensors_live_on_with_the_graph() -> None:
    q, table = torch.randn(5, 2, 8, requires_grad=True), torch.randn(5, 8)
    source, k = q * 1, torch.randn(5, 1, 8)
    alive = [weakref.ref(source), weakref.ref(k)]
    out = ops.rope(source, k, table)
    del source, k
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    out[0].sum().backward()
    assert q.grad is not None


def test_an_absent_output_is_none_with_a_gradient() -> None:
    q = torch.randn(5, 2, 8, requires_grad=True)
    turned, none = ops.rope(q, None, torch.randn(5, 8))
    assert none is None
    turned.sum().backward()
    assert q.grad is not None


def test_a_backward_runs_on_the_backend_of_its_forward(device: str) -> None:
    x = torch.ones(4, device=device, requires_grad=True)
    for _ in range(2):
        out = twice(x, backend="triton")
        CALLS.clear()
        out.sum().backward()
        assert CALLS == ["triton backward"]
