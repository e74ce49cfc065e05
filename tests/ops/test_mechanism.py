"""The operator mechanism in eager: arguments, choice of a backend, the bypass, gradients, mutation."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from awkward import (
    CALLS,
    counted_nodes,
    graphs_of,
    kv_arguments,
    matmul,
    norm_arguments,
    rope_arguments,
    store_rows,
    targets,
    twice,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from whorl import ops
from whorl.ops import _op


@pytest.fixture(autouse=True)
def _no_calls_yet() -> None:
    CALLS.clear()
    torch._dynamo.reset()


def test_empty_memory_is_nan() -> None:
    assert torch.empty(5).isnan().all()
    assert torch.empty_like(torch.zeros(3)).isnan().all()


# ---- arguments


def test_arguments_by_name_and_position() -> None:
    x, weight = norm_arguments()
    expected = ops.rms_norm(x, weight, 1e-3, plus_one=True)
    assert torch.equal(ops.rms_norm(weight=weight, plus_one=True, eps=1e-3, x=x), expected)
    assert torch.equal(ops.rms_norm(x.requires_grad_(), eps=1e-3, weight=weight, plus_one=True), expected)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.ones(2),), {"wrong": 1}, r"twice: unknown or repeated arguments \['wrong'\]; it takes \['x'"),
        ((torch.ones(2),), {"x": torch.ones(2)}, r"unknown or repeated arguments \['x'\]"),
        ((), {}, "twice: argument 'x' is missing"),
        ((torch.ones(2), "add", [1]), {}, "twice takes 2 positional arguments, got 3"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_wrong_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], message: str, grad: bool) -> None:
    args = tuple(a.clone().requires_grad_(grad) if isinstance(a, Tensor) else a for a in args)
    with pytest.raises(TypeError, match=message):
        twice(*args, **kwargs)


def test_literals_are_checked_against_their_options() -> None:
    with pytest.raises(ValueError, match="twice: mode is 'divide', expected one of add, multiply"):
        twice(torch.ones(2), "divide")


def test_tensors_on_two_devices() -> None:
    x, weight = norm_arguments()
    with pytest.raises(ValueError, match=r"rms_norm: tensors must be on one device, got .*'x': 'cpu'.*'meta'"):
        ops.rms_norm(x, weight.to("meta"))


def test_a_backend_takes_the_names_of_the_reference() -> None:
    with pytest.raises(TypeError, match=r"twice/torch_npu takes \['x', 'kind', 'times'\], the reference \['x', 'mode'"):
        twice.impl("torch_npu")(lambda x, kind, times: x)


def test_schema_holds_what_infer_schema_refuses() -> None:
    assert "str mode=" in twice.schema
    assert "SymInt[]? times=" in twice.schema
    assert ops.rope.schema.endswith("-> (Tensor, Tensor)")
    assert "Tensor(a0!) k_cache" in store_rows.schema


# ---- choosing


def test_choice_says_why_others_were_passed_over(device: str) -> None:
    assert twice.choose(torch.ones(4, device=device), backend="triton").backend == "triton"
    choice = twice.choose(torch.ones(3, device=device))
    assert (choice.backend, choice.function) == ("torch", twice.reference)
    expected = (
        "odd sizes are not taken" if device == "cuda" else "interpreted Triton runs only when the backend is named"
    )
    assert choice.reasons == {"triton": expected}


@pytest.mark.parametrize("grad", [False, True])
def test_a_forced_backend_raises_with_the_reason(device: str, grad: bool) -> None:
    x = torch.ones(3, device=device, requires_grad=grad)
    message = r"twice: backend 'triton' was requested but cannot run: odd sizes are not taken\. Backends: torch, triton"
    with pytest.raises(RuntimeError, match=message):
        twice(x, backend="triton")
    with pytest.raises(RuntimeError, match=message), twice.using("triton"):
        twice(x)
    with pytest.raises(RuntimeError, match=r"matmul: .* the operator has no such backend\. Backends: torch"):
        matmul(x[:, None], x[None], backend="triton")


def test_using_ends_with_the_block(device: str) -> None:
    x = torch.ones(4, device=device)
    with twice.using("triton"):
        twice(x)
        with twice.using("torch"):
            twice(x)
        with contextlib.suppress(ZeroDivisionError), twice.using("torch"):
            raise ZeroDivisionError
        twice(x)
    assert CALLS == ["triton", "torch", "triton"]
    assert twice._forced.get() == ""


def test_torch_can_be_forced(device: str) -> None:
    twice(torch.ones(4, device=device), backend="torch")
    assert CALLS == ["torch"]


class OnCuda(Tensor):
    """A CPU tensor that says it is on a GPU: the choice believes it, the reference runs."""

    device = property(lambda _: torch.device("cuda"))


def test_fallback_on_an_accelerator_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op, "needs_node", lambda _: False)  # a subclass would take the node
    monkeypatch.setattr(_op, "_WARNED", set())
    x = torch.ones(3).as_subclass(OnCuda)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twice(x)
        twice(x)
        twice(x, backend="torch")
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "twice: the torch reference runs on cuda (triton: " in str(caught[0].message)
    assert caught[0].filename == __file__


def test_no_fallback_warning_where_nothing_is_lost() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twice(torch.ones(3))
        twice(torch.ones(3, device="meta"))


# ---- the bypass


def test_bypass_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = norm_arguments(grad=True)
    with counted_nodes(ops.rms_norm, monkeypatch) as seen:
        ops.rms_norm(x.detach(), weight.detach())
        with torch.no_grad():
            ops.rms_norm(x, torch.nn.Parameter(weight))
        with torch.inference_mode():
            ops.rms_norm(x, weight)
        y = ops.rms_norm(x, weight)
    assert seen == []
    assert type(y.grad_fn).__name__ == "rms_normBackward"


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Labelled(Tensor):
    pass


def _under_fake_mode() -> Any:
    with FakeTensorMode():
        return ops.rms_norm(*norm_arguments())


def _with_fake_tensors() -> Any:
    mode = FakeTensorMode()
    return ops.rms_norm(*(mode.from_tensor(t) for t in norm_arguments()))


def _under_a_dispatch_mode() -> Any:
    with Watching():
        return ops.rms_norm(*norm_arguments())


def _under_a_function_mode() -> Any:
    with torch.device("cpu"):
        return ops.rms_norm(*norm_arguments())


SEEN_BY_OTHERS: dict[str, Callable[[], Any]] = {
    "fake mode": _under_fake_mode,
    "fake tensors": _with_fake_tensors,
    "make_fx": lambda: make_fx(ops.rms_norm)(*norm_arguments()),
    "make_fx functionalized": lambda: make_fx(torch.func.functionalize(ops.rms_norm))(*norm_arguments()),
    "subclass": lambda: ops.rms_norm(*(t.as_subclass(Labelled) for t in norm_arguments())),
    "function mode": _under_a_function_mode,
    "dispatch mode": _under_a_dispatch_mode,
    "functionalize": lambda: torch.func.functionalize(ops.rms_norm)(*norm_arguments()),
}


@pytest.mark.parametrize("how", SEEN_BY_OTHERS)
def test_no_bypass_while_someone_looks(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted_nodes(ops.rms_norm, monkeypatch) as seen:
        SEEN_BY_OTHERS[how]()
    assert seen == ["rms_norm"]


def test_fake_tensors_reach_no_backend() -> None:
    with FakeTensorMode(), twice.using("triton"):
        out = twice(torch.ones(4))
    assert type(out).__name__ == "FakeTensor"
    assert "triton" not in CALLS


# ---- transforms of torch.func and forward mode


def test_forward_mode_derivatives_are_not_lost() -> None:
    x, weight = norm_arguments()
    tangent = torch.randn_like(x)
    expected = torch.func.jvp(lambda a: ops.rms_norm.reference(a, weight), (x,), (tangent,))[1]
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(ops.rms_norm(forward_ad.make_dual(x, tangent), weight)).tangent
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.func.jvp(lambda a: ops.rms_norm(a, weight), (x,), (tangent,))[1], expected)


def test_functional_gradients_and_vmap() -> None:
    x, weight = norm_arguments()
    expected = torch.func.grad(lambda a: ops.rms_norm.reference(a, weight).square().sum())(x)
    torch.testing.assert_close(torch.func.grad(lambda a: ops.rms_norm(a, weight).square().sum())(x), expected)
    torch.testing.assert_close(torch.vmap(lambda row: ops.rms_norm(row, weight))(x), ops.rms_norm(x, weight))


def test_transforms_refuse_a_forced_backend(device: str) -> None:
    with pytest.raises(RuntimeError, match=r"twice: backend 'triton' was requested .* torch\.func and forward-mode"):
        torch.vmap(lambda x: twice(x, backend="triton"))(torch.ones(2, 2, device=device))


# ---- gradients


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_remembers_the_forced_backend(device: str, compiled: bool) -> None:
    x = torch.ones(4, device=device, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return twice(x)

    with twice.using("triton"):
        out = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(x)
    CALLS.clear()
    out.sum().backward()
    assert CALLS[-1:] == ["triton backward"]
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_compiled_code_follows_using(device: str) -> None:
    x = torch.ones(4, device=device)
    call = torch.compile(lambda x: twice(x), backend="eager", fullgraph=True)
    call(x)
    with twice.using("triton"):
        call(x)
    ran = [c for c in CALLS if c == "triton"]
    assert ran == ["triton"]


def test_a_backend_cannot_drop_the_gradient(device: str) -> None:
    x = torch.ones(4, device=device, requires_grad=True)
    out = twice(x, backend="triton")
    assert "triton" in CALLS
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.full_like(x, 2))


@contextlib.contextmanager
def recorded_saves() -> Iterator[list[Tensor]]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        yield saved


def test_only_what_is_stated_is_saved() -> None:
    arguments = rope_arguments(grad=True)
    with recorded_saves() as saved:
        ops.rope(**arguments)
    assert {t.data_ptr() for t in saved} == {arguments[n].data_ptr() for n in ("cos_sin", "positions")}
    x, weight = norm_arguments(grad=True)
    with recorded_saves() as saved:
        _, total = ops.add_rms_norm(x, x.detach(), weight)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (weight, total)}
    with recorded_saves() as saved:
        twice(torch.ones(2, requires_grad=True))
    assert saved == []


def test_an_operator_without_a_stated_backward_is_differentiated() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    torch.autograd.gradcheck(matmul, (x.double(), weight.double()))
    graphs = graphs_of(matmul, x, weight, backward=True)
    assert [targets(g).count(matmul.node) for g in graphs] == [1, 0]
    expected = torch.autograd.grad((x @ weight).sum(), [x, weight])
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_second_derivatives() -> None:
    x, weight = (t.double().requires_grad_() for t in norm_arguments())
    assert torch.autograd.gradgradcheck(ops.rms_norm, (x, weight))


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_unused_outputs_need_no_gradient(used: tuple[int, ...]) -> None:
    x, residual = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    inputs = (x, residual, weight)
    got, expected = (
        torch.autograd.grad(sum(f(*inputs)[i].square().sum() for i in used), inputs, allow_unused=True)
        for f in (ops.add_rms_norm, ops.add_rms_norm.reference)
    )
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        torch.testing.assert_close(g, e)


# ---- operators that mutate


def test_a_mutating_operator_writes_what_it_states(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = kv_arguments()
    before = [a.clone() for a in arguments]
    with counted_nodes(store_rows, monkeypatch) as seen:
        assert store_rows(*arguments) is None
    assert seen == []
    assert torch.equal(arguments[0][[1, 4, 6]], arguments[2])
    assert torch.equal(arguments[1][[1, 4, 6]], arguments[3])
    assert all(torch.equal(a, b) for a, b in zip(arguments[2:], before[2:], strict=True))


def test_a_mutating_operator_shows_in_a_graph() -> None:
    def step(k_cache: Tensor, *rest: Tensor) -> Tensor:
        store_rows(k_cache, *rest)
        return k_cache.sum()

    arguments, expected = kv_arguments(), kv_arguments()
    graphs = graphs_of(step, *arguments)
    step(*expected)
    matches = [store_rows.matches(n) for n in graphs[0].nodes]
    assert matches.count(True) == 1
    assert not any(twice.matches(n) for n in graphs[0].nodes)
    assert all(torch.equal(a, b) for a, b in zip(arguments, expected, strict=True))


def test_a_mutating_operator_refuses_gradients() -> None:
    arguments = list(kv_arguments())
    arguments[2].requires_grad_()
    with pytest.raises(RuntimeError, match="store_rows: is for inference and has no gradient"):
        store_rows(*arguments)
    with torch.no_grad():
        store_rows(*arguments)
    with pytest.raises(RuntimeError, match="rope_: works in place and has no gradient; use rope instead"):
        ops.rope_(**rope_arguments(grad=True))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Watching])
def test_autograd_notices_what_was_overwritten(mode: Callable[[], Any]) -> None:
    with mode():
        k_cache, *rest = kv_arguments()
        x = torch.ones(8, 2, requires_grad=True)
        out = (x * k_cache).sum()
        store_rows(k_cache, *rest)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_mutation_under_inference_mode() -> None:
    with torch.inference_mode():
        arguments = kv_arguments()
        store_rows(*arguments)
        assert arguments[0].sum() == 6


def test_unchecked_looks_at_nothing_on_the_cpu_in_inference_mode() -> None:
    x, weight = torch.randn(2, 4), torch.randn(3, 4)
    with torch.inference_mode():
        assert torch.equal(ops.linear.unchecked(x, weight), ops.linear(x, weight))
        assert ops.glu.unchecked(x[0]).shape == (2,)
        with ops.linear.using("nonsense"), pytest.raises(RuntimeError, match="no such backend"):
            ops.linear.unchecked(x, weight)
    with pytest.raises(ValueError, match="weight"):
        ops.linear.unchecked(x, weight.double())
    assert ops.glu.unchecked(x.requires_grad_()).requires_grad


def test_an_operator_describes_itself() -> None:
    assert "backends torch, triton" in repr(twice)
    assert twice.__doc__ == "x: [...]"
