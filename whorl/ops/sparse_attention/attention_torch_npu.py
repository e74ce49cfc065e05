"""Sparse attention and its gradient on Ascend: torch_npu's absorbed attention on one sequence, without a mask."""

from typing import Any

import torch
from torch import Tensor

from whorl.contracts import sparse_flash_attention_limit

from .. import _torch_npu
from .._torch_npu import dtype_name

SELECTED = 1024  # the gradient operator needs a multiple of so many keys per token


def _limit(q: Tensor, kv: Tensor, indices: Tensor, value_dim: int) -> str | None:
    if not q.numel() or not kv.numel() or not indices.numel():
        return "empty tensors are not taken"
    rope = (*q.shape[:2], q.shape[2] - value_dim)
    return sparse_flash_attention_limit(
        query_shape=(*q.shape[:2], value_dim),
        rope_shape=rope,
        dtype=dtype_name(q),
        attention_mode=2,
        topk=indices.shape[1],
    )


def reason(q: Tensor, kv: Tensor, indices: Tensor, value_dim: int, **_: object) -> str | None:
    """Return None, or the reason that npu_sparse_flash_attention cannot compute the forward."""
    return _limit(q, kv, indices, value_dim or q.shape[2])


def backward_reason(
    dout: Tensor, q: Tensor, kv: Tensor, indices: Tensor, dlse: Tensor | None, deterministic: bool, **_: object
) -> str | None:
    """Return None, or the reason that torch_npu's gradient operator cannot compute the backward."""
    if dlse is not None:
        return "npu_sparse_flash_attention_grad takes no gradient of lse"
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        return "sums in a fixed order only under torch.use_deterministic_algorithms(True)"
    return _limit(q, kv, indices, dout.shape[2])


def _arguments(q: Tensor, kv: Tensor, indices: Tensor, scale: float, value_dim: int) -> dict[str, Any]:
    """Return the arguments of both directions: [1, S, N, D], with the rotary channels split off and key as value."""
    key = kv[None, ..., :value_dim].contiguous()
    return {
        "query": q[None, ..., :value_dim].contiguous(),
        "key": key,
        "value": key,
        "sparse_indices": indices[None, :, None].contiguous(),
        "scale_value": scale,
        "query_rope": q[None, ..., value_dim:].contiguous(),
        "key_rope": kv[None, ..., value_dim:].contiguous(),
        "sparse_block_size": 1,
        "sparse_mode": 0,
        "attention_mode": 2,
    }


def forward(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, value_dim: int, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Run the forward; for tokens without keys, where torch_npu documents no result, fill in zeros and -inf."""
    out, top, total = _torch_npu.call(
        "npu_sparse_flash_attention",
        **_arguments(q, kv, indices, scale, value_dim or q.shape[2]),
        layout_query="BSND",
        layout_kv="BSND",
        return_softmax_lse=True,
    )
    is_empty = indices[:, :1] < 0
    lse = torch.where(is_empty, -torch.inf, (top + total.log())[0, 0])
    return out[0].masked_fill(is_empty[..., None], 0), lse


def backward(
    dout: Tensor, q: Tensor, kv: Tensor, indices: Tensor, out: Tensor, lse: Tensor, scale: float, **_: object
) -> tuple[Tensor, Tensor]:
    is_empty = indices[:, :1] < 0
    top = lse.masked_fill(is_empty, 0)[None, None].contiguous()
    filled = torch.nn.functional.pad(indices, (0, -indices.shape[1] % SELECTED), value=-1)
    dq, dk, dv, dq_rope, dk_rope = _torch_npu.call(
        "npu_sparse_flash_attention_grad",
        **_arguments(q, kv, filled, scale, dout.shape[2]),
        d_out=dout.masked_fill(is_empty[..., None], 0)[None].contiguous(),
        out=out[None].contiguous(),
        softmax_max=top,
        softmax_sum=torch.ones_like(top),
        layout="BSND",
    )
    dq = torch.cat((dq, dq_rope), -1)[0].masked_fill(is_empty[..., None], 0)
    shared = (dk.float() + dv.float()).to(kv.dtype)  # key and value are one tensor
    return dq, torch.cat((shared, dk_rope), -1)[0]
