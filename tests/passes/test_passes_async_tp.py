"""Collectives that overlap with products: the bits of the unfused pair, graphs that get them, what is left alone."""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import shared
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from whorl import collectives
from whorl.contracts import all_gather_mm_limit, mm_all_reduce_limit, mm_reduce_scatter_limit
from whorl.ops import linear
from whorl.passes import fused
from whorl.passes.async_tp import fuse_graph
from whorl.passes.fused import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

ours = torch.ops.whorl
TOKENS = (0, 1, 2, 5, 19)
K, N = 48, 32


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32, whole: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(17 * rank + sum(shape))
    if whole:  # whole numbers: every order of every sum gives the same bits
        return torch.randint(-8, 9, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


# ---- operators, on ranks


def operators(rank: int, world: int) -> dict[str, bool]:
    group = dist.group.WORLD.group_name
    results = {}
    for tokens in TOKENS:
        for dtype in (torch.float32, torch.bfloat16):
            for product in ("linear", "mm"):
                x = data(rank, tokens, K, dtype=dtype, whole=product == "mm")
                weight = data(rank, *((K, N) if product == "mm" else (N, K)), dtype=dtype, whole=product == "mm")
                name = f"{tokens} {dtype} {product}"
                results |= {f"{name}: {what}": same for what, same in both_ways(x, weight, product, group).items()}
    x, weight = data(rank, 6, K), data(rank, K, N)
    checks = ("test_schema", "test_faketensor")
    for op, arguments in (
        (matmul_reduce_scatter, (x, weight, group)),
        (matmul_all_reduce, (x, weight, group, False)),
        (all_gather_matmul, (x, [weight, weight], 6 * world - 1, group)),
    ):
        opcheck(op, arguments, test_utils=checks)
    return results


def multiply(x: Tensor, weight: Tensor, product: str) -> Tensor:
    return x @ weight if product == "mm" else linear(x, weight)


def both_ways(x: Tensor, weight: Tensor, product: str, group: str) -> dict[str, bool]:
    y, tokens = multiply(x, weight, product), x.shape[0]
    rows = collectives.local_rows(x, group)
    results = {
        "reduce_scatter": torch.equal(
            matmul_reduce_scatter(x, weight, group, True, product), collectives.ordered_reduce_scatter(y, group)
        ),
        "all_reduce": torch.equal(
            matmul_all_reduce(x, weight, group, True, product), collectives.ordered_all_reduce(y, group)
        ),
    }
    for format in ("", "int8", "fp8"):
        if format:
            whole = collectives.all_gather_quantized(rows, tokens, group, format)
        else:
            whole = collectives.all_gather(rows, tokens, group)
        gathered, *outs = all_gather_matmul(rows, [weight, 2 * weight], tokens, group, format, product)
        same = [torch.equal(gathered, whole)]
        same += [torch.equal(o, multiply(whole, w, product)) for o, w in zip(outs, (weight, 2 * weight), strict=True)]
        # In 8 bits the numbers are whole no more, and sums of aten's mm depend on the rows beside.
        results[f"all_gather {format}"] = all(same[:1] if format and product == "mm" else same)
    return results


def everything() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    return {"operators": operators(rank, world), "graphs": graphs(rank, world)}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids="{} ranks".format)
def found_on_ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return shared(request.param).run(everything, timeout=300)


def test_the_bits_of_the_unfused_pair(found_on_ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(f["operators"] for f in found_on_ranks):
        wrong = [name for name, same in result.items() if not same]
        assert not wrong, f"rank {rank}: {wrong}"
        assert len(result) == len(TOKENS) * 2 * 2 * 5


# ---- graphs, on ranks


def block(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, tokens: int, group: str) -> Tensor:
    """Rows in, rows out; weights as models store them, transposed only after the gather.

    No silu here: its results are not whole numbers, and the bits of torch's products of them may depend on the shape.
    """
    full = ours.all_gather(x, tokens, group)
    hidden = torch.relu(full @ gate.t()) + (full.view(1, *full.shape).view(full.shape) @ up.t())
    return ours.ordered_reduce_scatter(hidden @ down.t(), group)


def block_of_linears(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, tokens: int, group: str) -> Tensor:
    full = ours.all_gather(x, tokens, group)
    hidden = torch.nn.functional.silu(linear(full, gate)) * linear(full, up)
    return ours.ordered_reduce_scatter(linear(hidden, down), group)


def tensor_parallel(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, tokens: int, group: str) -> Tensor:
    return ours.ordered_all_reduce(linear(torch.relu(linear(x, up)), down), group)


def functional_block(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, tokens: int, group: str) -> Tensor:
    full = functional.all_gather_tensor(x, 0, group)
    return functional.reduce_scatter_tensor(torch.relu(full @ up.t()) @ down.t(), "sum", 0, group)


def averaged(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, tokens: int, group: str) -> Tensor:
    return functional.all_reduce(x @ up.t(), "avg", group)


def read_twice(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, tokens: int, group: str) -> Tensor:
    y = x @ up.t()
    return ours.ordered_all_reduce(y, group) + y


def also_read(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, tokens: int, group: str) -> Tensor:
    """The gathered rows themselves are needed too, and before the product."""
    full = ours.all_gather(x, tokens, group)
    return (full * 2).sum() + full @ up.t()


def circular(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, tokens: int, group: str) -> Tensor:
    full = ours.all_gather(x, tokens, group)
    return full @ full.t()


GRAPHS: dict[str, tuple[Callable[..., Tensor], int, dict[str, int]]] = {
    "block": (block, 2, {"all_gather_matmul": 1, "matmul_reduce_scatter": 1, "all_gather": 0, "mm": 0}),
    "linears": (block_of_linears, 2, {"all_gather_matmul": 1, "matmul_reduce_scatter": 1, "linear": 0}),
    "tensor parallel": (tensor_parallel, 1, {"matmul_all_reduce": 1, "linear": 1}),
    "functional": (functional_block, 2, {"all_gather_matmul": 1, "matmul_reduce_scatter": 1, "wait_tensor": 0}),
    "averaged": (averaged, 0, {"matmul_all_reduce": 0, "mm": 1}),
    "read twice": (read_twice, 0, {"matmul_all_reduce": 0}),
    "also read": (also_read, 1, {"all_gather_matmul": 1, "all_gather": 0}),
    "circular": (circular, 0, {"all_gather_matmul": 0, "all_gather": 1}),
}


def graphs(rank: int, world: int) -> dict[str, Any]:
    group = dist.group.WORLD.group_name
    results = {}
    for name, (function, _, _) in GRAPHS.items():
        tokens = 4 * world if name == "functional" else 4 * world - 1
        x = data(rank, 4, K, whole=True)
        weights = [data(rank, *shape, whole=True) for shape in ((N, K), (N, K), (K, N))]

        def call(*tensors: Tensor, function: Any = function, tokens: int = tokens) -> Tensor:
            return function(*tensors, tokens, group)

        expected = call(x, *weights)
        module = make_fx(call)(x, *weights)
        for node in module.graph.nodes:  # make_fx keeps only shapes of traced tensors
            node.meta.setdefault("val", node.meta.get("tensor_meta"))
        left: list[str] = []
        count = fuse_graph(module.graph, group, left=left)
        module.recompile()
        operators = [getattr(n.target, "_opname", "") for n in module.graph.nodes]
        is_same = torch.equal(module(x, *weights), expected)
        results[name] = {"count": count, "operators": operators, "same": is_same, "left": left}
    return results


def test_graphs(found_on_ranks: list[dict[str, Any]]) -> None:
    for result in [f["graphs"] for f in found_on_ranks]:
        for name, (_, count, operators) in GRAPHS.items():
            got = result[name]
            assert got["count"] == count, f"{name}: {got}"
            assert {o: got["operators"].count(o) for o in operators} == operators, f"{name}: {got}"
            assert got["same"], name
        assert "it reduces by 'avg', not 'sum'" in result["averaged"]["left"][0]
        assert "read elsewhere too" in result["read twice"]["left"][0]
        assert "a weight depends on what is gathered" in result["circular"]["left"][0]


# ---- one process


@pytest.fixture
def alone(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_another_group_is_left_alone(alone: str) -> None:
    module = make_fx(lambda x, w: ours.ordered_all_reduce(x @ w, alone))(data(0, 4, K), data(0, K, N))
    assert fuse_graph(module.graph, "another") == 0


def test_the_platform_is_asked_only_where_order_does_not_matter(alone: str) -> None:
    x, weight = data(0, 4, K), data(0, K, N)
    mine = x @ weight
    with mock.patch.object(fused, "reduce_scatter", return_value=lambda: mine + 1) as called:
        assert torch.equal(matmul_reduce_scatter(x, weight, alone, True), mine)
        called.assert_not_called()
        assert torch.equal(matmul_reduce_scatter(x, weight, alone, False), mine + 1)
    assert fused.reduce_scatter(x, weight, alone) is None  # a CPU has none
    assert fused.all_gather(x, [weight], 4, alone) is None
    assert fused.all_reduce(x, weight, alone) is None
    assert not fused.has_symmetric_memory(alone)


@pytest.mark.parametrize(
    ("backends", "asks"), [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo,cuda:gloo", False)]
)
def test_symmetric_memory_where_nccl_serves_the_device(
    alone: str, monkeypatch: pytest.MonkeyPatch, backends: str, asks: bool
) -> None:
    """The engine's groups have a backend for the host, too."""
    from torch.distributed import _symmetric_memory

    requested: list[str] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(_symmetric_memory, "get_symm_mem_workspace", lambda group, min_size: requested.append(group))
    fused.has_symmetric_memory.cache_clear()
    assert fused.has_symmetric_memory(alone) == asks
    assert requested == [alone] * asks
    fused.has_symmetric_memory.cache_clear()


TAKEN = {"shape": (1024, 512), "weight_shape": (512, 4096), "dtype": "bfloat16", "world": 8}
REFUSED = [
    ({"dtype": "float32"}, "input must be one of float16, bfloat16"),
    ({"shape": (2, 1024, 512)}, "must be 2-D"),
    ({"shape": (1024, 128)}, r"inner size must be in \[256, 65535\), got 128"),
    ({"shape": (0, 512)}, "empty tensors"),
    ({"world": 16}, "supports 2, 4, 8 ranks, got 16"),
]


@pytest.mark.parametrize("limit", [mm_reduce_scatter_limit, all_gather_mm_limit, mm_all_reduce_limit])
def test_limits_of_ascends_operators(limit: Callable[..., str | None]) -> None:
    assert limit(**TAKEN) is None
    for change, message in REFUSED:
        reason = limit(**TAKEN | change)
        assert reason is not None, change
        assert re.search(message, reason), reason
    uneven = limit(**TAKEN | {"shape": (1023, 512)})
    assert (uneven is not None) == (limit is mm_reduce_scatter_limit)
