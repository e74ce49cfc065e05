"""What tracers see of an operator: one node forward, one backward, with and without optional outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from awkward import (
    graphs_of,
    grouped_arguments,
    grouped_reference,
    kv_arguments,
    matmul,
    norm_arguments,
    rope_arguments,
    split_matmul,
    split_matmul_backward,
    store_rows,
    targets,
    twice,
)
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from whorl import ops
from whorl.ops import Op


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> None:
    torch._dynamo.reset()


class _Norm(torch.nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight)


def test_the_node_is_in_every_kind_of_graph() -> None:
    traced = make_fx(ops.rms_norm)(*norm_arguments())
    assert targets(traced.graph) == [ops.rms_norm.node]
    assert targets(torch.export.export(_Norm(), norm_arguments()).graph) == [ops.rms_norm.node]
    assert targets(graphs_of(_Norm(), *norm_arguments())[0]) == [ops.rms_norm.node]


@pytest.mark.parametrize("keys", [True, False])
def test_rope_is_one_node_forward_and_one_backward(keys: bool) -> None:
    arguments = rope_arguments(grad=True) | ({} if keys else {"k": None})
    q, k = arguments.pop("q"), arguments.pop("k")
    graphs = graphs_of(lambda q, k: ops.rope(q, k, **arguments), q, k, backward=True)
    assert [targets(graph).count(ops.rope.node) for graph in graphs] == [1, 1]
    assert {str(t) for t in targets(graphs[0])} == {"whorl.rope.default"}


def test_absent_outputs() -> None:
    arguments = rope_arguments(grad=True) | {"k": None}
    out, missing = ops.rope(**arguments)
    assert missing is None
    (grad,) = torch.autograd.grad(out.sum(), arguments["q"])
    (expected,) = torch.autograd.grad(ops.rope.reference(**arguments)[0].sum(), arguments["q"])
    torch.testing.assert_close(grad, expected)
    with torch.no_grad():
        assert ops.rope(**arguments)[1] is None
    assert torch.compile(ops.rope, backend="aot_eager", fullgraph=True)(**arguments)[1] is None


@pytest.mark.parametrize("compiled", [False, True])
def test_outputs_absent_by_a_flag(compiled: bool) -> None:
    op = ops.qk_norm_rope
    arguments = op.make(**op.cases[3], dtype=torch.float64, device="cpu") | {"with_v": False}
    qkv = arguments.pop("qkv").requires_grad_()

    def call(qkv: Tensor) -> Any:
        return op(qkv, **arguments)

    q, k, v = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(qkv)
    assert v is None
    (got,) = torch.autograd.grad(q.sum() + k.square().sum(), qkv)
    q, k, _ = op.reference(qkv, **arguments)
    (expected,) = torch.autograd.grad(q.sum() + k.square().sum(), qkv)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(dynamic: bool) -> None:
    call = torch.compile(lambda **a: ops.rope(**a, style="pairs"), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (5, 3, 9):
        arguments = rope_arguments() | {"q": torch.randn(tokens, 2, 8), "k": torch.randn(tokens, 1, 8)}
        arguments["positions"] = torch.arange(tokens)
        for got, expected in zip(call(**arguments), ops.rope(**arguments, style="pairs"), strict=True):
            assert torch.equal(got, expected)


def test_a_reference_that_reads_values_states_its_fake() -> None:
    arguments = grouped_arguments(grad=True)
    graphs = graphs_of(split_matmul, *arguments, backward=True)
    assert [targets(g) for g in graphs[:1]] == [[split_matmul.node]]
    assert targets(graphs[1]).count(split_matmul_backward.node) == 1
    got = [a.grad for a in arguments[:2]]
    expected = torch.autograd.grad(grouped_reference(*arguments).sum(), arguments[:2])
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_changes_nothing(grad: bool) -> None:
    x, weight = torch.randn(3, 4, requires_grad=grad), torch.randn(4, 2, requires_grad=grad)
    expected = matmul(x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ weight).dtype == torch.bfloat16
        got = matmul(x, weight)
        compiled = torch.compile(matmul, backend="aot_eager", fullgraph=True)(x, weight)
        if grad:
            grads = torch.autograd.grad(got.sum(), [x, weight])
    assert torch.equal(got, expected)
    assert torch.equal(compiled, expected)
    if grad:
        for g, e in zip(grads, torch.autograd.grad(expected.sum(), [x, weight]), strict=True):
            assert torch.equal(g, e)


CHECKED: dict[str, tuple[Op, Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "store_rows": (store_rows, kv_arguments, {}),
    "rope": (ops.rope, lambda: tuple(rope_arguments(grad=True).values()), {"style": "pairs"}),
    "rope without k": (ops.rope, lambda: tuple((rope_arguments(grad=True) | {"k": None}).values()), {}),
    "split_matmul": (split_matmul, lambda: grouped_arguments(grad=True), {}),
    "rms_norm": (ops.rms_norm, lambda: norm_arguments(grad=True), {"plus_one": True}),
    "twice": (twice, lambda: (torch.ones(4, requires_grad=True),), {}),
    "matmul": (matmul, lambda: (torch.ones(2, 3, requires_grad=True), torch.ones(3, 2)), {}),
}


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name: str) -> None:
    op, make, keywords = CHECKED[name]
    opcheck(op.node, make(), keywords)
