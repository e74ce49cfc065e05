"""Rotary embedding on CPUs, with the norms of query and key heads, and the writing of the KV cache."""

from ctypes import byref

import torch
from torch import Tensor

from .._op import OPS
from ..rope.tables import token_rows
from .library import TYPES, Cache, Norm, Rotation, address, library, plain, use_threads


def rope(
    q: Tensor,
    k: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor | None = None,
    *,
    style: str = "half",
    out_style: str | None = None,
    where: str = "leading",
    inverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    table = plain(token_rows(cos_sin, positions)).contiguous()
    rotation = _rotation(table, q.shape[-1], style, out_style, where, inverse)
    return _rotated(q, table, rotation), None if k is None else _rotated(k, table, rotation)


def rope_(
    q: Tensor,
    k: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor | None = None,
    *,
    style: str = "half",
    out_style: str | None = None,
    where: str = "leading",
    inverse: bool = False,
) -> None:
    options = {"style": style, "out_style": out_style, "where": where, "inverse": inverse}
    rotated = rope(q, k, cos_sin, positions, **options)  # type: ignore[arg-type]
    for x, new in zip((q, k), rotated, strict=True):
        if x is not None and new is not None:
            x.copy_(new)


def _rotation(table: Tensor, dim: int, style: str, out_style: str | None, where: str, inverse: bool) -> Rotation:
    size = table.shape[-1]
    start = 0 if where == "leading" else dim - size
    return Rotation(table.data_ptr(), size, start, style == "pairs", (out_style or style) == "pairs", inverse)


def _rotated(x: Tensor, table: Tensor, rotation: Rotation) -> Tensor:
    """Return x [*tokens, H, D] rotated by one row of the table for each token, contiguous."""
    wide, (heads, dim) = plain(x), x.shape[-2:]
    if wide.dim() == 4:
        wide = wide.flatten(0, 1)
    out = torch.empty(x.shape)
    use_threads()
    library().whorl_cpu_rope(
        *(wide.data_ptr(), wide.shape[0], heads, dim, wide.stride(0), wide.stride(1)), byref(rotation), out.data_ptr()
    )
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    plus_one: bool = False,
    style: str = "half",
    with_v: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    lead, table = qkv.shape[:-1], token_rows(cos_sin, positions)
    flat, rows = qkv.reshape(-1, qkv.shape[-1]), table.expand(*lead, -1).reshape(-1, table.shape[-1])
    q, k, v = _norm_rope(flat, q_weight, k_weight, rows, num_heads, num_kv_heads, eps, plus_one, style)
    heads = [x.to(qkv.dtype).view(*lead, *x.shape[1:]) for x in (q, k)]
    return heads[0], heads[1], v.reshape(*lead, *v.shape[1:]).clone() if with_v else None


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    plus_one: bool = False,
    style: str = "half",
) -> None:
    rotated, k, v = _norm_rope(qkv, q_weight, k_weight, cos_sin, num_heads, num_kv_heads, eps, plus_one, style)
    q.copy_(rotated)
    write_kv(k.to(qkv.dtype), v, k_cache, v_cache, slots, k_scale, v_scale)


def _norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    plus_one: bool,
    style: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys in fp32 and values, [T, H, D] each; the last are a view."""
    count, dim, wide = qkv.shape[0], qkv.shape[1] // (heads + 2 * kv_heads), plain(qkv)
    table, weights = plain(cos_sin).contiguous(), [plain(w).contiguous() for w in (q_weight, k_weight)]
    rotation = _rotation(table, dim, style, None, "leading", False)
    q, k = torch.empty(count, heads, dim), torch.empty(count, kv_heads, dim)
    norms = [Norm(weight.data_ptr(), eps, plus_one) for weight in weights]
    use_threads()
    library().whorl_cpu_norm_rope(
        *(wide.data_ptr(), count, wide.stride(0), heads, kv_heads, dim, *map(byref, norms), byref(rotation)),
        *(q.data_ptr(), heads * dim, k.data_ptr(), kv_heads * dim),
    )
    return q, k, qkv[:, (heads + kv_heads) * dim :].unflatten(1, (kv_heads, dim))


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    if k_cache.dtype != torch.float32 or k.dtype != torch.float32 or not k.stride(-1) == v.stride(-1) == 1:
        OPS["write_kv"].reference(k, v, k_cache, v_cache, slots, k_scale, v_scale)
        return
    slots = slots.long()
    cache = cache_of(k_cache, v_cache, None, None, k.dtype)
    library().whorl_cpu_write(
        *(k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1)),
        *(*k.shape, byref(cache), slots.data_ptr()),
    )


def cache_of(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, dtype: torch.dtype
) -> Cache:
    """Describe a paged cache; dtype: what dequantised numbers are rounded to."""
    strides = (*k_cache.stride()[:3], *v_cache.stride()[:3])
    addresses = k_cache.data_ptr(), v_cache.data_ptr()
    scales = address(k_scale), address(v_scale)
    return Cache(*addresses, *strides, *scales, k_cache.shape[1], TYPES[k_cache.dtype], TYPES[dtype])
