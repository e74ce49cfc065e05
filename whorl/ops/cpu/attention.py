"""Causal attention on CPUs: over the paged cache, and of packed sequences.

Keys are cut into spans of 256, from multiples of 256 on; a span is added up from nothing in blocks of 16 keys, and
spans are folded in their order. So the bits of a query depend on the query and the keys it attends to alone.
"""

from ctypes import byref

import torch
from torch import Tensor

from .library import Attention, Cache, address, library, plain, use_threads
from .rotation import cache_of


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    k_cache, v_cache = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_cache, v_cache))
    cache = cache_of(k_cache, v_cache, k_scale, v_scale, q.dtype)
    tables = block_tables if block_tables.stride(-1) == 1 or block_tables.shape[-1] == 1 else block_tables.contiguous()
    sequences = tables, query_starts.contiguous(), context_lens.contiguous()
    tops = None if sinks is None else plain(sinks).contiguous()
    options = {"kv_heads": k_cache.shape[2], "scale": scale, "window": window, "softcap": softcap}
    return _attend(q, cache, *sequences, sinks=tops, **options)[0]  # type: ignore[arg-type]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, sinks: Tensor | None = None, *, scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    tops = None if sinks is None else plain(sinks).contiguous()
    keys, values = plain(k), plain(v)
    cache = Cache(keys.data_ptr(), values.data_ptr(), 0, *keys.stride()[:2], 0, *values.stride()[:2])
    starts = starts.int().contiguous()
    lengths = starts.diff()
    options = {"kv_heads": k.shape[1], "scale": scale, "window": window}
    return _attend(q, cache, None, starts, lengths, sinks=tops, has_sums=True, **options)  # type: ignore[arg-type]


def _attend(
    q: Tensor,
    cache: Cache,
    tables: Tensor | None,
    starts: Tensor,
    lengths: Tensor,
    *,
    kv_heads: int,
    scale: float,
    window: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    has_sums: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return out like q, and log-sum-exps [T, HQ], which have values only if `has_sums`.

    Tokens past the last of `starts` are padding: their result is 0, and their sum -inf.
    """
    queries, (count, heads, dim) = plain(q), q.shape
    end = int(starts[-1])
    out = torch.empty(q.shape)
    lse = torch.empty(count, heads) if has_sums else None
    if end < count:
        out[end:] = 0
        if lse is not None:
            lse[end:] = -torch.inf
    call = Attention(
        *(queries.data_ptr(), queries.stride(0), queries.stride(1), cache, address(tables)),
        *(starts.data_ptr(), lengths.data_ptr(), 0 if tables is None else tables.stride(0)),
        *(len(starts) - 1, heads, kv_heads, dim, window, scale, softcap, address(sinks)),
        *(tables is None, out.data_ptr(), address(lse)),
    )
    use_threads()
    library().whorl_cpu_attention(byref(call))
    return out if q.dtype == torch.float32 else out.to(q.dtype), out if lse is None else lse
