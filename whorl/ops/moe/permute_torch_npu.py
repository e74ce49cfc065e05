"""Permute and unpermute on Ascend, by torch_npu's operators and their gradients."""

import torch
from torch import Tensor

from whorl.contracts import moe_token_permute_limit

from .. import _torch_npu
from .._torch_npu import dtype_name

UNWEIGHTED = "npu_moe_token_permute does not multiply rows by probs"


def permute_reason(x: Tensor, ids: Tensor, probs: Tensor | None, **_: object) -> str | None:
    """Return None, or the reason that npu_moe_token_permute cannot take these arguments."""
    if probs is not None:
        return UNWEIGHTED
    return moe_token_permute_limit(shape=x.shape, dtype=dtype_name(x), top_k=ids.shape[1])


def permute_backward_reason(drows: Tensor, places: Tensor, probs: Tensor | None, **_: object) -> str | None:
    """Return None, or the reason that npu_moe_token_permute_grad cannot take these arguments."""
    if probs is not None:
        return UNWEIGHTED
    return moe_token_permute_limit(shape=drows.shape, dtype=dtype_name(drows), top_k=places.shape[1])


def unpermute_reason(rows: Tensor, places: Tensor, **_: object) -> str | None:
    """Return None, or the reason that npu_moe_token_unpermute, or its gradient, cannot take these arguments."""
    return moe_token_permute_limit(shape=rows.shape, dtype=dtype_name(rows), top_k=places.shape[1])


def permute(x: Tensor, ids: Tensor, num_experts: int, probs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows, places = _torch_npu.call(
        "npu_moe_token_permute", tokens=x.contiguous(), indices=ids.contiguous(), num_out_tokens=0, padded_mode=False
    )
    flat = ids.flatten().long()
    counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return rows, places.view(ids.shape), counts


def permute_backward(
    drows: Tensor, places: Tensor, x: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    dx = _torch_npu.call(
        "npu_moe_token_permute_grad",
        tokens=drows.new_empty(places.shape[0], drows.shape[1]),  # the operator reads only the shape
        grad_permuted_tokens=drows.contiguous(),
        indices=places.int().contiguous(),  # likewise only the shape
        sorted_indices=places.int().flatten(),
        padded_mode=False,
    )
    return dx, None


def _weights(rows: Tensor, places: Tensor, probs: Tensor | None) -> Tensor:
    """Return probs, or ones: without probs torch_npu does not add up the rows of a token."""
    return torch.ones(places.shape, dtype=rows.dtype, device=rows.device) if probs is None else probs.contiguous()


def unpermute(rows: Tensor, places: Tensor, probs: Tensor | None) -> Tensor:
    return _torch_npu.call(
        "npu_moe_token_unpermute",
        permuted_tokens=rows.contiguous(),
        sorted_indices=places.int().flatten(),
        probs=_weights(rows, places, probs),
        padded_mode=False,
        restore_shape=None,
    )


def unpermute_backward(dy: Tensor, rows: Tensor, places: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    drows, dprobs = _torch_npu.call(
        "npu_moe_token_unpermute_grad",
        permuted_tokens=rows.contiguous(),
        grad_unpermuted_tokens=dy.contiguous(),
        sorted_indices=places.int().flatten(),
        probs=_weights(rows, places, probs),
        padded_mode=False,
        restore_shape=None,
    )
    return drows, None if probs is None else dprobs
