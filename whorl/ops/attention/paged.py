"""Attention over a paged cache of keys and values."""

from typing import Any, Literal

import torch
from torch import Tensor

from .._check import check_cache, check_lengths, check_tables
from .._draw import Draw, Sizes
from .._op import Values, narrow, operator, widen
from .._tracing import is_readable
from . import paged_torch_npu

QUERY_TILE = 32  # queries of every product in the prompt class; the last tile is padded
KEY_TILE = 256  # keys of every product in the prompt class


def _check_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int, **given: Any) -> None:
    block_tables, query_starts, context_lens = (given[n] for n in ("block_tables", "query_starts", "context_lens"))
    check_cache("paged_attention", k_cache, v_cache)
    if not q.is_floating_point() or q.dtype != k_cache.dtype:
        raise ValueError(f"paged_attention: q is {q.dtype}, expected the cache's {k_cache.dtype}")
    if q.dim() != 3 or q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"paged_attention: q is {list(q.shape)}, expected [T, HQ, {k_cache.shape[3]}] with HQ a multiple of "
            f"{k_cache.shape[2]}"
        )
    count = len(context_lens) if context_lens.dim() == 1 else -1
    if block_tables.dim() != 2 or block_tables.shape[0] != count or query_starts.shape != (count + 1,):
        raise ValueError(
            f"paged_attention: block_tables is {list(block_tables.shape)}, query_starts {list(query_starts.shape)}, "
            f"context_lens {list(context_lens.shape)}, expected [B, MB], [B + 1] and [B]"
        )
    if {block_tables.dtype, query_starts.dtype, context_lens.dtype} != {torch.int32}:
        raise ValueError("paged_attention: block_tables, query_starts and context_lens must be int32")
    if window < 0:
        raise ValueError(f"paged_attention: window is {window}, expected 0 (none) or a positive number of keys")
    if all(map(is_readable, (block_tables, query_starts, context_lens))):
        starts, contexts = query_starts.tolist(), context_lens.tolist()
        check_lengths("paged_attention", starts, contexts, len(q), block_tables.shape[1] * k_cache.shape[1])
        check_tables("paged_attention", block_tables, starts, contexts, k_cache)


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """[HK, length, D] of one sequence, in the dtype of accumulation."""
    return widen(cache.index_select(0, blocks).flatten(0, 1)[:length]).transpose(0, 1)


def _decode(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """q: [n, HK, G, D], the last n positions of k and v: one by one, so that shapes depend on a query's place alone."""
    length, count = k.shape[1], q.shape[0]
    found = []
    for i in range(count):
        end = length - count + i + 1
        start = max(0, end - window) if window else 0
        seen = k[None, :, start:end], v[None, :, start:end]
        found.append(torch.nn.functional.scaled_dot_product_attention(q[i : i + 1], *seen, scale=scale))
    return found[0] if count == 1 else torch.cat(found)


def _tile(q: Tensor, k: Tensor, v: Tensor, first: int, window: int) -> Tensor:
    """q: [QUERY_TILE, HK, G, D] at positions from `first`; k, v: [HK, multiple of KEY_TILE, D].

    Softmax runs along blocks of keys that start at multiples of KEY_TILE. A block without visible keys multiplies by
    one and adds zero, so a query's bits do not depend on its neighbours in the tile.
    """
    count, heads, group, dim = q.shape
    rows = q.permute(1, 2, 0, 3).reshape(heads, group * count, dim)
    position = (first + torch.arange(count, device=q.device)).repeat(group)[:, None]
    total = rows.new_zeros(heads, group * count, 1)
    top = rows.new_full((heads, group * count, 1), -torch.inf)
    out = torch.zeros_like(rows)
    start = max(0, first - window + 1) // KEY_TILE * KEY_TILE if window else 0
    for block in range(start, min(first + count, k.shape[1]), KEY_TILE):
        key = block + torch.arange(KEY_TILE, device=q.device)
        hidden = key > position
        if window:
            hidden |= key <= position - window
        scores = (rows @ k[:, block : block + KEY_TILE].transpose(1, 2)).masked_fill(hidden, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        shift = new_top.masked_fill(new_top == -torch.inf, 0)
        weights, keep = torch.exp(scores - shift), torch.exp(top - shift)
        total = total * keep + weights.sum(-1, keepdim=True)
        out = out * keep + weights @ v[:, block : block + KEY_TILE]
        top = new_top
    return (out / total).view(heads, group, count, dim).permute(2, 0, 1, 3)


def _prompt(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """As `_decode`, in tiles of fixed size."""
    length, count = k.shape[1], q.shape[0]
    q = q * scale
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, -length % KEY_TILE)) for x in (k, v))
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 0, 0, -count % QUERY_TILE))
    tiles = [_tile(part, k, v, length - count + QUERY_TILE * i, window) for i, part in enumerate(q.split(QUERY_TILE))]
    return torch.cat(tiles)[:count]


def _fake(q: Tensor, **_: object) -> Tensor:
    return q.new_empty(q.shape)


def _bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """Each visible key and value once for each sequence, queries and result."""
    q, cache = values["q"], values["k_cache"]
    keys = values["block_tables"].numel() * cache.shape[1]
    return (2 * q.numel() + 2 * keys * cache.shape[2] * cache.shape[3]) * q.element_size()


@operator(check=_check_attention, forward_only=True, fake=_fake, bytes=_bytes)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    rows: Literal["prompt", "decode", "batch"] = "prompt",
) -> Tensor:
    """Causal attention of new tokens over the cached keys and values of their sequences.

    q: [T, HQ, D] bf16, fp16 or fp32, the tokens of sequence b being query_starts[b] to query_starts[b + 1];
    k_cache, v_cache: [blocks, block size, HK, D], the new tokens' own keys and values included; block_tables: [B, MB]
    int32, block i of sequence b; query_starts: [B + 1] int32; context_lens: [B] int32, keys of each sequence; result
    like q, contiguous. Query i of n sits at position context_lens[b] - n + i and sees the keys up to its own, with
    window > 0 only the last `window` of them. HQ is a multiple of HK. Scores, softmax and sums in fp32, one rounding.
    A query's bits depend on itself, the keys it sees and `rows` alone: not on other sequences, not on how a prompt is
    cut into chunks. Rows of q past the last query_starts are zero. No gradient.

    query_starts begin at 0 and do not fall; a sequence with queries has no more of them than keys, and a row of
    block_tables that holds its keys. What is not so is refused where it can be seen without waiting for a device: on
    the CPU, and on Ascend, whose operator takes lengths as integers; blocks outside the cache on the CPU alone. CUDA
    kernels take lengths and blocks as they are.
    """
    heads = k_cache.shape[2]
    wide = widen(q).view(q.shape[0], heads, q.shape[1] // heads, q.shape[2])
    attend = _prompt if rows == "prompt" else _decode
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    found = []
    for b, length in enumerate(lengths):
        if starts[b + 1] > starts[b]:
            blocks = block_tables[b, : -(-length // k_cache.shape[1])]
            k, v = _gather(k_cache, blocks, length), _gather(v_cache, blocks, length)
            found.append(attend(wide[starts[b] : starts[b + 1]], k, v, window, scale))
    if starts[-1] < len(q):
        found.append(torch.zeros_like(wide[starts[-1] :]))
    out = found[0] if len(found) == 1 else torch.cat(found) if found else wide.clone()
    return narrow(out.flatten(1, 2), q.dtype).contiguous()


def _triton_reason(q: Tensor, scale: float, **_: object) -> str | None:
    if q.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    if scale <= 0:
        return f"finds the highest score before it is scaled, by a positive number, got {scale}"
    return None if q.shape[2] <= 256 else f"a head of {q.shape[2]} channels does not fit one program (256)"


paged_attention.impl("triton", "paged_triton:attention", accepts=_triton_reason)
paged_attention.impl("torch_npu", "paged_torch_npu:attention", accepts=paged_torch_npu.reason)


_HEADS = {"heads": 4, "kv_heads": 2, "dim": 32}
_CASES: list[Values] = [
    {"queries": (1,), "contexts": (5,), "heads": 1, "kv_heads": 1, "dim": 16},
    {"queries": (3, 1, 2), "contexts": (3, 9, 20), **_HEADS},
    {"queries": (1, 2), "contexts": (30, 7), "rows": "decode", "scale": 0.01, **_HEADS},
    {"queries": (1, 3), "contexts": (300, 70), "rows": "decode", "heads": 8, "kv_heads": 1, "dim": 64, "sliced": True},
    {"queries": (0,), "contexts": (0,), **_HEADS},
    {"queries": (0,), "contexts": (4,), "rows": "decode", **_HEADS},
    {"queries": (5, 2), "contexts": (40, 2), "window": 4, "sliced": True, **_HEADS},
    {"queries": (2, 1), "contexts": (300, 20), "window": 150, "rows": "decode", **_HEADS},
    {"queries": (35,), "contexts": (70,), "heads": 6, "kv_heads": 2, "dim": 40},
    # Blocks that every backend takes.
    {"queries": (5, 1), "contexts": (140, 2), "block": 128, **_HEADS},
    {"queries": (2, 1), "contexts": (9, 130), "block": 128, "rows": "decode", **_HEADS},
]
_QWEN = {"heads": 32, "kv_heads": 4, "dim": 128, "block": 16}
_BENCH: list[Values] = [
    {"queries": (1,), "contexts": (4096,), "rows": "decode", **_QWEN},
    {"queries": (1,) * 64, "contexts": (1024,) * 64, "rows": "decode", **_QWEN},
    {"queries": (8192,), "contexts": (8192,), **_QWEN},
    {"queries": (512,) * 8, "contexts": (4096,) * 8, **_QWEN},
]


def _make(
    draw: Draw,
    queries: Sizes,
    contexts: Sizes,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int = 8,
    window: int = 0,
    rows: str = "prompt",
    tokens: Sizes = (),
) -> Values:
    counts = [-(-c // block) for c in contexts]
    k, v = (draw.scale * draw.normal(sum(counts) + 3, block, kv_heads, dim) for _ in range(2))
    q, device = draw.normal(sum(queries), heads, dim), draw.device
    tables, free = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32), torch.randperm(sum(counts) + 3).int()
    for b, count in enumerate(counts):
        tables[b, :count], free = free[:count], free[count:]
    starts = torch.tensor([0, *queries]).cumsum(0)
    return {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "block_tables": tables.to(device),
        "query_starts": starts.int().to(device),
        "context_lens": torch.tensor(contexts, dtype=torch.int32).to(device),
        "scale": dim**-0.5,
        "window": window,
        "rows": rows,
    }


def _with_tokens(case: Values) -> Values:
    return {"tokens": (sum(case["queries"]),), **case}


paged_attention.inputs(cases=[_with_tokens(c) for c in _CASES], bench=[_with_tokens(c) for c in _BENCH])(_make)
