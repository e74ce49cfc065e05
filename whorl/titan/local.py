"""Call our operators on the local shards of DTensors, for both versions of TorchTitan."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from whorl import ops


def local(x: Any) -> Any:
    """Return the local shard of a DTensor; anything else is returned unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x


def _placed_like(x: Tensor, like: Tensor) -> Tensor:
    """Return x, a local result of the shape of `like`, as a DTensor with its placements; x itself if it is a Tensor."""
    if not isinstance(like, DTensor):
        return x
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(x, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def normalise(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """Return the RMS norm of x over its last dimension, times `weight`, in the dtype of x.

    As in nn.RMSNorm, an eps of None is the machine epsilon of the dtype that the norm is computed in, at least float32.
    """
    if weight.dtype not in (x.dtype, torch.float32):
        weight = weight.to(x.dtype)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return ops.rms_norm(x, weight, eps)


def rotate(q: Tensor, k: Tensor | None, rows: Tensor, style: str) -> tuple[Tensor, Tensor | None]:
    """Rotate the first R channels of q and k, [B, S, H, D], by rows [1 or B, S, R] of cosines, then sines.

    style: "pairs" or "half", see `whorl.ops.rope`. q and k may be DTensors whose heads or batch are sharded over ranks;
    so are the results then.
    """
    local_q, local_k = local(q), local(k)
    rotated_q, rotated_k = ops.rope(local_q, local_k, rows.expand(local_q.shape[0], -1, -1), style=style)
    return _placed_like(rotated_q, q), None if k is None else _placed_like(rotated_k, k)


def complex_rows(cis: Tensor) -> Tensor:
    """Convert complex cos + i sin, [..., R/2], to real [..., R]: cosines, then sines."""
    return torch.view_as_real(cis).transpose(-1, -2).flatten(-2)


def doubled_rows(table: Tensor) -> Tensor:
    """Convert [..., 2 R], where R/2 cosines are repeated and then R/2 sines, to [..., R]: cosines, then sines."""
    cos, _, sin, _ = table.split(table.shape[-1] // 4, -1)
    return torch.cat((cos, sin), -1)


def assign_padding(counts: Tensor, num_rows: int) -> Tensor:
    """Return counts that add up to `num_rows`, with the padding given to the last expert.

    Expert parallelism pads its rows with zeros at the end. The last expert computes zeros from them.
    """
    padding = num_rows - counts.sum(dtype=counts.dtype)
    return torch.cat((counts[:-1], counts[-1:] + padding))
