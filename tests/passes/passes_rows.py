"""The graphs that the named patterns of vllm-ascend rewrite, and its Flash Comm V1, as small functions."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from passes_cases import both, summary
from passes_models import Parts, all_reduce
from torch import Tensor

from whorl import ops, passes
from whorl.ops.quant import dynamic_quant
from whorl.passes import SequenceParallel

C, LATENT, EXPERTS = 64, 16, 8


class Weights:
    """Sharded and whole weights, and inputs that every rank has whole."""

    def __init__(self) -> None:
        parts = Parts(dist.get_rank(), dist.get_world_size(), torch.float32)
        self.size, self.group = dist.get_world_size(), dist.group.WORLD
        self.ups = [parts.shard(0, 2 * C, C) for _ in range(3)]
        self.downs = [parts.shard(1, C, 2 * C) for _ in range(3)]
        self.norms = [parts.norm(C) for _ in range(3)]
        self.latent, self.latent_up = parts.whole(LATENT, C), parts.shard(0, 2 * C, LATENT)
        self.gate = parts.whole(EXPERTS, C)
        self.gate_up, self.down = parts.shard(1, EXPERTS, 2 * C, C), parts.shard(2, EXPERTS, C, C)

    def layer(self, x: Tensor, i: int) -> Tensor:
        """What stands between two norms: its result must still be summed over ranks."""
        return ops.glu(x @ self.ups[i].t().repeat(1, 2)) @ self.downs[i].t()

    def gathered(self, shard: Tensor, tokens: int) -> Tensor:
        return functional.all_gather_tensor(shard, 0, self.group)[:tokens]

    def experts(self, x: Tensor) -> Tensor:
        """A sum over ranks of which each keeps its rows, as expert parallelism leaves it."""
        return passes.ordered_reduce_scatter(self.layer(x, 0), self.group.group_name)


def middle_all_reduce(w: Weights, x: Tensor, residual: Tensor, deepstack: Tensor) -> Tensor:
    y, residual = ops.add_rms_norm(all_reduce(w.layer(x, 0)), residual, w.norms[0])
    y, _ = ops.add_rms_norm(all_reduce(w.layer(y, 1)), residual, w.norms[1])
    return y


def last_all_reduce(w: Weights, x: Tensor, residual: Tensor, deepstack: Tensor) -> Tensor:
    return ops.add_rms_norm(all_reduce(w.layer(x, 0)), residual, w.norms[0])[0]


def vl_middle_all_reduce(w: Weights, x: Tensor, residual: Tensor, deepstack: Tensor) -> Tensor:
    y, residual = ops.add_rms_norm(all_reduce(w.layer(x, 0)) + deepstack, residual, w.norms[0])
    y, _ = ops.add_rms_norm(all_reduce(w.layer(y, 1)), residual, w.norms[1])
    return y


def middle_all_gather(w: Weights, x: Tensor, residual: Tensor, deepstack: Tensor) -> Tensor:
    h = w.gathered(w.experts(x), x.shape[0])
    y, residual = ops.add_rms_norm(h, residual, w.norms[0])
    return ops.add_rms_norm(all_reduce(w.layer(y, 1)), residual, w.norms[1])[0]


def last_all_gather(w: Weights, x: Tensor, residual: Tensor, deepstack: Tensor) -> Tensor:
    return ops.add_rms_norm(w.gathered(w.experts(x), x.shape[0]), residual, w.norms[0])[0]


def vl_middle_all_gather(w: Weights, x: Tensor, residual: Tensor, deepstack: Tensor) -> Tensor:
    h = w.gathered(w.experts(x), x.shape[0]) + deepstack
    y, residual = ops.add_rms_norm(h, residual, w.norms[0])
    return ops.add_rms_norm(all_reduce(w.layer(y, 1)), residual, w.norms[1])[0]


def all_gather_chunk(w: Weights, x: Tensor, residual: Tensor, deepstack: Tensor) -> Tensor:
    """A sum is gathered only to be cut into rows again; what follows adds the rows up, so that padding would show."""
    h = w.gathered(w.experts(x), x.shape[0])
    rows = passes.local_rows(ops.rms_norm(h + 1, w.norms[0]), w.group.group_name)
    return all_reduce(rows.sum(0, keepdim=True))


def mla_down_projection(w: Weights, x: Tensor, residual: Tensor, deepstack: Tensor) -> Tensor:
    y, residual = ops.add_rms_norm(all_reduce(w.layer(x, 0)), residual, w.norms[0])
    up = ops.linear(y, w.latent) @ w.latent_up.t()
    return ops.add_rms_norm(all_reduce(up @ w.downs[1].t()), residual, w.norms[1])[0]


def moe_gating_and_quantisation(w: Weights, x: Tensor, residual: Tensor, deepstack: Tensor) -> Tensor:
    y, residual = ops.add_rms_norm(all_reduce(w.layer(x, 0)), residual, w.norms[0])
    weights, ids = ops.route(ops.linear(y, w.gate), 2)
    values, scale = dynamic_quant(y)
    out = ops.experts(values.float() * scale[:, None], w.gate_up, w.down, weights, ids)
    return ops.add_rms_norm(all_reduce(out), residual, w.norms[1])[0]


# ---- rows chosen by a mask


def added_at_a_mask(h: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """As transformers adds the vision embeddings of Qwen3-VL."""
    h = h.clone()
    return h.index_put((mask,), h[mask, :] + rows.to(h.dtype))


def scaled_at_a_mask(h: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    return h.index_put((mask,), (h[mask].double() * 0.3 - rows[:, :1]).float() + rows)


def replaced_at_a_mask(h: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    return h.index_put((mask,), rows)


def scattered_at_a_mask(h: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """As transformers puts image embeddings among those of the text."""
    return h.masked_scatter(mask.unsqueeze(-1).expand_as(h), rows)


MASKED: dict[str, Callable[..., Tensor]] = {
    "added": added_at_a_mask,
    "scaled": scaled_at_a_mask,
    "replaced": replaced_at_a_mask,
    "scattered": scattered_at_a_mask,
}


def run_masked(name: str, shape: tuple[int, ...], chosen: int) -> dict[str, Any]:
    """On a sum of [*shape, C], of whose rows so many are chosen."""
    w, change, tokens = Weights(), MASKED[name], math.prod(shape)

    def function(*inputs: Tensor) -> Tensor:
        x, residual, rows, mask = inputs
        h = all_reduce(w.layer(x.flatten(0, -2), 0)).view_as(x)
        y, _ = ops.add_rms_norm(change(h, mask, rows), residual, w.norms[0])
        return w.layer(y.flatten(0, -2), 1)

    x, residual, rows = arguments(tokens)
    places = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))[:chosen]
    mask = torch.zeros(tokens, dtype=torch.bool).index_fill(0, places, True).view(shape)
    inputs = (x.view(*shape, C), residual.view(*shape, C), rows[:chosen], mask)
    return summary(both(function, inputs, SequenceParallel(), dynamic=True))


ROWS: dict[str, Callable[..., Tensor]] = {
    "MiddleAllReduceRMSNorm": middle_all_reduce,
    "LastAllReduceRMSNorm": last_all_reduce,
    "Qwen3VLMiddleAllReduceRMSNorm": vl_middle_all_reduce,
    "MiddleLayerAllgatherAddRMSNorm": middle_all_gather,
    "LastLayerAllgatherRMSNorm": last_all_gather,
    "Qwen3VLMiddleLayerAllgatherAddRMSNorm": vl_middle_all_gather,
    "AllGatherChunkNoOp": all_gather_chunk,
    "FlashCommMLA": mla_down_projection,
    "FlashCommMoE": moe_gating_and_quantisation,
}


def arguments(tokens: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    return tuple(torch.randn(tokens, C, generator=generator) for _ in range(3))


def run_row(name: str, tokens: int, options: dict[str, Any], pipeline: Any = None) -> dict[str, Any]:
    weights = Weights()

    def function(*inputs: Tensor) -> Tensor:
        return ROWS[name](weights, *inputs)

    return summary(both(function, arguments(tokens), SequenceParallel(**options), pipeline=pipeline))
