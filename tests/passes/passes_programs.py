"""Random graphs: each step takes the hidden state and the residual and gives new ones."""

from collections.abc import Callable

import torch
import torch.distributed._functional_collectives as functional
from passes_models import all_reduce
from passes_rows import C, Weights
from torch import Tensor
from torch.nn import functional as F

from whorl import ops, passes
from whorl.ops.quant import dequantize, dynamic_quant

State = tuple[Tensor, Tensor]


def layer(w: Weights, x: Tensor, residual: Tensor) -> State:
    return all_reduce(w.layer(x, 0)), residual


def sharded_sum(w: Weights, x: Tensor, residual: Tensor) -> State:
    return w.gathered(w.experts(x), x.shape[0]), residual


def add_residual(w: Weights, x: Tensor, residual: Tensor) -> State:
    return x + residual, x


def add_norm(w: Weights, x: Tensor, residual: Tensor) -> State:
    return ops.add_rms_norm(x, residual, w.norms[0], 3e-4)


def layer_norm(w: Weights, x: Tensor, residual: Tensor) -> State:
    return F.layer_norm(x, (C,), w.norms[1], w.norms[2], 1e-3), residual


def softmax_heads(w: Weights, x: Tensor, residual: Tensor) -> State:
    return x.unflatten(-1, (4, -1)).softmax(-1).flatten(1), residual


def swap_heads(w: Weights, x: Tensor, residual: Tensor) -> State:
    return x.unflatten(-1, (4, -1)).transpose(1, 2).flatten(1), residual


def halves(w: Weights, x: Tensor, residual: Tensor) -> State:
    a, b = x.chunk(2, -1)
    return torch.cat([b * 0.5, a.sigmoid()], -1), residual


def round_trip(w: Weights, x: Tensor, residual: Tensor) -> State:
    return x.bfloat16().float(), residual


def quantise(w: Weights, x: Tensor, residual: Tensor) -> State:
    return dequantize(*dynamic_quant(x), torch.float32), residual


def narrow(w: Weights, x: Tensor, residual: Tensor) -> State:
    latent = ops.linear(x, w.latent)
    return all_reduce(latent @ w.latent_up.t() @ w.downs[1].t()), residual


def route(w: Weights, x: Tensor, residual: Tensor) -> State:
    weights, ids = ops.route(ops.linear(x, w.gate), 2)
    return all_reduce(ops.experts(x, w.gate_up, w.down, weights, ids)), residual


def chunk_and_gather(w: Weights, x: Tensor, residual: Tensor) -> State:
    rows = passes.local_rows(x, w.group.group_name)
    return functional.all_gather_tensor(rows * 2, 0, w.group)[: x.shape[0]], residual


def over_tokens(w: Weights, x: Tensor, residual: Tensor) -> State:
    """Not row-wise: every row sees those before it."""
    return x.cumsum(0) * 0.1, residual


def batched(w: Weights, x: Tensor, residual: Tensor) -> State:
    wide = x[None] * torch.arange(1, 3).view(2, 1, 1)
    return (wide.mean(0) + x.mean(-1, keepdim=True)) * w.norms[0], residual


def swap(w: Weights, x: Tensor, residual: Tensor) -> State:
    return residual, x


STEPS: dict[str, Callable[[Weights, Tensor, Tensor], State]] = {
    step.__name__: step
    for step in (
        *(layer, sharded_sum, add_residual, add_norm, layer_norm, softmax_heads, swap_heads, halves, round_trip),
        *(quantise, narrow, route, chunk_and_gather, over_tokens, batched, swap),
    )
}
