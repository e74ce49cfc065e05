"""The attention core for training: `whorl.ops` over flat tokens, without [S, S] tensors.

There are two paths to the same result. The masked path, for short sequences on devices that have the kernel, expands
latents to keys and values for each head and reads all of them; a bit mask says which are selected. The absorbed path,
for long sequences and always on Ascend, multiplies queries by the key weights ("absorbed"), so that they attend
directly to the selected latents. In both, what is cheap to recompute is not saved for backward: keys and values of the
heads, and absorbed queries, which are three times as large as plain ones.

The indexer loss is computed in backward only. On the absorbed path its target, the loss and the gradients of the
indexer are one operator, which is one kernel on Ascend; with tensor parallelism, and on the masked path, the target is
an operator of its own, so that the targets of the ranks can be summed before the loss. Tokens are flat, N = B * S;
`core.py` explains the other sizes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whorl import ops
from whorl.ops.indexer import indexer_kl, indexer_kl_gradients, indexer_target
from whorl.ops.indexer.bounds import chunks
from whorl.ops.indexer.kl import gradients_over_ranks
from whorl.ops.sparse_attention import masked_attention_backward, sparse_attention_backward

from .core import Core, CoreInputs, log_with_weights
from .latents import absorb_queries, bmm_into, expand_heads, split_heads
from .visibility import Visibility, split_sequences
from .warmup import Dense, Gradients

# The operators that compute the indexer loss, in both stages.
LOSS = (indexer_target, indexer_kl, indexer_kl_gradients)

# Computes the indexer loss of one sequence: (number of the sequence, q, k, weights and selected keys of the indexer,
# options) -> loss [S] or [1], not scaled; dq, dk, dweights, scaled by the option grad_scale
IndexerStep = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


def select_keys(core: Core, visibility: Visibility, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return the selected keys of each query as indices into the flat keys, [B * S, K] int32, -1 for none.

    q, k, weights: those of the indexer, with flat tokens. K is top-k, or the number of keys if that is smaller.
    """
    selections = []
    for sequence, (q_one, k_one, weights_one) in enumerate(split_sequences(visibility.batch, q, k, weights)):
        count = min(core.settings.topk, k_one.shape[0])
        bounds = visibility.bounds(sequence)
        indices, _ = ops.lightning_indexer(q_one, k_one, weights_one, count, **bounds, with_scores=False)
        selections.append(
            torch.where(indices < 0, indices, indices + sequence * k_one.shape[0]) if sequence else indices
        )
    return selections[0] if len(selections) == 1 else torch.cat(selections)


class FusedDSA(Core):
    """The core for training; it chooses between the masked and the absorbed path, and in warm-up uses `Dense`."""

    def attend(self, inputs: CoreInputs) -> Tensor:
        q_nope, q_pe, kv, k_pe, wkv_b, index_q, index_k, index_weights, q_positions, k_positions = inputs
        batch, num_queries, num_keys = q_nope.shape[0], q_nope.shape[1], kv.shape[1]
        visibility = Visibility.from_positions(batch, q_positions, k_positions)
        main_inputs = [x.to(q_nope.dtype) for x in (q_nope, q_pe, kv, k_pe)]  # autocast may leave some of them in fp32
        q_nope, q_pe, kv, k_pe = (x.flatten(0, 1) for x in main_inputs)
        index_weights, log = log_with_weights(index_weights, self.log_on(q_nope.device))
        index_inputs = (index_q.flatten(0, 1), index_k.flatten(0, 1).to(index_q.dtype), index_weights.flatten(0, 1))
        weight = wkv_b.to(q_nope.dtype)
        if self.settings.stage == "warmup":
            q = torch.cat((q_nope, q_pe), -1).detach()
            out = Dense.apply(self, visibility, q, kv, k_pe, weight, *index_inputs, log)
        else:
            with torch.no_grad():
                indices = select_keys(self, visibility, *index_inputs)
            if self._path(num_keys, q_nope.device) == "masked":
                with torch.no_grad():
                    bits = ops.selection_mask(indices, kv.shape[0])
                q = torch.cat((q_nope, q_pe), -1)
                out = _Masked.apply(self, visibility, q, kv, k_pe, weight, *index_inputs, log, indices, bits)
            else:
                out = _Absorbed.apply(self, visibility, q_nope, q_pe, kv, k_pe, weight, *index_inputs, log, indices)
        return out.unflatten(0, (batch, num_queries))

    def _path(self, num_keys: int, device: torch.device | None = None) -> str:
        if self.settings.path != "auto":
            return self.settings.path
        return "masked" if ops.choose_attention(num_keys, self.settings.topk, device) == "masked" else "absorbed"


def indexer_gradients(
    core: Core, visibility: Visibility, index: tuple[Tensor, ...], indices: Tensor, step: IndexerStep
) -> Gradients:
    """Return dq, dk, dweights of the indexer and its scaled loss [1], computed by `step` one sequence at a time.

    index: queries, keys and weights of the indexer, with flat tokens. indices: the result of `select_keys`. Without an
    indexer loss (coefficient 0) all four are None, and nothing is computed.
    """
    if not core.settings.coefficient:
        return (None,) * 4
    factor = core.settings.factor(indices.shape[0])
    options = {"grad_scale": factor, "deterministic": torch.are_deterministic_algorithms_enabled()}
    parts, total = [], torch.zeros(1, dtype=torch.float32, device=indices.device)
    for sequence, (q, k, weights, chosen) in enumerate(split_sequences(visibility.batch, *index, indices)):
        local_indices = torch.where(chosen < 0, chosen, chosen - sequence * k.shape[0]) if sequence else chosen
        loss, *gradients = step(sequence, q, k, weights, local_indices, **options)
        total = total + loss.sum() * factor
        parts.append([g.to(x.dtype) for g, x in zip(gradients, (q, k, weights), strict=True)])
    dq, dk, dweights = parts[0] if len(parts) == 1 else [torch.cat(x) for x in zip(*parts, strict=True)]
    return dq, dk, dweights, total


class _Masked(torch.autograd.Function):
    """Attention with per-head keys and a bit mask; keys and values of the heads are recomputed in backward.

    tensors: q, kv, k_pe, wkv_b, the three of the indexer, log, selected keys, bit mask. The gradient of `log` is the
    indexer loss.
    """

    @staticmethod
    def forward(ctx: Any, core: Core, visibility: Visibility, *tensors: Tensor) -> Tensor:
        q, kv, k_pe, weight, *index, _log, indices, bits = tensors
        k, v = expand_heads(kv, k_pe, weight, core.settings.nope, q.shape[1])
        out, lse = ops.masked_attention(q, k, v, bits, core.settings.scale)
        ctx.save_for_backward(q, kv, k_pe, weight, *index, indices, bits, out, lse)
        ctx.core, ctx.visibility = core, visibility
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        q, kv, k_pe, weight, *index, indices, bits, out, lse = ctx.saved_tensors
        core, visibility = ctx.core, ctx.visibility
        settings, heads = core.settings, q.shape[1]
        k, v = expand_heads(kv, k_pe, weight, settings.nope, heads)

        def step(sequence: int, *index_tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            q_one, k_one, lse_one = split_sequences(visibility.batch, q, k, lse)[sequence]
            parts, chosen = [], index_tensors[-1]
            for rows in chunks(q_one.shape[0], k_one.shape[0]):
                bounds = visibility.chunk_bounds(sequence, rows, q.device)
                dense_target = indexer_target(q_one[rows], k_one, None, lse_one[rows], settings.scale, **bounds)
                selected = dense_target.gather(1, chosen[rows].clamp_min(0).long())
                parts.append(torch.where(chosen[rows] >= 0, selected, 0))
            target = torch.cat(parts)
            target = target if core.reduce_target is None else core.reduce_target(target)
            return indexer_kl(*index_tensors, target, **options)

        index_gradients = indexer_gradients(core, visibility, tuple(index), indices, step)
        dq, dk, dv = masked_attention_backward(dout, q, k, v, bits, out, lse, scale=settings.scale)
        key_weight, value_weight = (part.flatten(0, 1) for part in split_heads(weight, heads, settings.nope))
        dk_nope, dk_pe = dk[..., : settings.nope].flatten(1), dk[..., settings.nope :].sum(1)
        dv = dv.flatten(1)
        dkv = torch.addmm(dk_nope @ key_weight, dv, value_weight)
        dweight = torch.cat(
            [(g.T @ kv).unflatten(0, (heads, -1)) for g in (dk_nope, dv)],
            1,
        ).flatten(0, 1)
        return None, None, dq, dkv, dk_pe, dweight, *index_gradients, None, None


class _Absorbed(torch.autograd.Function):
    """Attention of absorbed queries over selected latents; the absorbed queries are recomputed in backward.

    tensors: q_nope, q_pe, kv, k_pe, wkv_b, the three of the indexer, log, selected keys. The gradient of `log` is the
    indexer loss.
    """

    @staticmethod
    def forward(ctx: Any, core: Core, visibility: Visibility, *tensors: Tensor) -> Tensor:
        q_nope, q_pe, kv, k_pe, weight, *index, _log, indices = tensors
        settings = core.settings
        key_weight, value_weight = split_heads(weight, q_nope.shape[1], settings.nope)
        keys = torch.cat((kv, k_pe), -1)[:, None]
        q = absorb_queries(q_nope, q_pe, key_weight)
        latent, lse = ops.sparse_attention(q, keys, indices, settings.scale, value_dim=kv.shape[1])
        out = q_nope.new_empty(*q_nope.shape[:2], settings.value)
        bmm_into(out.transpose(0, 1), latent.transpose(0, 1), value_weight.transpose(1, 2))
        ctx.save_for_backward(q_nope, q_pe, keys, weight, *index, indices, latent, lse)
        ctx.core, ctx.visibility = core, visibility
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        q_nope, q_pe, keys, weight, *index, indices, latent, lse = ctx.saved_tensors
        core, visibility = ctx.core, ctx.visibility
        settings, rank = core.settings, latent.shape[2]
        key_weight, value_weight = split_heads(weight, q_nope.shape[1], settings.nope)
        q = absorb_queries(q_nope, q_pe, key_weight)

        def step(sequence: int, *index_tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            q_one, keys_one, lse_one = split_sequences(visibility.batch, q, keys, lse)[sequence]
            tensors, causal = (*index_tensors, q_one, keys_one, lse_one), visibility.ends is None
            return gradients_over_ranks(core.reduce_target, *tensors, scale=settings.scale, causal=causal, **options)

        index_gradients = indexer_gradients(core, visibility, tuple(index), indices, step)
        by_heads = dout.transpose(0, 1)  # [H, N, Dv]
        dlatent = torch.empty_like(latent)
        bmm_into(dlatent.transpose(0, 1), by_heads, value_weight)
        dvalue_weight = torch.bmm(by_heads.transpose(1, 2), latent.transpose(0, 1))
        deterministic = torch.are_deterministic_algorithms_enabled()
        dq, dkeys = sparse_attention_backward(
            dlatent, q, keys, indices, latent, lse, scale=settings.scale, deterministic=deterministic
        )
        dabsorbed = dq[..., :rank].transpose(0, 1)  # [H, N, Dc]
        dq_nope = q_nope.new_empty(q_nope.shape)
        bmm_into(dq_nope.transpose(0, 1), dabsorbed, key_weight.transpose(1, 2))
        dkey_weight = torch.bmm(q_nope.transpose(0, 1).transpose(1, 2), dabsorbed)
        dweight = torch.cat((dkey_weight, dvalue_weight), 1).flatten(0, 1)
        dkv, dk_pe = dkeys[:, 0].split((rank, keys.shape[2] - rank), -1)
        return None, None, dq_nope, dq[..., rank:], dkv, dk_pe, dweight, *index_gradients, None
