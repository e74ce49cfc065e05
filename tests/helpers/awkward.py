"""Operators chosen to be awkward, and what the tests of the mechanism share.

`store_rows` mutates, `split_matmul` reads values, `twice` has a backend that knows nothing of gradients and `matmul`
states no backward.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from whorl.ops._op import OPS, Op, operator

CALLS: list[str] = []  # which implementations of `twice` ran


@operator(mutates=("k_cache", "v_cache"))
def store_rows(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def grouped_reference(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    return torch.cat([part @ w for part, w in zip(x.split(sizes.tolist()), weight, strict=True)])


def _grouped_fake(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[-1])


@operator(fake=_grouped_fake)
def split_matmul(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    return grouped_reference(x, weight, sizes)


@operator(fake=lambda dy, x, weight, sizes: (torch.empty_like(x), torch.empty_like(weight)))
def split_matmul_backward(dy: Tensor, x: Tensor, weight: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    groups = sizes.tolist()
    dweight = torch.stack([a.T @ b for a, b in zip(x.split(groups), dy.split(groups), strict=True)])
    return grouped_reference(dy, weight.transpose(1, 2), sizes), dweight


@split_matmul.gradient(save=("x", "weight", "sizes"))
def _(grads: tuple[Tensor, ...], args: dict[str, Any], outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    dx, dweight = split_matmul_backward(grads[0], args["x"], args["weight"], args["sizes"])
    return {"x": dx, "weight": dweight}


@operator()
def twice(x: Tensor, mode: Literal["add", "multiply"] = "add", *, times: Sequence[int] | None = None) -> Tensor:
    """x: [...]"""
    CALLS.append("torch")
    return x + x if mode == "add" else x * (times or [2])[0]


@operator()
def twice_backward(dy: Tensor) -> Tensor:
    CALLS.append("torch backward")
    return dy + dy


@twice.gradient()
def _(grads: tuple[Tensor, ...], args: dict[str, Any], outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    return {"x": twice_backward(grads[0], backend=args["backend"])}


@twice.impl("triton", accepts=lambda x, **_: "odd sizes are not taken" if x.numel() % 2 else None)
def _(x, mode, times):
    CALLS.append("triton")
    return torch.from_numpy(x.detach().cpu().numpy() * 2).to(x.device)  # would drop the gradient if it could


@twice_backward.impl("triton")
def _(dy):
    CALLS.append("triton backward")
    return 2 * dy


@operator()
def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


LOCAL = [store_rows, split_matmul, split_matmul_backward, twice, twice_backward, matmul]
for _local in LOCAL:  # not for the tests that walk the registry
    del OPS[_local.name]


@contextlib.contextmanager
def counted_nodes(op: Op, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the torch ops called in the block through `op`'s node; empty where the bypass was taken."""
    seen: list[str] = []
    node = op.node

    def called(*args: Any, **kwargs: Any) -> Any:
        seen.append(op.name)
        return node(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(op, "node", called)
        yield seen


def graphs_of(function: Callable[..., Any], *args: Any, backward: bool = False) -> list[torch.fx.Graph]:
    """The AOT graphs, forward and backward, that torch.compile makes of a function without a graph break."""
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    out = torch.compile(function, backend=backend, fullgraph=True)(*args)
    if backward:
        sum(o.sum() for o in (out if isinstance(out, tuple) else (out,)) if o is not None).backward()
    return graphs


def targets(graph: torch.fx.Graph) -> list[Any]:
    return [n.target for n in graph.nodes if n.op == "call_function" and "getitem" not in str(n.target)]


def norm_arguments(grad: bool = False) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8, requires_grad=grad), torch.randn(8, requires_grad=grad)


def rope_arguments(grad: bool = False) -> dict[str, Any]:
    q, k = torch.randn(5, 2, 8, requires_grad=grad), torch.randn(5, 1, 8, requires_grad=grad)
    return {"q": q, "k": k, "cos_sin": torch.randn(16, 8), "positions": torch.arange(5)}


def grouped_arguments(grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(7, 4, requires_grad=grad), torch.randn(3, 4, 6, requires_grad=grad)
    return x, weight, torch.tensor([3, 0, 4])


def kv_arguments() -> tuple[Tensor, ...]:
    return torch.zeros(8, 2), torch.zeros(8, 2), torch.ones(3, 2), torch.full((3, 2), 2.0), torch.tensor([1, 4, 6])
