# mypy: allow-untyped-defs
"""Kernels of the indexer's loss over selected keys: one program per query, keys gathered one block at a time.

An entry is a position in a query's row of indices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._rows import ceil_div, power_of_2, unit_stride
from ..linear_triton import dot
from ..sparse_attention.triton import selection_end
from . import dense_kl_triton
from .bounds import chunks
from .key_gradient_triton import add_dk, gradient_plan, load_query, split_dim, store_query_gradients
from .scores_triton import row_strides


@triton.jit
def _target_kernel(
    q_ptr,
    k_ptr,
    indices_ptr,
    lse_ptr,
    target_ptr,
    q_stride_t,
    q_stride_h,
    k_stride,
    scale,
    K,
    H: tl.constexpr,
    D: tl.constexpr,
    MAIN_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute the head-summed attention of one query to its keys.

    Keys are rows and heads columns of the matmul, so that sums stay within a thread. A head of D channels is read as
    MAIN_D channels, a power of two, and the remaining ones.
    """
    token = tl.program_id(0).to(tl.int64)
    indices_ptr += token * K
    target_ptr += token * K
    length = selection_end(indices_ptr, K, 1024)
    main_channels, rest_channels = tl.arange(0, MAIN_D), MAIN_D + tl.arange(0, REST_D)
    for first_head in tl.range(0, H, BLOCK_H, num_stages=1):
        heads = first_head + tl.arange(0, BLOCK_H)
        q_at = q_ptr + token * q_stride_t + heads[:, None] * q_stride_h
        q_main = tl.load(
            q_at + main_channels[None, :], mask=(heads < H)[:, None] & (main_channels < D)[None, :], other=0.0
        )
        if MAIN_D < D:
            q_rest = tl.load(
                q_at + rest_channels[None, :], mask=(heads < H)[:, None] & (rest_channels < D)[None, :], other=0.0
            )
        # An absent head gets an infinite lse, so that it contributes 0.
        lse = tl.load(lse_ptr + token * H + heads, mask=heads < H, other=float("inf"))
        for start in tl.range(0, length, BLOCK_K):
            entries = start + tl.arange(0, BLOCK_K)
            indices = tl.load(indices_ptr + entries, mask=entries < length, other=-1)
            valid = indices >= 0
            k_at = k_ptr + tl.maximum(indices, 0).to(tl.int64)[:, None] * k_stride
            k_main = tl.load(k_at + main_channels[None, :], mask=(main_channels < D)[None, :], other=0.0)
            logits = dot(k_main, tl.trans(q_main), tl.zeros((BLOCK_K, BLOCK_H), tl.float32), WIDEN)
            if MAIN_D < D:
                k_rest = tl.load(k_at + rest_channels[None, :], mask=(rest_channels < D)[None, :], other=0.0)
                logits = dot(k_rest, tl.trans(q_rest), logits, WIDEN)
            shares = tl.sum(tl.exp(logits * scale - lse[None, :]), 1)
            if first_head > 0:  # stored by the same threads in the previous iteration
                shares += tl.load(target_ptr + entries, mask=valid, other=0.0)
            tl.store(target_ptr + entries, shares, mask=valid)


def target(q: Tensor, k: Tensor, indices: Tensor | None, lse: Tensor, scale: float, **bounds: Tensor | None) -> Tensor:
    """Run the kernel of selected keys or, without indices, that of visible ones. bounds: starts, ends, positions."""
    if indices is None:
        return dense_kl_triton.target(q, k, lse, scale, **bounds)
    q, k, indices = unit_stride(q), unit_stride(k[:, 0]), indices.contiguous()
    out = torch.zeros(indices.shape, dtype=torch.float32, device=q.device)
    if out.numel() and q.shape[1] and k.shape[0]:
        _target_kernel[(q.shape[0],)](
            q,
            k,
            indices,
            lse.contiguous(),
            out,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            scale,
            indices.shape[1],
            H=q.shape[1],
            D=q.shape[2],
            WIDEN=is_interpreting(),
            **target_plan(q.shape[1], q.shape[2], q.element_size()),
        )
    return out


def target_plan(heads: int, dim: int, element_size: int) -> dict[str, int]:
    main_channels, rest_channels = split_dim(dim)
    sizes = {"MAIN_D": main_channels, "REST_D": rest_channels}
    if is_interpreting():
        return {**sizes, "BLOCK_H": 16, "BLOCK_K": 16}
    if element_size == 4 or dim > 640:
        return {**sizes, "BLOCK_H": 16, "BLOCK_K": 16, "num_warps": 4, "num_stages": 1}
    block_h = min(128, max(16, power_of_2(heads)))
    return {**sizes, "BLOCK_H": block_h, "BLOCK_K": 64, "num_warps": 4, "num_stages": 1}


@triton.jit
def _gather_scores(
    q, k_ptr, weights, indices_ptr, start, length, k_stride, D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return a block of selected keys: their entries, indices, vectors, products with every head, and scores."""
    entries = start + tl.arange(0, BLOCK_K)
    indices = tl.load(indices_ptr + entries, mask=entries < length, other=-1)
    channels = tl.arange(0, BLOCK_D)
    k_at = k_ptr + tl.maximum(indices, 0).to(tl.int64)[:, None] * k_stride + channels[None, :]
    # Absent keys are zeros: reading key 0 in their place would turn a NaN in it into 0 * NaN.
    k = tl.load(k_at, mask=(indices >= 0)[:, None] & (channels < D)[None, :], other=0.0)
    dots = dot(k, tl.trans(q), tl.zeros((BLOCK_K, BLOCK_H), tl.float32), WIDEN)
    scores = tl.sum(tl.maximum(dots, 0.0) * weights[None, :], 1)
    return entries, indices, k, dots, scores


@triton.jit
def _kl_kernel(
    q_ptr,
    k_ptr,
    weights_ptr,
    indices_ptr,
    target_ptr,
    loss_ptr,
    dq_ptr,
    dk_ptr,
    dweights_ptr,
    dscores_ptr,
    q_stride_t,
    q_stride_h,
    k_stride,
    weights_stride,
    grad_scale,
    K,
    HI: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LIFT: tl.constexpr,
    KEEP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute one query: first the sums of both distributions, then the loss and its gradients.

    dk is added with atomics; with KEEP the gradients of the scores are stored instead, for `add_dk` to add dk in order.
    """
    token = tl.program_id(0).to(tl.int64)
    indices_ptr += token * K
    target_ptr += token * K
    length = selection_end(indices_ptr, K, 1024)
    heads, channels, inside, q, weights = load_query(
        q_ptr, weights_ptr, token, q_stride_t, q_stride_h, weights_stride, HI, D, BLOCK_H, BLOCK_D
    )

    top = tl.full((), float("-inf"), tl.float32)
    total, mass = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    for start in tl.range(0, length, BLOCK_K):
        entries, indices, _, _, scores = _gather_scores(
            q, k_ptr, weights, indices_ptr, start, length, k_stride, D, BLOCK_H, BLOCK_D, BLOCK_K, WIDEN
        )
        valid = indices >= 0
        scores = tl.where(valid, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a block without keys changes nothing
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(scores - shift), 0)
        mass += tl.sum(tl.load(target_ptr + entries, mask=valid, other=0.0), 0)
        top = new_top
    log_total = tl.log(tl.maximum(total, 1e-37))
    has_mass = tl.where(mass > 0, 1.0, 0.0)
    inverse = tl.div_rn(has_mass, tl.where(mass > 0, mass, 1.0))

    loss = tl.zeros((), tl.float32)
    dq = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    dweights = tl.zeros((BLOCK_K, BLOCK_H), tl.float32)
    for start in tl.range(0, length, BLOCK_K):
        entries, indices, k, dots, scores = _gather_scores(
            q, k_ptr, weights, indices_ptr, start, length, k_stride, D, BLOCK_H, BLOCK_D, BLOCK_K, WIDEN
        )
        valid = indices >= 0
        p = tl.load(target_ptr + entries, mask=valid, other=0.0) * inverse
        log_q = tl.where(valid, scores - top - log_total, 0.0)
        loss += tl.sum(tl.where(p > 0, p * (tl.log(tl.where(p > 0, p, 1.0)) - log_q), 0.0), 0)
        dscores = tl.where(valid, tl.exp(log_q) - p, 0.0) * has_mass
        dweights += dscores[:, None] * tl.maximum(dots, 0.0)
        ddots = tl.where(dots > 0, (dscores * LIFT)[:, None] * weights[None, :], 0.0).to(q.dtype)
        dq = dot(tl.trans(ddots), k, dq, WIDEN)
        if KEEP:
            tl.store(dscores_ptr + token * K + entries, dscores, mask=entries < length)
        else:
            dk = dot(ddots, q, tl.zeros((BLOCK_K, BLOCK_D), tl.float32), WIDEN) * (grad_scale / LIFT)
            dk_at = dk_ptr + tl.maximum(indices, 0).to(tl.int64)[:, None] * D + channels[None, :]
            tl.atomic_add(dk_at, dk, mask=valid[:, None] & (channels < D)[None, :], sem="relaxed")
    tl.store(loss_ptr + token, loss)
    store_query_gradients(dq_ptr, dweights_ptr, dq, dweights, token, heads, channels, inside, grad_scale, HI, D, LIFT)


def kl(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor | None,
    target: Tensor,
    grad_scale: float,
    deterministic: bool,
    **bounds: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the kernel of selected keys or, without indices, those of visible ones. bounds: starts, ends, positions."""
    if indices is None:
        return dense_kl_triton.kl(q, k, weights, target, grad_scale, **bounds)
    q, k, weights = unit_stride(q), unit_stride(k), unit_stride(weights)
    indices, target = indices.contiguous(), target.contiguous()
    loss = q.new_empty(q.shape[0], dtype=torch.float32)
    dq, dweights = q.new_empty(q.shape), weights.new_empty(weights.shape)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    if not q.numel():
        return loss.zero_(), dq, dk, dweights
    if not (indices.numel() and k.shape[0]):
        return loss.zero_(), dq.zero_(), dk, dweights.zero_()
    dscores = torch.zeros(indices.shape, dtype=torch.float32, device=q.device) if deterministic else loss
    _kl_kernel[(q.shape[0],)](
        q,
        k,
        weights,
        indices,
        target,
        loss,
        dq,
        dk,
        dweights,
        dscores,
        *row_strides(q, k, weights),
        grad_scale,
        indices.shape[1],
        KEEP=deterministic,
        **gradient_plan("BLOCK_K", q, stages=1),
    )
    if deterministic:
        _add_dk(q, k, weights, indices, dscores, dk, grad_scale)
    return loss, dq, dk, dweights


def _add_dk(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, dscores: Tensor, dk: Tensor, grad_scale: float
) -> None:
    """Add dk in a fixed order: scatter the gradients of the scores over all keys, one chunk of queries at a time."""
    num_keys = k.shape[0]
    width = ceil_div(num_keys + 1, 16) * 16  # entries without a key go to an extra column that is never read
    for rows in chunks(q.shape[0], width):
        dense = torch.zeros(rows.stop - rows.start, width, dtype=torch.float32, device=q.device)
        columns = torch.where(indices[rows] < 0, num_keys, indices[rows]).long()
        dense.scatter_(1, columns, dscores[rows])
        add_dk(q[rows], k, weights[rows], dense[:, :num_keys], None, dk, grad_scale)
