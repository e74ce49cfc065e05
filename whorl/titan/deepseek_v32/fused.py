"""The attention to train with: `whorl.ops` over flat tokens, no [S, S] tensor, the indexer's loss in backward alone.

Two ways to the same result. Short sequences, where the device has a kernel for it: ordinary heads, all keys, a bit for
each that is chosen. Long ones, and all on Ascend: absorbed queries over the chosen latents. In both, what is cheap to
make again is not kept for backward: keys and values of the heads, and absorbed queries, which are three times the size
of ordinary ones. Target, loss and gradients of the indexer are one operator, which Ascend has as one kernel; under
tensor parallelism they are two, since the ranks' targets are added in between.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whorl import ops
from whorl.ops.indexer import (
    dense_indexer_kl,
    dense_indexer_kl_gradients,
    dense_indexer_target,
    indexer_kl,
    indexer_kl_gradients,
    indexer_target,
)
from whorl.ops.indexer.bounds import chunks, visible_keys
from whorl.ops.sparse_attention import masked_attention_backward, sparse_attention_backward
from whorl.ops.sparse_attention.bits import WORD, num_words

from .core import Core, count_with

Gradients = tuple[Tensor | None, ...]
# (sequence, q, k, weights, chosen keys, options) to loss [T] or [1], dq, dk, dweights
Step = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sees:
    """Who sees whom: bounds of each sequence's queries in positions, or, all None, causal in the order they lie in."""

    batch: int
    ends: Tensor | None  # [B, S] int32
    keys: Tensor | None  # [B, T] int32

    @staticmethod
    def of(batch: int, q_positions: Tensor | None, k_positions: Tensor | None) -> "Sees":
        if q_positions is None or k_positions is None:
            return Sees(batch=batch, ends=None, keys=None)
        ends, keys = (q_positions + 1).int(), k_positions.int()
        return Sees(batch=batch, ends=ends.expand(batch, -1), keys=keys.expand(batch, -1))

    def bounds(self, sequence: int) -> dict[str, Any]:
        """For all queries of a sequence."""
        if self.ends is None or self.keys is None:
            return {"starts": None, "ends": None, "key_positions": None}
        ends = self.ends[sequence].contiguous()
        # Positions count from 0.
        return {"starts": torch.zeros_like(ends), "ends": ends, "key_positions": self.keys[sequence].contiguous()}

    def bounds_of(self, sequence: int, rows: slice, device: torch.device) -> dict[str, Any]:
        """For some: causal by row number is something a part has to be told."""
        whole = self.bounds(sequence)
        ends = whole["ends"]
        part = torch.arange(rows.start + 1, rows.stop + 1, device=device).int() if ends is None else ends[rows]
        return whole | {"starts": torch.zeros_like(part), "ends": part}


def each(batch: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """[B * S, ...] of every tensor by sequence."""
    if batch == 1:
        return [tensors]
    return list(zip(*(x.unflatten(0, (batch, -1)).unbind(0) for x in tensors), strict=True))


def choose(core: Core, sees: Sees, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[B * S, K] int32: rows of the flat keys."""
    found = []
    for sequence, (q_one, k_one, weights_one) in enumerate(each(sees.batch, q, k, weights)):
        top = min(core.settings.topk, k_one.shape[0])
        bounds = sees.bounds(sequence)
        indices, _ = ops.lightning_indexer(q_one, k_one, weights_one, top, **bounds, with_scores=False)
        found.append(torch.where(indices < 0, indices, indices + sequence * k_one.shape[0]) if sequence else indices)
    return found[0] if len(found) == 1 else torch.cat(found)


def visible_bits(sees: Sees, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """A bit for every key that is seen, as `selection_mask` has one for every key that is chosen."""
    total = sees.batch * num_keys
    powers = (1 << torch.arange(WORD, device=device)).long()
    words = []
    for sequence in range(sees.batch):
        for rows in chunks(num_queries, total):
            bounds = sees.bounds_of(sequence, rows, device)
            seen = visible_keys(rows.stop - rows.start, num_keys, **bounds, device=device)
            before = sequence * num_keys
            room = num_words(total) * WORD
            seen = torch.nn.functional.pad(seen, (before, room - before - num_keys))
            words.append((seen.unflatten(1, (-1, WORD)) * powers).sum(-1).int())
    return torch.cat(words)


class FusedDSA(Core):
    def forward(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv: Tensor,
        k_pe: Tensor,
        wkv_b: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        q_positions: Tensor | None = None,
        k_positions: Tensor | None = None,
    ) -> Tensor:
        batch, num_queries, num_keys = q_nope.shape[0], q_nope.shape[1], kv.shape[1]
        sees = Sees.of(batch, q_positions, k_positions)
        main = [x.to(q_nope.dtype) for x in (q_nope, q_pe, kv, k_pe)]  # autocast may leave some wide
        q_nope, q_pe, kv, k_pe = (x.flatten(0, 1) for x in main)
        index_weights, log = count_with(index_weights, self.log_on(q_nope.device))
        index = (index_q.flatten(0, 1), index_k.flatten(0, 1).to(index_q.dtype), index_weights.flatten(0, 1))
        weight = wkv_b.to(q_nope.dtype)
        if self.settings.stage == "warmup":
            q = torch.cat((q_nope, q_pe), -1).detach()
            out = _Dense.apply(q, kv, k_pe, weight, *index, log, self, sees)
        else:
            with torch.no_grad():
                indices = choose(self, sees, *index)
            if self._path(num_keys, q_nope.device) == "masked":
                with torch.no_grad():
                    bits = ops.selection_mask(indices, kv.shape[0])
                q = torch.cat((q_nope, q_pe), -1)
                out = _Masked.apply(q, kv, k_pe, weight, *index, log, indices, bits, self, sees)
            else:
                out = _Absorbed.apply(q_nope, q_pe, kv, k_pe, weight, *index, log, indices, self, sees)
        return out.unflatten(0, (batch, num_queries))

    def _path(self, num_keys: int, device: torch.device | None = None) -> str:
        if self.settings.path != "auto":
            return self.settings.path
        return "masked" if ops.choose_attention(num_keys, self.settings.topk, device) == "masked" else "absorbed"


def by_head(weight: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """wkv_b as [H, Dn, Dc] of keys and [H, Dv, Dc] of values."""
    both = weight.unflatten(0, (heads, -1))
    return both[:, :nope], both[:, nope:]


def heads_of(kv: Tensor, k_pe: Tensor, weight: Tensor, nope: int, heads: int) -> tuple[Tensor, Tensor]:
    """k [N, H, Dn + Dr] and v [N, H, Dv], contiguous, of latents [N, Dc]."""
    key_weight, value_weight = (part.flatten(0, 1) for part in by_head(weight, heads, nope))
    k = kv.new_empty(kv.shape[0], heads, nope + k_pe.shape[1])
    k[..., :nope] = (kv @ key_weight.T).unflatten(1, (heads, nope))
    k[..., nope:] = k_pe[:, None]
    return k, (kv @ value_weight.T).unflatten(1, (heads, -1))


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


class _Dense(torch.autograd.Function):
    """Warm-up: ordinary heads over every visible key, and a backward for the indexer alone."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        k_pe: Tensor,
        weight: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        log: Tensor,
        core: FusedDSA,
        sees: Sees,
    ) -> Tensor:
        k, v = heads_of(kv, k_pe, weight, core.settings.nope, q.shape[1])
        out, lse = attend_to_all(core, sees, q, k, v)
        ctx.save_for_backward(q, kv, k_pe, weight, index_q, index_k, index_weights, lse)
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
        return None, None, None, None, *learned, log, None, None


class _Masked(torch.autograd.Function):
    """Ordinary heads over all keys; keys and values of the heads are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        k_pe: Tensor,
        weight: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        log: Tensor,
        indices: Tensor,
        bits: Tensor,
        core: FusedDSA,
        sees: Sees,
    ) -> Tensor:
        k, v = heads_of(kv, k_pe, weight, core.settings.nope, q.shape[1])
        out, lse = ops.masked_attention(q, k, v, bits, core.settings.scale)
        ctx.save_for_backward(q, kv, k_pe, weight, index_q, index_k, index_weights, indices, bits, out, lse)
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
        return dq, dkv, dk_pe, dweight, *learned, None, None, None, None


def bmm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """A product written where it belongs, whatever the strides."""
    if torch.compiler.is_compiling():  # which knows contiguous results only, and fuses the copy
        out.copy_(torch.bmm(a, b))
    else:
        torch.bmm(a, b, out=out)


def absorbed(q_nope: Tensor, q_pe: Tensor, key_weight: Tensor) -> Tensor:
    """Queries that meet the latents themselves, [N, H, Dc + Dr]; written where they belong at once."""
    rank = key_weight.shape[2]
    q = q_nope.new_empty(*q_nope.shape[:2], rank + q_pe.shape[2])
    bmm_into(q[..., :rank].transpose(0, 1), q_nope.transpose(0, 1), key_weight)
    q[..., rank:] = q_pe
    return q


class _Absorbed(torch.autograd.Function):
    """Absorbed queries over chosen latents; the queries are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q_nope: Tensor,
        q_pe: Tensor,
        kv: Tensor,
        k_pe: Tensor,
        weight: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        log: Tensor,
        indices: Tensor,
        core: FusedDSA,
        sees: Sees,
    ) -> Tensor:
        settings = core.settings
        key_weight, value_weight = by_head(weight, q_nope.shape[1], settings.nope)
        keys = torch.cat((kv, k_pe), -1)[:, None]
        q = absorbed(q_nope, q_pe, key_weight)
        latent, lse = ops.sparse_attention(q, keys, indices, settings.scale, value_dim=kv.shape[1])
        out = q_nope.new_empty(*q_nope.shape[:2], settings.value)
        bmm_into(out.transpose(0, 1), latent.transpose(0, 1), value_weight.transpose(1, 2))
        index = (index_q, index_k, index_weights)
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
        return dq_nope, dq[..., rank:], dkv, dk_pe, dweight, *learned, None, None, None
