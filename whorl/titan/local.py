"""Our operators on the local parts of sharded tensors, as both versions of TorchTitan hand them over."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from whorl import ops


def local(x: Any) -> Any:
    """What this rank has of a DTensor; anything else as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def _like(x: Tensor, whole: Tensor) -> Tensor:
    """A result for `whole`, placed as it is."""
    if not isinstance(whole, DTensor):
        return x
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(x, whole.device_mesh, whole.placements, run_check=False, shape=shape, stride=stride)


def normalise(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """As nn.RMSNorm takes them: without eps it is that of the dtype it computes in."""
    if weight.dtype not in (x.dtype, torch.float32):
        weight = weight.to(x.dtype)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return ops.rms_norm(x, weight, eps)


def rotate(q: Tensor, k: Tensor | None, rows: Tensor, style: str) -> tuple[Tensor, Tensor | None]:
    """q and k [B, S, H, D] by rows [1 or B, S, R]. Heads and batch may be sharded: each rank turns what it has."""
    here, here_k = local(q), local(k)
    turned, turned_k = ops.rope(here, here_k, rows.expand(here.shape[0], -1, -1), style=style)
    return _like(turned, q), None if k is None else _like(turned_k, k)


def complex_rows(cis: Tensor) -> Tensor:
    """[..., R/2] complex to [..., R]: cosines, then sines."""
    return torch.view_as_real(cis).transpose(-1, -2).flatten(-2)


def doubled_rows(table: Tensor) -> Tensor:
    """[..., 2 R], cosines and sines each twice, to [..., R]."""
    cos, _, sin, _ = table.split(table.shape[-1] // 4, -1)
    return torch.cat((cos, sin), -1)


def cover(counts: Tensor, num_rows: int) -> Tensor:
    """Expert parallelism ends its rows with zeros that belong to nobody: the last expert's, who makes zeros of them."""
    rest = num_rows - counts.sum(dtype=counts.dtype)
    return torch.cat((counts[:-1], counts[-1:] + rest))
