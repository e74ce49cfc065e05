"""Grouped matmul on Ascend. npu_grouped_matmul drops gradients silently, so the backward calls it explicitly."""

import torch
from torch import Tensor

from whorl.contracts import grouped_matmul_limit

from .. import _torch_npu
from .._torch_npu import dtype_name

ROWS, SUMS = 0, 2  # values of group_type: the rows of x are grouped, or the summed dimension is


def _limit(x: Tensor, weight: Tensor, groups: int, group_type: int) -> str | None:
    """Return None, or the reason that npu_grouped_matmul cannot compute this product; arguments as in `_product`."""
    if not x.numel() or not weight.numel():
        return "empty tensors are not taken"
    return grouped_matmul_limit(
        shapes=[x.shape],
        weight_shapes=[weight.shape],
        dtype=dtype_name(x),
        weight_dtype=dtype_name(weight),
        groups=groups,
        split_item=3,
        group_type=group_type,
        group_list_type=0,
    )


def reason(x: Tensor, weight: Tensor, counts: Tensor) -> str | None:
    """Return None, or the reason that npu_grouped_matmul cannot compute the forward."""
    return _limit(x, weight.transpose(1, 2), counts.numel(), ROWS)


def backward_reason(dy: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> str | None:
    """Return None, or the reason that npu_grouped_matmul cannot compute both gradients."""
    return _limit(dy, weight, counts.numel(), ROWS) or _limit(dy.t(), x, counts.numel(), SUMS)


def forward(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return _product(x.contiguous(), weight.transpose(1, 2), counts, ROWS)


def backward(dy: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    dy = dy.contiguous()
    return _product(dy, weight.contiguous(), counts, ROWS), _product(dy.t(), x.contiguous(), counts, SUMS)


def _product(x: Tensor, weight: Tensor, counts: Tensor, group_type: int) -> Tensor:
    (y,) = _torch_npu.call(
        "npu_grouped_matmul",
        x=[x],
        weight=[weight],
        group_list=counts.cumsum(0, dtype=torch.int64),
        split_item=3,
        group_type=group_type,
        group_list_type=0,
        act_type=0,
    )
    return y
