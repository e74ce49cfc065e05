"""Operators on DTensor: two gloo ranks compute on their shards and agree with one process."""

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from whorl import ops

RANKS = 2
WEIGHTS = {"rms_norm": (8,), "add_rms_norm": (8,), "glu": None, "log_softmax": None}
ROWS = {"rms_norm": 1, "add_rms_norm": 2, "glu": 1, "log_softmax": 1}


def _arguments(name: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)  # the same on every rank
    shapes = [(4, 6, 8)] * ROWS[name] + ([WEIGHTS[name]] if WEIGHTS[name] else [])
    return [torch.randn(s, generator=generator) for s in shapes]


def _run(name: str, arguments: list[Tensor], compiled: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients; each output is weighted so that no gradient is trivial."""
    call: Any = getattr(ops, name)
    if compiled:
        call = torch.compile(lambda *a, op=call: op(*a), backend="aot_eager", fullgraph=True)
    arguments = [a.detach().requires_grad_() for a in arguments]
    out = call(*arguments)
    outputs = list(out) if isinstance(out, tuple) else [out]
    sum(o.square().sum() for o in outputs).backward()
    return outputs, [a.grad for a in arguments]


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _check(name: str, placement: Any, mesh: Any, compiled: bool) -> None:
    where = f"{name}, {placement}, compiled {compiled}"
    plain = _arguments(name)
    rows = ROWS[name]
    placed = [distribute_tensor(a, mesh, [placement if i < rows else Replicate()]) for i, a in enumerate(plain)]
    expected_outputs, expected_grads = _run(name, plain)
    outputs, grads = _run(name, placed, compiled)
    assert all(o.placements == (placement,) for o in outputs), f"{where}: outputs {[o.placements for o in outputs]}"
    assert all(g.placements == (placement,) for g in grads[:rows]), where
    is_partial = placement != Replicate()
    for g in grads[rows:]:
        assert isinstance(g.placements[0], Partial) == is_partial, f"{where}: weight gradient {g.placements}"
    for got, expected in zip(outputs + grads, expected_outputs + expected_grads, strict=True):
        torch.testing.assert_close(_whole(got), expected, msg=lambda m: f"{where}: {m}")
    with torch.no_grad():
        out = getattr(ops, name)(*placed)
    for got, expected in zip(out if isinstance(out, tuple) else [out], expected_outputs, strict=True):
        assert got.placements == (placement,)
        torch.testing.assert_close(_whole(got), expected)


def _rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    _check("rms_norm", Shard(0), mesh, compiled=True)  # first: the sharding rule is registered while tracing
    for name, placement in itertools.product(ROWS, [Shard(0), Shard(1), Replicate()]):
        _check(name, placement, mesh, compiled=False)
    x, weight = _arguments("rms_norm")
    gathered = ops.rms_norm(distribute_tensor(x, mesh, [Shard(2)]), distribute_tensor(weight, mesh, [Replicate()]))
    torch.testing.assert_close(_whole(gathered), ops.rms_norm(x, weight))  # the normalised dim is gathered first
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path / "store"),), nprocs=RANKS)
