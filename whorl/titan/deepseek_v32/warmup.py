"""Attention of the warm-up stage: dense over visible keys, with a backward only for the indexer.

Tokens are flat: N = B * S queries, and as many keys or, with context parallelism, more. `core.py` explains the other
sizes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whorl import ops
from whorl.ops.indexer.kl import gradients_over_ranks

from .core import Core
from .latents import expand_heads
from .visibility import Visibility, split_sequences, visible_bits

Gradients = tuple[Tensor | None, ...]


def dense_attention(core: Core, visibility: Visibility, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over every visible key, [N, H, Dv], and its log-sum-exp [N, H]; q, k, v: [N, H, *]."""
    scale = core.settings.scale
    if visibility.ends is not None:
        bits = visible_bits(visibility, q.shape[0] // visibility.batch, k.shape[0] // visibility.batch, q.device)
        return ops.masked_attention(q, k, v, bits, scale)
    outputs = [ops.masked_attention(*sequence, None, scale) for sequence in split_sequences(visibility.batch, q, k, v)]
    return outputs[0] if len(outputs) == 1 else tuple(torch.cat(x) for x in zip(*outputs, strict=True))  # type: ignore[return-value]


def dense_gradients(
    core: Core,
    visibility: Visibility,
    sequence: int,
    index: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss [1], dq, dk, dweights of the indexer for one sequence, over every visible key.

    index: queries, keys and weights of the indexer. q, k, lse: those of the attention. factor: multiplies the
    gradients, not the loss. With tensor parallelism the targets are summed over ranks, a chunk of queries at a time.
    """
    options = {"scale": core.settings.scale, "grad_scale": factor, **visibility.bounds(sequence)}
    return gradients_over_ranks(core.reduce_target, *index, None, q, k, lse, **options)


class Dense(torch.autograd.Function):
    """Attention with per-head keys over every visible key; the keys are recomputed in backward.

    tensors: q [N, H, Dn + Dr], kv, k_pe, wkv_b, queries, keys and weights of the indexer, and `log` [1]. Backward
    ignores the gradient of the output. It returns the gradients of the three indexer tensors and, as that of `log`, the
    indexer loss.
    """

    @staticmethod
    def forward(ctx: Any, core: Core, visibility: Visibility, *tensors: Tensor) -> Tensor:
        q, kv, k_pe, weight, *index, _log = tensors
        k, v = expand_heads(kv, k_pe, weight, core.settings.nope, q.shape[1])
        out, lse = dense_attention(core, visibility, q, k, v)
        ctx.save_for_backward(q, kv, k_pe, weight, *index, lse)
        ctx.core, ctx.visibility = core, visibility
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        q, kv, k_pe, weight, *index, lse = ctx.saved_tensors
        core, visibility = ctx.core, ctx.visibility
        k, _ = expand_heads(kv, k_pe, weight, core.settings.nope, q.shape[1])
        factor, log = core.settings.factor(q.shape[0]), torch.zeros(1, dtype=torch.float32, device=q.device)
        parts = []
        for sequence, (*index_one, q_one, k_one, lse_one) in enumerate(
            split_sequences(visibility.batch, *index, q, k, lse)
        ):
            loss, *gradients = dense_gradients(
                core, visibility, sequence, tuple(index_one), q_one, k_one, lse_one, factor
            )
            log = log + loss * factor
            parts.append([g.to(x.dtype) for g, x in zip(gradients, index_one, strict=True)])
        index_gradients = [torch.cat(x) for x in zip(*parts, strict=True)]
        return *(None,) * 6, *index_gradients, log  # none for core, visibility, q, kv, k_pe and weight
