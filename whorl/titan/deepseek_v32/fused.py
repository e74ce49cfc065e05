"""The attention to train with: `whorl.ops` over flat tokens, no [S, S] tensor, the indexer's loss in backward alone.

Two ways to the same result. Short sequences, where the device has a kernel for it: ordinary heads, all keys, a bit for
each that is chosen. Long ones, and all on Ascend: absorbed queries over the chosen latents. In both, what is cheap to
make again is not kept for backward: keys and values of the heads, and absorbed queries, which are three times the size
of ordinary ones. Target, loss and gradients of the indexer are one operator, which Ascend has as one kernel; under
tensor parallelism they are two, since the ranks' targets are added in between.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whorl import ops
from whorl.ops.indexer import dense_indexer_target, indexer_kl, indexer_kl_gradients, indexer_target
from whorl.ops.indexer.bounds import chunks
from whorl.ops.sparse_attention import masked_attention_backward, sparse_attention_backward

from . import warmup
from .core import Core, Given, count_with
from .latents import absorbed, bmm_into, by_head, heads_of
from .visibility import Sees, each
from .warmup import Dense, Gradients

# What computes the indexer's loss, in either stage.
LOSS = (indexer_target, indexer_kl, indexer_kl_gradients, *warmup.LOSS)

# (sequence, q, k, weights, chosen keys, options) to loss [T] or [1], dq, dk, dweights
Step = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


def choose(core: Core, sees: Sees, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[B * S, K] int32: rows of the flat keys."""
    found = []
    for sequence, (q_one, k_one, weights_one) in enumerate(each(sees.batch, q, k, weights)):
        top = min(core.settings.topk, k_one.shape[0])
        bounds = sees.bounds(sequence)
        indices, _ = ops.lightning_indexer(q_one, k_one, weights_one, top, **bounds, with_scores=False)
        found.append(torch.where(indices < 0, indices, indices + sequence * k_one.shape[0]) if sequence else indices)
    return found[0] if len(found) == 1 else torch.cat(found)


class FusedDSA(Core):
    def attend(self, given: Given) -> Tensor:
        q_nope, q_pe, kv, k_pe, wkv_b, index_q, index_k, index_weights, q_positions, k_positions = given
        batch, num_queries, num_keys = q_nope.shape[0], q_nope.shape[1], kv.shape[1]
        sees = Sees.of(batch, q_positions, k_positions)
        main = [x.to(q_nope.dtype) for x in (q_nope, q_pe, kv, k_pe)]  # autocast may leave some wide
        q_nope, q_pe, kv, k_pe = (x.flatten(0, 1) for x in main)
        index_weights, log = count_with(index_weights, self.log_on(q_nope.device))
        index = (index_q.flatten(0, 1), index_k.flatten(0, 1).to(index_q.dtype), index_weights.flatten(0, 1))
        weight = wkv_b.to(q_nope.dtype)
        if self.settings.stage == "warmup":
            q = torch.cat((q_nope, q_pe), -1).detach()
            out = Dense.apply(self, sees, q, kv, k_pe, weight, *index, log)
        else:
            with torch.no_grad():
                indices = choose(self, sees, *index)
            if self._path(num_keys, q_nope.device) == "masked":
                with torch.no_grad():
                    bits = ops.selection_mask(indices, kv.shape[0])
                q = torch.cat((q_nope, q_pe), -1)
                out = _Masked.apply(self, sees, q, kv, k_pe, weight, *index, log, indices, bits)
            else:
                out = _Absorbed.apply(self, sees, q_nope, q_pe, kv, k_pe, weight, *index, log, indices)
        return out.unflatten(0, (batch, num_queries))

    def _path(self, num_keys: int, device: torch.device | None = None) -> str:
        if self.settings.path != "auto":
            return self.settings.path
        return "masked" if ops.choose_attention(num_keys, self.settings.topk, device) == "masked" else "absorbed"


def indexer_gradients(
    core: Core, sees: Sees, index: tuple[Tensor, ...], indices: Tensor, step: Step
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dweights of the indexer and its loss [1], a sequence at a time."""
    factor = core.settings.factor(indices.shape[0])
    options = {"grad_scale": factor, "deterministic": torch.are_deterministic_algorithms_enabled()}
    parts, total = [], torch.zeros(1, dtype=torch.float32, device=indices.device)
    for sequence, (q, k, weights, chosen) in enumerate(each(sees.batch, *index, indices)):
        own = torch.where(chosen < 0, chosen, chosen - sequence * k.shape[0]) if sequence else chosen
        loss, *gradients = step(sequence, q, k, weights, own, **options)
        total = total + loss.sum() * factor
        parts.append([g.to(x.dtype) for g, x in zip(gradients, (q, k, weights), strict=True)])
    dq, dk, dweights = parts[0] if len(parts) == 1 else [torch.cat(x) for x in zip(*parts, strict=True)]
    return dq, dk, dweights, total


class _Masked(torch.autograd.Function):
    """Ordinary heads over all keys; keys and values of the heads are made again in backward."""

    @staticmethod
    def forward(ctx: Any, core: Core, sees: Sees, *given: Tensor) -> Tensor:
        q, kv, k_pe, weight, *index, _log, indices, bits = given
        k, v = heads_of(kv, k_pe, weight, core.settings.nope, q.shape[1])
        out, lse = ops.masked_attention(q, k, v, bits, core.settings.scale)
        ctx.save_for_backward(q, kv, k_pe, weight, *index, indices, bits, out, lse)
        ctx.core, ctx.sees = core, sees
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        q, kv, k_pe, weight, *index, indices, bits, out, lse = ctx.saved_tensors
        core, sees = ctx.core, ctx.sees
        settings, heads = core.settings, q.shape[1]
        k, v = heads_of(kv, k_pe, weight, settings.nope, heads)

        def step(sequence: int, *given: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            q_one, k_one, lse_one = each(sees.batch, q, k, lse)[sequence]
            parts, chosen = [], given[-1]
            for rows in chunks(q_one.shape[0], k_one.shape[0]):
                bounds = sees.bounds_of(sequence, rows, q.device)
                everywhere = dense_indexer_target(q_one[rows], k_one, lse_one[rows], settings.scale, **bounds)
                found = everywhere.gather(1, chosen[rows].clamp_min(0).long())
                parts.append(torch.where(chosen[rows] >= 0, found, 0))
            target = torch.cat(parts)
            target = target if core.reduce_target is None else core.reduce_target(target)
            return indexer_kl(*given, target, **options)

        learned: Gradients = (None,) * 4
        if settings.coefficient:
            learned = indexer_gradients(core, sees, tuple(index), indices, step)
        dq, dk, dv = masked_attention_backward(dout, q, k, v, bits, out, lse, scale=settings.scale)
        key_weight, value_weight = (part.flatten(0, 1) for part in by_head(weight, heads, settings.nope))
        dk_nope, dk_pe = dk[..., : settings.nope].flatten(1), dk[..., settings.nope :].sum(1)
        dv = dv.flatten(1)
        dkv = torch.addmm(dk_nope @ key_weight, dv, value_weight)
        dweight = torch.cat(
            [(g.T @ kv).unflatten(0, (heads, -1)) for g in (dk_nope, dv)],
            1,
        ).flatten(0, 1)
        return None, None, dq, dkv, dk_pe, dweight, *learned, None, None


class _Absorbed(torch.autograd.Function):
    """Absorbed queries over chosen latents; the queries are made again in backward."""

    @staticmethod
    def forward(ctx: Any, core: Core, sees: Sees, *given: Tensor) -> Tensor:
        q_nope, q_pe, kv, k_pe, weight, *index, _log, indices = given
        settings = core.settings
        key_weight, value_weight = by_head(weight, q_nope.shape[1], settings.nope)
        keys = torch.cat((kv, k_pe), -1)[:, None]
        q = absorbed(q_nope, q_pe, key_weight)
        latent, lse = ops.sparse_attention(q, keys, indices, settings.scale, value_dim=kv.shape[1])
        out = q_nope.new_empty(*q_nope.shape[:2], settings.value)
        bmm_into(out.transpose(0, 1), latent.transpose(0, 1), value_weight.transpose(1, 2))
        ctx.save_for_backward(q_nope, q_pe, keys, weight, *index, indices, latent, lse)
        ctx.core, ctx.sees = core, sees
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        q_nope, q_pe, keys, weight, *index, indices, latent, lse = ctx.saved_tensors
        core, sees = ctx.core, ctx.sees
        settings, rank = core.settings, latent.shape[2]
        key_weight, value_weight = by_head(weight, q_nope.shape[1], settings.nope)
        q = absorbed(q_nope, q_pe, key_weight)

        def step(sequence: int, *given: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            q_one, keys_one, lse_one = each(sees.batch, q, keys, lse)[sequence]
            if core.reduce_target is None:
                main = (q_one, keys_one, lse_one)
                return indexer_kl_gradients(*given, *main, scale=settings.scale, causal=sees.ends is None, **options)
            target = core.reduce_target(indexer_target(q_one, keys_one, given[-1], lse_one, settings.scale))
            return indexer_kl(*given, target, **options)

        learned: Gradients = (None,) * 4
        if settings.coefficient:
            learned = indexer_gradients(core, sees, tuple(index), indices, step)
        by_heads = dout.transpose(0, 1)  # [H, N, Dv]
        dlatent = torch.empty_like(latent)
        bmm_into(dlatent.transpose(0, 1), by_heads, value_weight)
        dvalue_weight = torch.bmm(by_heads.transpose(1, 2), latent.transpose(0, 1))
        exact = torch.are_deterministic_algorithms_enabled()
        dq, dkeys = sparse_attention_backward(
            dlatent, q, keys, indices, latent, lse, scale=settings.scale, deterministic=exact
        )
        dabsorbed = dq[..., :rank].transpose(0, 1)  # [H, N, Dc]
        dq_nope = q_nope.new_empty(q_nope.shape)
        bmm_into(dq_nope.transpose(0, 1), dabsorbed, key_weight.transpose(1, 2))
        dkey_weight = torch.bmm(q_nope.transpose(0, 1).transpose(1, 2), dabsorbed)
        dweight = torch.cat((dkey_weight, dvalue_weight), 1).flatten(0, 1)
        dkv, dk_pe = dkeys[:, 0].split((rank, keys.shape[2] - rank), -1)
        return None, None, dq_nope, dq[..., rank:], dkv, dk_pe, dweight, *learned, None
