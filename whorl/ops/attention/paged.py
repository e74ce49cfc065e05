"""Attention over a paged KV cache.

The reference computes tiles of rows, a row being one query of one head, over blocks of KEYS keys, so that every product
has one of few shapes. As in `linear`, the bits of a row are those that it has in a tile of ROWS rows.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl.device import HOST

from .._check import check_cache, check_lengths, check_tables
from .._op import Values, narrow, operator, widen
from .._tracing import is_readable
from .._trial_store import TrialStore
from . import paged_torch_npu
from .paged_cases import BENCH, CASES, make

_STORE = TrialStore("paged_attention", __file__)
ROWS = 32  # rows of the tile that defines a row's bits
MORE_ROWS, FEW_ROWS = 256, 8  # rows of other tiles, used where a trial shows that their bits are equal
KEYS = 256  # keys of a block; blocks begin at positions that are multiples of this


def check_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int, name: str = "paged_attention", **arguments: Any
) -> None:
    block_tables, query_starts, context_lens = (arguments[n] for n in ("block_tables", "query_starts", "context_lens"))
    is_coded = arguments["k_scale"] is not None
    check_cache(name, k_cache, v_cache, arguments["k_scale"], arguments["v_scale"])
    if not q.is_floating_point() or (q.dtype.itemsize < 2 if is_coded else q.dtype != k_cache.dtype):
        expected = "bf16, fp16 or fp32" if is_coded else f"the cache's {k_cache.dtype}"
        raise ValueError(f"{name}: q is {q.dtype}, expected {expected}")
    if q.dim() != 3 or q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"{name}: q is {list(q.shape)}, expected [T, HQ, {k_cache.shape[3]}] with HQ a multiple of "
            f"{k_cache.shape[2]}"
        )
    count = len(context_lens) if context_lens.dim() == 1 else -1
    if block_tables.dim() != 2 or block_tables.shape[0] != count or query_starts.shape != (count + 1,):
        raise ValueError(
            f"{name}: block_tables is {list(block_tables.shape)}, query_starts {list(query_starts.shape)}, "
            f"context_lens {list(context_lens.shape)}, expected [B, MB], [B + 1] and [B]"
        )
    if {block_tables.dtype, query_starts.dtype, context_lens.dtype} != {torch.int32}:
        raise ValueError(f"{name}: block_tables, query_starts and context_lens must be int32")
    if window < 0:
        raise ValueError(f"{name}: window is {window}, expected 0 (none) or a positive number of keys")
    if all(map(is_readable, (block_tables, query_starts, context_lens))):
        starts, contexts = query_starts.tolist(), context_lens.tolist()
        check_lengths(name, starts, contexts, len(q), block_tables.shape[1] * k_cache.shape[1])
        check_tables(name, block_tables, starts, contexts, k_cache)


def _gather(cache: Tensor, scales: Tensor | None, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return the keys or values of a sequence, [HK, length, D] in the dtype of accumulation.

    Codes are dequantised and rounded to `dtype` first.
    """
    x = cache.index_select(0, blocks).flatten(0, 1)[:length]
    if scales is not None:
        by_token = scales.index_select(0, blocks).transpose(1, 2).flatten(0, 1)[:length, :, None]
        x = (x.to(by_token.dtype) * by_token).to(dtype)
    return widen(x).transpose(0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, list[list[Tensor]]]:
    """Compute causal attention of one sequence, whose queries have the last n positions.

    q: [n, HK, G, D], G query heads for each key head; k, v: [HK, length, D]; all in the dtype of accumulation. Returns
    out in the shape of q, and for each tile of rows the highest scores and sums that `log_sum_exp` takes.
    """
    length, (count, heads, group, dim) = k.shape[1], q.shape
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, -length % KEYS)) for x in (k, v))
    rows = (q * scale).transpose(0, 1).reshape(heads, count * group, dim)
    sizes = _sizes((heads, dim), q.dtype, q.device.type, torch.get_num_threads())
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -count * group % sizes[-1]))
    parts, sums, at = [], [], 0
    for size in sizes:
        while rows.shape[1] - at >= size:
            out, *tile_sums = _tile(rows[:, at : at + size], k, v, QueryTile(length, count, group, at, size), window)
            parts.append(out)
            sums.append(tile_sums)
            at += size
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return out[:, : count * group].view(heads, count, group, dim).transpose(0, 1), sums


class QueryTile(NamedTuple):
    """Where a tile of rows lies in its sequence. Rows past the last query are padding and have the last position."""

    length: int  # tokens of the sequence
    queries: int  # of them, the last, that are queries
    group: int  # rows of one query: its heads that share a key head
    at: int  # first row of the tile
    size: int  # rows of the tile

    def position(self, row: int) -> int:
        """Return the position of a row's query in its sequence."""
        return min(self.length - self.queries + row // self.group, self.length - 1)

    def blocks(self, window: int) -> range:
        """Return the first key of every block of KEYS keys from the first to the last that a row attends to."""
        lowest, highest = self.position(self.at), self.position(self.at + self.size - 1)
        return range(max(0, lowest - window + 1) // KEYS * KEYS if window else 0, highest + 1, KEYS)


@functools.lru_cache(maxsize=256)  # every layer of a model needs the same masks
def _hidden(place: QueryTile, block: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return the mask [rows, keys] of the block that begins at key `block`: True where a row does not attend."""
    with torch.inference_mode(False):  # a later call may save the mask for backward
        tokens = torch.arange(place.at, place.at + place.size, device=device) // place.group
        position = (place.length - place.queries + tokens).clamp(max=place.length - 1)[:, None]
        key = block + torch.arange(keys, device=device)
        hidden = key > position
        return hidden | (key <= position - window) if window else hidden


def log_sum_exp(sums: list[list[Tensor]], like: Tensor) -> Tensor:
    """Return the log-sum-exp of every row's scores, [n, HK, G]. sums, like: the two results of `attend`, out last."""
    count, heads, group, _ = like.shape
    lse = torch.cat([top + total.log() for top, total in sums], 1)[:, : count * group, 0]
    return lse.view(heads, count, group).transpose(0, 1)


def _tile(rows: Tensor, k: Tensor, v: Tensor, place: QueryTile, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention of one tile. rows: R scaled queries [HK, R, D]; k, v: [HK, multiple of KEYS, D].

    Returns out [HK, R, D] and, [HK, R, 1] each, the highest score of a row and the sum of the exponentials relative to
    it. The softmax is computed online over blocks of KEYS keys. For a row without visible keys in a block, the block
    multiplies by one and adds zero, so a row's bits do not depend on the other rows of the tile.
    """
    first, *later = place.blocks(window)
    top, _, weights = _weigh(rows, k, place, first, window, None)
    total, out = weights.sum(-1, keepdim=True), weights @ v[:, first : first + KEYS]
    for block in later:
        new_top, shift, weights = _weigh(rows, k, place, block, window, top)
        keep = torch.exp(top - shift)
        total = total * keep + weights.sum(-1, keepdim=True)
        out = out * keep + weights @ v[:, block : block + KEYS]
        top = new_top
    return out / total, top, total


def _weigh(
    rows: Tensor, k: Tensor, place: QueryTile, block: int, window: int, top: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one block of the online softmax. top: the highest score of each row before it; None for the first block.

    Returns the highest score including this block, that score with -inf replaced by 0, both [HK, R, 1], and the
    exponentials of the scores relative to it, [HK, R, KEYS].
    """
    hidden = _hidden(place, block, KEYS, window, rows.device)
    scores = (rows @ k[:, block : block + KEYS].transpose(1, 2)).masked_fill(hidden, -torch.inf)
    block_top = scores.amax(-1, keepdim=True)
    top = block_top if top is None else torch.maximum(top, block_top)
    shift = top.masked_fill(top == -torch.inf, 0)
    return top, shift, torch.exp(scores - shift)


@functools.cache
def _sizes(shape: tuple[int, int], dtype: torch.dtype, device: str, num_threads: int) -> tuple[int, ...]:
    """Return the row counts of tiles in which a row has the bits that it has in ROWS rows, by trial as in `linear`.

    shape: key heads and head size.
    """
    if device != HOST:
        return (ROWS,)

    def is_equal(size: int) -> bool:
        name = f"{size} rows {list(shape)} {dtype} {num_threads} threads"
        return _STORE.outcome(name, device, lambda: _is_equal(shape, dtype, size))

    return tuple(size for size in (MORE_ROWS, ROWS, FEW_ROWS) if size == ROWS or is_equal(size))


def _is_equal(shape: tuple[int, int], dtype: torch.dtype, size: int) -> bool:
    """Return whether tiles of `size` rows of random numbers have the bits of tiles of ROWS rows."""
    generator = torch.Generator().manual_seed(0)
    heads, dim = shape
    q, k, v = (torch.randn(heads, n, dim, generator=generator).to(dtype) for n in (MORE_ROWS, 2 * KEYS, 2 * KEYS))
    place = QueryTile(KEYS + MORE_ROWS, MORE_ROWS, 1, 0, MORE_ROWS)
    results = [
        torch.cat(
            [
                _tile(part, k, v, place._replace(at=i * rows, size=rows), 0)[0]
                for i, part in enumerate(q.split(rows, 1))
            ],
            1,
        )
        for rows in (size, ROWS)
    ]
    return torch.equal(*results)


def _fake(q: Tensor, **_: object) -> Tensor:
    return q.new_empty(q.shape)


def _bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of queries and result, and of the keys and values that block_tables has room for."""
    q, cache = values["q"], values["k_cache"]
    keys = values["block_tables"].numel() * cache.shape[1]
    head = cache.shape[3] * cache.element_size() + (0 if values.get("k_scale") is None else 4)
    return 2 * q.numel() * q.element_size() + 2 * keys * cache.shape[2] * head


@operator(check=check_attention, forward_only=True, fake=_fake, bytes=_bytes)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention of new tokens over the cached keys and values of their sequences.

    q: [T, HQ, D] bf16, fp16 or fp32, HQ a multiple of HK; the new tokens of sequence b are query_starts[b] to
    query_starts[b + 1] (exclusive); k_cache, v_cache: [blocks, block size, HK, D] in q's dtype, which already hold the
    keys and values of the new tokens; block_tables: [B, MB] int32, the blocks of each sequence, in order;
    query_starts: [B + 1] int32; context_lens: [B] int32, the number of keys of each sequence; scale multiplies the
    scores; returns out like q, contiguous. Query i of the n of sequence b has position context_lens[b] - n + i and
    attends to the keys up to its own, with window > 0 only to the last `window` of them. Scores, softmax and sums are
    in fp32, rounded once. A query's bits depend on the query and the keys it attends to alone: not on other sequences,
    not on how a prompt is divided into chunks, and not on whether it is prefilled or decoded; docs/arithmetic.md says
    how, and where this does not hold. Tokens past the last of query_starts are padding and zero. No gradient.

    With k_scale and v_scale, [blocks, HK, block size] fp32, contiguous, the caches hold codes, int8 or float8_e4m3fn,
    as `write_kv` stores them. A key or value is then code * scale in fp32, rounded to q's dtype; the result is that of
    a cache that holds these numbers.

    query_starts must begin at 0 and must not decrease; a sequence with queries must have no more of them than keys, and
    a row of block_tables long enough for its keys. Violations raise ValueError where they can be seen without waiting
    for a device: on the CPU, and on Ascend, whose operator takes lengths as integers; blocks outside the cache on the
    CPU only. CUDA kernels check neither lengths nor blocks.

        out = ops.paged_attention(q, k_cache, v_cache, block_tables, query_starts, context_lens, scale=head_size**-0.5)
    """
    heads = k_cache.shape[2]
    wide = widen(q).view(q.shape[0], heads, q.shape[1] // heads, q.shape[2])
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    outs = []
    for b, length in enumerate(lengths):
        if starts[b + 1] > starts[b]:
            blocks = block_tables[b, : -(-length // k_cache.shape[1])]
            k = _gather(k_cache, k_scale, blocks, length, q.dtype)
            v = _gather(v_cache, v_scale, blocks, length, q.dtype)
            outs.append(attend(wide[starts[b] : starts[b + 1]], k, v, window, scale)[0])
    if starts[-1] < len(q):
        outs.append(torch.zeros_like(wide[starts[-1] :]))
    out = outs[0] if len(outs) == 1 else torch.cat(outs) if outs else wide.clone()
    return narrow(out.flatten(1, 2), q.dtype).contiguous()


def _triton_reason(q: Tensor, scale: float, **_: object) -> str | None:
    if q.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    if scale <= 0:
        return f"takes the highest score before scaling, so scale must be positive, got {scale}"
    return None if q.shape[2] <= 256 else f"a head of {q.shape[2]} channels does not fit one program (256)"


paged_attention.impl("triton", "paged_triton:attention", accepts=_triton_reason)
paged_attention.impl("torch_npu", "paged_torch_npu:attention", accepts=paged_torch_npu.reason)


paged_attention.inputs(cases=CASES, bench=BENCH)(make)
