"""Attention over a paged KV cache; tiles.py has the reference's arithmetic."""

import functools
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from .._check import check_scales, check_sequences
from .._draw import Draw
from .._formats import FORMATS
from .._op import Values, narrow, operator, widen
from . import paged_torch_npu
from .packed import head_reason
from .tiles import KEYS, STEP, TOGETHER, attend, attend_together, rows_together
from .write_kv import draw_caches


def _check(q: Tensor, k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, **arguments: Any) -> None:
    check_scales("paged_attention", k_cache, k_scale, v_scale)
    tables = (arguments[name] for name in ("block_tables", "query_starts", "context_lens"))
    check_sequences("paged_attention", q, k_cache, *tables)


class _Cache(NamedTuple):
    """The paged keys and values of the sequences; codes are dequantised and rounded to `dtype`."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    block_tables: Tensor
    dtype: torch.dtype

    def of_one(self, b: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of sequence b, [HK, length, D] in the dtype of accumulation."""
        k, v = self._gather(self.block_tables[b : b + 1, : -(-length // self.k.shape[1])])
        return k[0, :length].transpose(0, 1), v[0, :length].transpose(0, 1)

    def of_several(self, members: list[int], lengths: tuple[int, ...], num_keys: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of sequences, [B, HK, num_keys, D], values zero past their lengths."""
        device, block_size = self.k.device, self.k.shape[1]
        exist = _exist(lengths, -(-max(lengths) // block_size), block_size, device)
        is_range = members[-1] - members[0] == len(members) - 1
        rows = self.block_tables[members[0] : members[-1] + 1] if is_range else self.block_tables[members]
        k, v = self._gather(rows[:, : exist.shape[1]] * exist)  # elsewhere a table may hold anything
        if missing := num_keys - k.shape[1]:
            k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) for x in (k, v))
        return k.transpose(1, 2), v.masked_fill_(_absent(lengths, num_keys, device), 0).transpose(1, 2)

    def _gather(self, blocks: Tensor) -> list[Tensor]:
        """Return the keys and values of blocks [B, n], [B, tokens, HK, D] each."""
        return [self._read(x, scales, blocks) for x, scales in ((self.k, self.k_scale), (self.v, self.v_scale))]

    def _read(self, cache: Tensor, scales: Tensor | None, blocks: Tensor) -> Tensor:
        count, index = len(blocks), blocks.flatten()
        x = cache.index_select(0, index)
        if scales is not None:
            x = (x.to(scales.dtype) * scales.index_select(0, index).transpose(1, 2)[..., None]).to(self.dtype)
        return widen(x.view(count, -1, *cache.shape[2:]))


@functools.lru_cache(maxsize=64)  # every layer of a model needs the same
def _exist(lengths: tuple[int, ...], width: int, block_size: int, device: torch.device) -> Tensor:
    """Return which of the first `width` blocks of a table a sequence has, [B, width] int32 of 0 and 1."""
    ends = torch.tensor([-(-length // block_size) for length in lengths], device=device)
    return (torch.arange(width, device=device) < ends[:, None]).int()


@functools.lru_cache(maxsize=64)
def _absent(lengths: tuple[int, ...], keys: int, device: torch.device) -> Tensor:
    """Return which of the first `keys` positions lie past the end of a sequence, [B, keys, 1, 1]."""
    ends = torch.tensor(lengths, device=device)
    return (torch.arange(keys, device=device) >= ends[:, None])[:, :, None, None]


class _Sequences(NamedTuple):
    members: list[int]
    queries: int  # of each
    num_keys: int = 0  # of each, padded, if they are computed side by side; 0 for one sequence by itself
    size: int = 0  # rows of each one's tile


def _companions(starts: list[int], lengths: list[int], wide: Tensor) -> Iterator[_Sequences]:
    """Yield the sequences that have queries, together where they have as many queries and blocks of KEYS keys."""
    heads, group, dim = wide.shape[1:]
    sizes = rows_together((heads, dim), wide.dtype, wide.device.type, torch.get_num_threads())
    alike: dict[tuple[int, int], list[int]] = {}
    for b, length in enumerate(lengths):
        if queries := starts[b + 1] - starts[b]:
            alike.setdefault((queries, -(-length // KEYS)), []).append(b)
    for (queries, _), members in alike.items():
        size = next((size for size in sizes if size >= queries * group), 0)
        if not size:
            yield from (_Sequences([b], queries) for b in members)
            continue
        at, num_keys = 0, -(-max(lengths[b] for b in members) // STEP) * STEP
        for count in TOGETHER:
            while len(members) - at >= count:
                yield _Sequences(members[at : at + count], queries, num_keys, size)
                at += count


def _bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of queries and result, and of the keys and values that block_tables has room for."""
    q, cache = values["q"], values["k_cache"]
    keys = values["block_tables"].numel() * cache.shape[1]
    head = cache.shape[3] * cache.element_size() + (0 if values.get("k_scale") is None else 4)
    return 2 * q.numel() * q.element_size() + 2 * keys * cache.shape[2] * head


_SCALE = Annotated[Tensor | None, "[blocks, HK, block_size] fp32, contiguous"]


@operator(check=_check, forward_only=True, bytes=_bytes)
def paged_attention(
    q: Annotated[Tensor, "[T, G*HK, D] float"],
    k_cache: Annotated[Tensor, "[blocks, block_size, HK, D] q or int8 or fp8"],
    v_cache: Annotated[Tensor, "[blocks, block_size, HK, D] k_cache"],
    block_tables: Annotated[Tensor, "[B, MB] int32"],
    query_starts: Annotated[Tensor, "[B + 1] int32"],
    context_lens: Annotated[Tensor, "[B] int32"],
    k_scale: _SCALE = None,
    v_scale: _SCALE = None,
    sinks: Annotated[Tensor | None, "[G*HK] q or fp32"] = None,
    *,
    scale: float,
    window: Annotated[int, ">= 0"] = 0,
    softcap: Annotated[float, ">= 0"] = 0.0,
) -> Annotated[Tensor, "[T, G*HK, D] q"]:
    """Causal attention of new tokens over the cached keys and values of their sequences.

    The new tokens of sequence b are query_starts[b] to query_starts[b + 1] (exclusive); k_cache and v_cache already
    hold their keys and values; block_tables: the blocks of each sequence, in order; context_lens: the number of keys of
    each sequence; scale multiplies the scores; returns out contiguous. Query i of the n of sequence b has position
    context_lens[b] - n + i and attends to the keys up to its own, with window > 0 only to the last `window` of them.
    With softcap > 0 a scaled score s becomes softcap * tanh(s / softcap) before the mask (Gemma 2).
    sinks: one number for each head, that takes part in the softmax as a scaled score without a value (gpt-oss).
    Scores, softmax and sums are in fp32, rounded once. A query's bits depend on the query and the keys it attends to
    alone: not on other sequences, not on how a prompt is divided into chunks, and not on whether it is prefilled or
    decoded; docs/arithmetic.md says how, and where this does not hold. Tokens past the last of query_starts are padding
    and zero. No gradient.

    With k_scale and v_scale the caches hold codes, int8 or float8_e4m3fn, as `write_kv` stores them. A key or value is
    then code * scale in fp32, rounded to q's dtype; the result is that of a cache that holds these numbers.

    query_starts must begin at 0 and must not decrease; a sequence with queries must have no more of them than keys, and
    a row of block_tables long enough for its keys. Violations raise ValueError where they can be seen without waiting
    for a device: on the CPU, and on Ascend, whose operator takes lengths as integers; blocks outside the cache on the
    CPU only. CUDA kernels check neither lengths nor blocks.

        out = ops.paged_attention(q, k_cache, v_cache, block_tables, query_starts, context_lens, scale=head_size**-0.5)
    """
    heads = k_cache.shape[2]
    wide = widen(q).view(q.shape[0], heads, q.shape[1] // heads, q.shape[2])
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    cache = _Cache(k_cache, v_cache, k_scale, v_scale, block_tables, q.dtype)
    tops = None if sinks is None else sinks.to(wide.dtype).view(wide.shape[1:3])
    out = wide.new_zeros(wide.shape)
    for members, queries, num_keys, size in _companions(starts, lengths, wide):
        first, last = starts[members[0]], starts[members[-1] + 1]
        if not num_keys:
            k, v = cache.of_one(members[0], lengths[members[0]])
            out[first:last] = attend(wide[first:last], k, v, window, scale, softcap, tops)[0]
            continue
        is_range = last - first == queries * len(members)
        at = slice(first, last) if is_range else [starts[b] + i for b in members for i in range(queries)]
        ends = tuple(lengths[b] for b in members)
        k, v = cache.of_several(members, ends, num_keys)
        rows = wide[at].unflatten(0, (len(members), queries))
        out[at] = attend_together(rows, k, v, ends, size, window, scale, softcap, tops).flatten(0, 1)
    return narrow(out.flatten(1, 2), q.dtype)


def _triton_reason(q: Tensor, scale: float, **_: object) -> str | None:
    if scale <= 0:
        return f"takes the highest score before scaling, so scale must be positive, got {scale}"
    return head_reason(q)


paged_attention.impl("cpp", "whorl.ops.cpu.attention:paged_attention")
paged_attention.impl("triton", "paged_triton:attention", accepts=_triton_reason)
paged_attention.impl("torch_npu", "paged_torch_npu:attention", accepts=paged_torch_npu.reason)


_HEADS = {"heads": 4, "kv_heads": 2, "dim": 32}
_CASES: list[Values] = [
    {"queries": (1,), "contexts": (5,), "heads": 1, "kv_heads": 1, "dim": 16},
    {"queries": (3, 1, 2), "contexts": (3, 9, 20), **_HEADS},
    {"queries": (1, 2), "contexts": (30, 7), "scale": 0.01, **_HEADS},
    {"queries": (1, 3), "contexts": (300, 70), "heads": 8, "kv_heads": 1, "dim": 64, "sliced": True},
    {"queries": (0,), "contexts": (0,), **_HEADS},
    {"queries": (0,), "contexts": (4,), **_HEADS},
    {"queries": (5, 2), "contexts": (40, 2), "window": 4, "sliced": True, **_HEADS},
    {"queries": (2, 1), "contexts": (300, 20), "window": 150, **_HEADS},
    {"queries": (35,), "contexts": (70,), "heads": 6, "kv_heads": 2, "dim": 40},
    {"queries": (40,), "contexts": (60,), "window": 13, "sliced": True, **_HEADS},
    # Softcaps.
    {"queries": (3, 1, 2), "contexts": (3, 9, 300), "softcap": 0.5, **_HEADS},
    {"queries": (35,), "contexts": (70,), "heads": 6, "kv_heads": 2, "dim": 40, "softcap": 2.0, "window": 20},
    {"queries": (1, 2), "contexts": (30, 7), "softcap": 50.0, "scale": 0.01, **_HEADS},
    # Sinks.
    {"queries": (3, 1, 2), "contexts": (3, 9, 300), "sinks": True, **_HEADS},
    {"queries": (35,), "contexts": (70,), "heads": 6, "kv_heads": 2, "dim": 40, "sinks": True, "window": 20},
    {"queries": (1, 2, 0), "contexts": (30, 7, 4), "sinks": True, "scale": 0.01, "softcap": 2.0, **_HEADS},
    {"queries": (1, 1), "contexts": (400, 130), "sinks": True, "window": 128, "block": 128, **_HEADS},
    # Block sizes that every backend takes.
    {"queries": (5, 1), "contexts": (140, 2), "block": 128, **_HEADS},
    {"queries": (2, 1), "contexts": (9, 130), "block": 128, **_HEADS},
    # Quantised caches.
    {"queries": (1, 2), "contexts": (140, 7), "format": "fp8", "window": 60, **_HEADS},
    {"queries": (18,), "contexts": (40,), "heads": 3, "kv_heads": 1, "dim": 40, "format": "int8", "sliced": True},
    {"queries": (1, 1), "contexts": (130, 30), "format": "int8", "block": 128, **_HEADS},
]
_QWEN = {"heads": 32, "kv_heads": 4, "dim": 128, "block": 16}
_BENCH: list[Values] = [
    {"queries": (1,), "contexts": (4096,), **_QWEN},
    {"queries": (1,) * 64, "contexts": (1024,) * 64, **_QWEN},
    {"queries": (8192,), "contexts": (8192,), **_QWEN},
    {"queries": (512,) * 8, "contexts": (4096,) * 8, **_QWEN},
]
_BENCH += [case | {"format": name} for name in FORMATS for case in _BENCH[:3]]
_BENCH += [{"queries": (1,), "contexts": (32768,), **_QWEN}]
_OSS = {"heads": 64, "kv_heads": 8, "dim": 64, "block": 16, "sinks": True}
_BENCH += [{"queries": (n,), "contexts": (4096,), "window": 128, **_OSS} for n in (1, 4096)]
_GEMMA2 = {"heads": 16, "kv_heads": 8, "dim": 256, "block": 16, "softcap": 50.0}  # of 9B
_BENCH += [{"queries": (n,), "contexts": (4096,), **_GEMMA2} for n in (1, 2048)]


@paged_attention.inputs(cases=_CASES, bench=_BENCH, words={"heads": "G*HK", "dim": "D"})
def _(
    draw: Draw,
    queries: tuple[int, ...],
    contexts: tuple[int, ...],
    kv_heads: int,
    dim: int,
    block: int = 8,
    format: str = "",
    heads: int = 0,
    sinks: bool = False,
) -> Values:
    """format: "" or that of a quantised cache."""
    tables, blocks = draw.sequences(queries, contexts, block)
    caches = draw_caches(draw, (blocks, block, kv_heads, dim + draw.gap), format, draw.scale)
    caches |= {name: caches[name][..., :dim] for name in ("k_cache", "v_cache")}
    more = {"sinks": draw.scaled(heads)} if sinks else {}
    return {"T": sum(queries), "q": draw.normal, **caches, **tables, **more, "scale": dim**-0.5}
