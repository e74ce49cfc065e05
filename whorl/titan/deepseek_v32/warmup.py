"""The attention of warm-up: every visible key, and a backward for the indexer alone."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whorl import ops
from whorl.ops.indexer import dense_indexer_kl, dense_indexer_kl_gradients, dense_indexer_target
from whorl.ops.indexer.bounds import chunks

from .core import Core
from .latents import heads_of
from .visibility import Sees, each, visible_bits

Gradients = tuple[Tensor | None, ...]
LOSS = (dense_indexer_target, dense_indexer_kl, dense_indexer_kl_gradients)


def attend_to_all(core: Core, sees: Sees, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to every key that is seen: [N, H, Dv], and lse [N, H]."""
    scale = core.settings.scale
    if sees.ends is not None:
        bits = visible_bits(sees, q.shape[0] // sees.batch, k.shape[0] // sees.batch, q.device)
        return ops.masked_attention(q, k, v, bits, scale)
    found = [ops.masked_attention(*one, None, scale) for one in each(sees.batch, q, k, v)]
    return found[0] if len(found) == 1 else tuple(torch.cat(x) for x in zip(*found, strict=True))  # type: ignore[return-value]


def dense_gradients(
    core: Core, sees: Sees, sequence: int, index: tuple[Tensor, ...], q: Tensor, k: Tensor, lse: Tensor, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss [1], dq, dk, dweights of one sequence's indexer, over every key that is seen."""
    scale = core.settings.scale
    if core.reduce_target is None:
        bounds = sees.bounds(sequence)
        return dense_indexer_kl_gradients(*index, q, k, lse, **bounds, scale=scale, grad_scale=factor)
    q_index, k_index, weights = index
    total = torch.zeros(1, dtype=lse.dtype, device=q.device)
    dk = torch.zeros(k_index.shape, dtype=lse.dtype, device=q.device)
    dq, dweights = [], []
    for rows in chunks(q.shape[0], k.shape[0]):
        bounds = sees.bounds_of(sequence, rows, q.device)
        target = core.reduce_target(dense_indexer_target(q[rows], k, lse[rows], scale, **bounds))
        loss, dq_part, dk_part, dweights_part = dense_indexer_kl(
            q_index[rows], k_index, weights[rows], target, **bounds, grad_scale=factor
        )
        total, dk = total + loss.sum(), dk + dk_part
        dq.append(dq_part)
        dweights.append(dweights_part)
    return total, torch.cat(dq), dk, torch.cat(dweights)


class Dense(torch.autograd.Function):
    """Ordinary heads over every visible key; their keys are made again in backward.

    The loss of the indexer is the gradient of the log that stands behind its queries, keys and weights.
    """

    @staticmethod
    def forward(ctx: Any, core: Core, sees: Sees, *given: Tensor) -> Tensor:
        q, kv, k_pe, weight, *index, _log = given
        k, v = heads_of(kv, k_pe, weight, core.settings.nope, q.shape[1])
        out, lse = attend_to_all(core, sees, q, k, v)
        ctx.save_for_backward(q, kv, k_pe, weight, *index, lse)
        ctx.core, ctx.sees = core, sees
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        q, kv, k_pe, weight, *index, lse = ctx.saved_tensors
        core, sees = ctx.core, ctx.sees
        k, _ = heads_of(kv, k_pe, weight, core.settings.nope, q.shape[1])
        factor, log = core.settings.factor(q.shape[0]), torch.zeros(1, dtype=torch.float32, device=q.device)
        parts = []
        for sequence, (*index_one, q_one, k_one, lse_one) in enumerate(each(sees.batch, *index, q, k, lse)):
            loss, *found = dense_gradients(core, sees, sequence, tuple(index_one), q_one, k_one, lse_one, factor)
            log = log + loss * factor
            parts.append([g.to(x.dtype) for g, x in zip(found, index_one, strict=True)])
        learned = [torch.cat(x) for x in zip(*parts, strict=True)]
        return *(None,) * 6, *learned, log
