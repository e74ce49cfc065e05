"""Plain torch models with tensor parallelism written out, for the passes: they know nothing of sequence parallelism."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from whorl import ops, passes
from whorl.ops.quant import dynamic_quant


@dataclass(frozen=True, kw_only=True)
class Shape:
    kind: str = "llama"  # llama, qwen3, mla
    hidden: int = 32
    inner: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    latent: int = 8
    layers: int = 2
    vocab: int = 64
    experts: int = 0  # mixture of experts
    expert_parallel: bool = False  # experts shared out whole, tokens gathered for them
    vl: bool = False  # embeddings given, deepstack added in the first layers
    int8: bool = False  # activations quantised by token before products
    eps: float = 1e-6
    dtype: torch.dtype = torch.float32
    exact: bool = False  # products whose rows do not depend on their neighbours
    lm_head: bool = True


class Parts:
    """Weights, the same on every rank, of which each keeps its share."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype) -> None:
        self.rank, self.size, self.dtype = rank, size, dtype
        self.generator = torch.Generator().manual_seed(7)

    def whole(self, *shape: int) -> nn.Parameter:
        full = torch.randn(*shape, generator=self.generator) / shape[-1] ** 0.5
        return nn.Parameter(full.to(self.dtype), requires_grad=False)

    def shard(self, dim: int, *shape: int) -> nn.Parameter:
        return nn.Parameter(self.whole(*shape).chunk(self.size, dim)[self.rank].contiguous(), requires_grad=False)

    def norm(self, size: int) -> nn.Parameter:
        return nn.Parameter((1 + 0.1 * self.whole(1, size)[0]).to(self.dtype), requires_grad=False)


def all_reduce(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def multiply(x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    """Of a weight that every rank has whole: the rows may come fewer at a time."""
    return ops.linear(x, weight) if shape.exact else F.linear(x, weight)


def quantized(x: Tensor, shape: Shape) -> tuple[Tensor, Tensor | None]:
    return dynamic_quant(x) if shape.int8 else (x, None)


def project(x: tuple[Tensor, Tensor | None], weight: Tensor) -> Tensor:
    values, scale = x
    if scale is None:
        return F.linear(values, weight)
    return (F.linear(values.float(), weight.float()) * scale[:, None]).to(weight.dtype)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] * (10000.0 ** (-torch.arange(half) / half))
    return ops.rope(x, None, torch.cat([angles.cos(), angles.sin()], -1))[0]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [T, heads, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernel for CPUs divides by the tokens, and x86 ends the process
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)


class Attention(nn.Module):
    def __init__(self, shape: Shape, parts: Parts) -> None:
        super().__init__()
        self.shape, size = shape, parts.size
        self.heads, self.kv_heads = shape.heads // size, max(1, shape.kv_heads // size)
        self.q = parts.shard(0, shape.heads * shape.head_dim, shape.hidden)
        self.k = parts.shard(0, shape.kv_heads * shape.head_dim, shape.hidden)
        self.v = parts.shard(0, shape.kv_heads * shape.head_dim, shape.hidden)
        self.o = parts.shard(1, shape.hidden, shape.heads * shape.head_dim)
        self.q_norm, self.k_norm = parts.norm(shape.head_dim), parts.norm(shape.head_dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        shape, quantised = self.shape, quantized(x, self.shape)
        q, k, v = (project(quantised, w).unflatten(-1, (-1, shape.head_dim)) for w in (self.q, self.k, self.v))
        if shape.kind == "qwen3":
            q, k = norm(q, self.q_norm, shape.eps), norm(k, self.k_norm, shape.eps)
        out = attend(rotate(q, positions), rotate(k, positions), v)
        return all_reduce(F.linear(out, self.o))


class LatentAttention(nn.Module):
    """DeepSeek's: a narrow latent, whole on every rank, from which each rank makes its heads."""

    def __init__(self, shape: Shape, parts: Parts) -> None:
        super().__init__()
        self.shape, self.heads = shape, shape.heads // parts.size
        self.down = parts.whole(2 * shape.latent + shape.head_dim, shape.hidden)
        self.q_norm, self.kv_norm = parts.norm(shape.latent), parts.norm(shape.latent)
        self.q_up = parts.shard(0, shape.heads * 2 * shape.head_dim, shape.latent)
        self.kv_up = parts.shard(0, shape.heads * 2 * shape.head_dim, shape.latent)
        self.o = parts.shard(1, shape.hidden, shape.heads * shape.head_dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        shape = self.shape
        latent = multiply(x, self.down, shape)
        q, kv, k_rope = latent.split([shape.latent, shape.latent, shape.head_dim], -1)
        q = F.linear(norm(q, self.q_norm, shape.eps), self.q_up).unflatten(-1, (self.heads, -1))
        kv = F.linear(norm(kv, self.kv_norm, shape.eps), self.kv_up).unflatten(-1, (self.heads, -1))
        q_plain, q_rope = q.chunk(2, -1)
        k_plain, v = kv.chunk(2, -1)
        k_rope = rotate(k_rope[:, None], positions).expand(-1, self.heads, -1)
        q, k = torch.cat([q_plain, rotate(q_rope, positions)], -1), torch.cat([k_plain, k_rope], -1)
        return all_reduce(F.linear(attend(q, k, v), self.o))


class MLP(nn.Module):
    def __init__(self, shape: Shape, parts: Parts) -> None:
        super().__init__()
        self.shape = shape
        self.gate = parts.shard(0, shape.inner, shape.hidden)
        self.up = parts.shard(0, shape.inner, shape.hidden)
        self.down = parts.shard(1, shape.hidden, shape.inner)

    def forward(self, x: Tensor) -> Tensor:
        quantised = quantized(x, self.shape)
        return all_reduce(F.linear(F.silu(project(quantised, self.gate)) * project(quantised, self.up), self.down))


class MoE(nn.Module):
    """Ranks share the inner size of every expert; with int8 tokens are quantised behind the gate."""

    def __init__(self, shape: Shape, parts: Parts) -> None:
        super().__init__()
        self.shape = shape
        self.gate = parts.whole(shape.experts, shape.hidden)
        self.gate_up = parts.shard(1, shape.experts, 2 * shape.inner, shape.hidden)
        self.down = parts.shard(2, shape.experts, shape.hidden, shape.inner)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = ops.route(multiply(x, self.gate, self.shape), 2)
        values, scale = quantized(x, self.shape)
        if scale is not None:
            values = (values.float() * scale[:, None]).to(x.dtype)
        return all_reduce(ops.experts(values, self.gate_up, self.down, weights, ids))


class ExpertParallel(nn.Module):
    """Each rank has some experts whole: tokens are chunked, routed, gathered for the experts and scattered again."""

    def __init__(self, shape: Shape, parts: Parts) -> None:
        super().__init__()
        self.shape, self.rank, self.size = shape, parts.rank, parts.size
        self.gate = parts.whole(shape.experts, shape.hidden)
        self.gate_up = parts.shard(0, shape.experts, 2 * shape.inner, shape.hidden)
        self.down = parts.shard(0, shape.experts, shape.hidden, shape.inner)

    def forward(self, x: Tensor) -> Tensor:
        group, mine = dist.group.WORLD, self.shape.experts // self.size
        rows = passes.local_rows(x, group.group_name)
        weights, ids = ops.route(multiply(rows, self.gate, self.shape), 2)
        rows, weights, ids = (functional.all_gather_tensor(t, 0, group) for t in (rows, weights, ids))
        local = ids - self.rank * mine
        is_mine = (local >= 0) & (local < mine)
        out = ops.experts(rows, self.gate_up, self.down, weights * is_mine, local * is_mine)
        short = passes.ordered_reduce_scatter(out, group.group_name)
        return functional.all_gather_tensor(short, 0, group)[: x.shape[0]]


class Layer(nn.Module):
    def __init__(self, shape: Shape, parts: Parts) -> None:
        super().__init__()
        self.shape = shape
        self.attention = (LatentAttention if shape.kind == "mla" else Attention)(shape, parts)
        feed_forward: Any = MLP
        if shape.experts:
            feed_forward = ExpertParallel if shape.expert_parallel else MoE
        self.feed_forward = feed_forward(shape, parts)
        self.before, self.after = parts.norm(shape.hidden), parts.norm(shape.hidden)

    def forward(self, x: Tensor, residual: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else x + residual
        x = self.attention(norm(residual, self.before, self.shape.eps), positions)
        residual = x + residual
        return self.feed_forward(norm(residual, self.after, self.shape.eps)), residual


class Model(nn.Module):
    def __init__(self, shape: Shape, rank: int, size: int) -> None:
        super().__init__()
        parts = Parts(rank, size, shape.dtype)
        self.shape, self.start, self.count = shape, rank * shape.vocab // size, shape.vocab // size
        self.embedding = parts.shard(0, shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, parts) for _ in range(shape.layers))
        self.norm = parts.norm(shape.hidden)
        self.head = parts.whole(shape.vocab, shape.hidden)

    def embed(self, ids: Tensor) -> Tensor:
        local = ids - self.start
        is_mine = (local >= 0) & (local < self.count)
        rows = F.embedding(local * is_mine, self.embedding)
        return all_reduce(rows * is_mine[:, None])

    def forward(self, ids: Tensor, positions: Tensor, *vision: Tensor) -> Tensor:
        x = vision[0] if self.shape.vl else self.embed(ids)
        residual = None
        for i, layer in enumerate(self.layers):
            x, residual = layer(x, residual, positions)
            if self.shape.vl and i < len(vision) - 1:
                x = x + vision[i + 1]  # deepstack: full length, between the all-reduce and the norm
        x = norm(x + residual, self.norm, self.shape.eps)
        return multiply(x, self.head, self.shape) if self.shape.lm_head else x


def inputs(shape: Shape, tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed + tokens)
    ids = torch.randint(0, shape.vocab, (tokens,), generator=generator)
    vision = [torch.randn(tokens, shape.hidden, generator=generator).to(shape.dtype) for _ in range(2)]
    return (ids, torch.arange(tokens), *(vision if shape.vl else ()))
