"""Attention of absorbed queries over the latents in a paged cache: over all visible keys, or over selected ones."""

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from torch import Tensor

from .._check import check_sequences
from .._draw import Draw
from .._op import Values, narrow, operator, widen
from .._tracing import is_readable
from ..linear import TILE, multiply
from ..sparse_attention.contract import check_order
from . import attention_torch_npu
from .codes import alignment_reason, latent_bytes, pack_latents, unpack_latents
from .pages import (
    ONE_CACHE,
    check_latents,
    gather_latents,
    make_pages,
    split_pages,
)

KEYS = 128  # keys of a cut: the list of keys that a token sees is divided into cuts from its first key on
ROWS = 1024  # (query, head) rows that are multiplied at once


def _check(
    q: Tensor, cache: Tensor, indices: Tensor | None, rotary_cache: Tensor | None, value_dim: int, **arguments: Any
) -> None:
    name, sizes = "latent_attention", (value_dim, q.shape[2] - value_dim)
    check_latents(name, cache, rotary_cache, sizes, latent_bytes(*sizes))
    tables = {n: arguments[n] for n in ("block_tables", "query_starts", "context_lens")}
    check_sequences(name, q, cache, **tables)
    if indices is None:
        return
    check_order(name, indices)
    if is_readable(indices) and indices.numel():
        _check_written(name, indices, tables["query_starts"].tolist(), tables["context_lens"].tolist())


def _check_written(name: str, indices: Tensor, starts: list[int], lengths: list[int]) -> None:
    """Raise ValueError if indices name a key past the end of its sequence; causality is the indexer's task."""
    for b, length in enumerate(lengths):
        chosen = indices[starts[b] : starts[b + 1]]
        if chosen.numel() and int(chosen.max()) >= length:
            raise ValueError(
                f"{name}: indices name key {int(chosen.max())} of sequence {b}, expected at most {length - 1}"
            )


def _fold(rows: Tensor, keys: Tensor, hidden: Tensor, value_dim: int) -> Tensor:
    """Return the attention output [R, value_dim] of rows over keys, cut by cut.

    rows: [R, D], scaled; keys: [a multiple of KEYS, D]; hidden: [R, keys] bool, True where a row does not see a key;
    each row sees at least one key of the first cut. Each cut has its own softmax, and the cuts are merged from first to
    last. A cut without visible keys multiplies by one and adds zero, so that a row's bits do not depend on the other
    rows. The sum of the weights comes out of the matmul with the values, which has an extra column of ones.
    """
    best, total = rows.new_zeros(len(rows), 1), rows.new_zeros(len(rows), value_dim + 1)
    for start in range(0, len(keys), KEYS):
        part = keys[start : start + KEYS]
        scores = multiply(rows, part).masked_fill(hidden[:, start : start + KEYS], -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top.clamp_min(torch.finfo(top.dtype).min))
        values = torch.cat((part[:, :value_dim], part.new_ones(KEYS, 1)), 1).t().contiguous()
        sums = multiply(weights, values)
        if start:
            higher = torch.maximum(best, top)
            total = total * torch.exp(best - higher) + sums * torch.exp(top - higher)
            best = higher
        else:
            best, total = top, sums
    return total[:, :-1] / total[:, -1:]


def _attend(q: Tensor, keys: Tensor, seen: Tensor, value_dim: int) -> Tensor:
    """Return the attention output [n, HQ, value_dim] of q [n, HQ, D], already scaled, over keys [S, D].

    seen: [n]; token t sees the first seen[t] keys.
    """
    count, heads, _ = q.shape
    keys = torch.nn.functional.pad(keys, (0, 0, 0, -len(keys) % KEYS))
    hidden = torch.arange(len(keys), device=q.device) >= seen[:, None]
    rows = torch.nn.functional.pad(q.flatten(0, 1), (0, 0, 0, -count * heads % TILE))
    hidden = hidden.repeat_interleave(heads, 0)
    hidden = torch.cat((hidden, hidden[-1:].expand(len(rows) - len(hidden), -1)))
    return _fold(rows, keys, hidden, value_dim)[: count * heads].view(count, heads, value_dim)


def _attend_causally(q: Tensor, keys: Tensor, first: int, value_dim: int) -> Iterator[Tensor]:
    """Yield the outputs of tokens at positions first, first + 1, ..., which see all keys up to their own, in groups."""
    step = max(1, ROWS // q.shape[1])
    for start in range(0, len(q), step):
        part = q[start : start + step]
        seen = torch.arange(first + start + 1, first + start + len(part) + 1, device=q.device)
        yield _attend(part, keys[: first + start + len(part)], seen, value_dim)


def _attend_sequence(q: Tensor, keys: Tensor, indices: Tensor | None, value_dim: int) -> Tensor:
    """Return the outputs of one sequence's tokens, which have its last len(q) positions.

    The first tokens, as long as their lists contain every key up to their own, are computed together.
    """
    first = len(keys) - len(q)
    if indices is None:
        return torch.cat(list(_attend_causally(q, keys, first, value_dim)))
    counts = (indices >= 0).sum(1).tolist()
    num_dense = next((i for i, count in enumerate(counts) if count <= first + i), len(q))
    outputs = list(_attend_causally(q[:num_dense], keys, first, value_dim))
    for i in range(num_dense, len(q)):
        if not counts[i]:
            outputs.append(q.new_zeros(1, q.shape[1], value_dim))
            continue
        chosen = keys[indices[i, : counts[i]].long()]
        outputs.append(_attend(q[i : i + 1], chosen, indices.new_tensor([counts[i]]), value_dim))
    return torch.cat(outputs)


@operator(check=_check, forward_only=True)
def latent_attention(
    q: Annotated[Tensor, "[T, HQ, D] float"],
    cache: Annotated[Tensor, "[blocks, block_size, width] q or uint8"],
    block_tables: Annotated[Tensor, "[B, MB] int32"],
    query_starts: Annotated[Tensor, "[B + 1] int32"],
    context_lens: Annotated[Tensor, "[B] int32"],
    indices: Annotated[Tensor | None, "[T, K] int32, from -1 to MB*block_size - 1"] = None,
    rotary_cache: Annotated[Tensor | None, "[blocks, block_size, D - value_dim] q"] = None,
    *,
    scale: Annotated[float, "> 0"],
    value_dim: Annotated[int, "1 to D"],
) -> Annotated[Tensor, "[T, HQ, value_dim] q"]:
    """Attend from new tokens to the latents of their sequences, which all heads share as keys and as values.

    q: absorbed, so D channels are those of a latent and the rotary channels after it; cache: D wide, already holds the
    new tokens, and its first `value_dim` channels are the latent, which is also the value; block_tables, query_starts,
    context_lens as in `paged_attention`; indices: the positions in its sequence that a token sees, ascending, each
    once, -1 after the last, as `paged_indexer` returns them; None: every position up to the token's own. scale: that of
    the heads before absorption, 192^-0.5 times YaRN's factor. Returns out contiguous.

    A token's list of keys is divided into cuts of 128. Each cut has its own softmax, and the cuts are merged in order.
    Scores, softmax and sums are in fp32, rounded once. So a token's bits depend on itself and the keys in its list
    alone: not on other sequences, on how a prompt is chunked, on prefill or decode, nor on whether the list was
    selected or contains every key. Tokens without keys, and rows of q after the last query_starts, are zero. A uint8
    cache is read as `latent_write` writes it: code times scale, which is exact in bf16. With rotary_cache the
    rotary channels are there, and cache is value_dim wide. No gradient.

        out = ops.latent_attention(q, cache, *tables_and_lengths, indices, scale=192**-0.5, value_dim=512)
    """
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    wide = widen(q) * scale
    out = torch.zeros(*q.shape[:2], value_dim, dtype=wide.dtype, device=q.device)
    for b, length in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        if rows.stop > rows.start:
            cached = gather_latents(cache, rotary_cache, block_tables[b], length)
            is_coded = cache.dtype == torch.uint8
            keys = unpack_latents(cached, value_dim).to(wide.dtype) if is_coded else widen(cached)
            chosen = None if indices is None else indices[rows]
            out[rows] = _attend_sequence(wide[rows], keys, chosen, value_dim)
    return narrow(out, q.dtype)


def _triton_reason(q: Tensor, cache: Tensor, rotary_cache: Tensor | None, value_dim: int, **_: object) -> str | None:
    if rotary_cache is not None:
        return ONE_CACHE
    if value_dim > 512 or q.shape[2] - value_dim > 128:
        return f"{value_dim} value channels and {q.shape[2] - value_dim} more do not fit one program (512 and 128)"
    return alignment_reason(cache, value_dim) if cache.dtype == torch.uint8 else None


latent_attention.impl("triton", "attention_triton:forward", accepts=_triton_reason)
latent_attention.impl("torch_npu", "attention_torch_npu:attention", accepts=attention_torch_npu.reason)

_HEADS = {"heads": 4, "dim": 24, "value_dim": 16}
_CASES: list[Values] = [
    {"queries": (1,), "contexts": (5,), "heads": 1, "dim": 16, "value_dim": 8},
    {"queries": (3, 1, 2), "contexts": (3, 9, 20), "topk": 6, **_HEADS},
    {"queries": (1, 2), "contexts": (30, 7), "topk": 5, "scale": 0.01, **_HEADS},
    {"queries": (1, 3), "contexts": (300, 170), "topk": 150, "heads": 6, "dim": 40, "value_dim": 32, "sliced": True},
    {"queries": (0,), "contexts": (4,), "topk": 4, **_HEADS},
    {"queries": (35,), "contexts": (150,), "heads": 3, "dim": 40, "value_dim": 33, "block": 16},
    {"queries": (5, 2), "contexts": (140, 2), "topk": 64, "block": 128, **_HEADS},
    {"queries": (2, 1), "contexts": (140, 9), "topk": 130, "coded": True, "heads": 5, "dim": 152, "value_dim": 140},
    {"queries": (2, 1), "contexts": (30, 7), "topk": 9, "split": True, **_HEADS},
]
_DEEPSEEK = {"heads": 128, "dim": 576, "value_dim": 512, "topk": 2048, "block": 64}
_BENCH: list[Values] = [
    {"queries": queries, "contexts": contexts, "coded": coded, **_DEEPSEEK}
    for coded in (False, True)
    for queries, contexts in (((1,), (32768,)), ((1,) * 8, (8192,) * 8), ((1,) * 64, (8192,) * 64), ((2048,), (8192,)))
]


def _make(
    draw: Draw,
    queries: tuple[int, ...],
    contexts: tuple[int, ...],
    dim: int,
    value_dim: int,
    topk: int = 0,
    block: int = 8,
    coded: bool = False,
    split: bool = False,
) -> Values:
    tables, blocks = draw.sequences(queries, contexts, block)
    seen = [length - count + i + 1 for count, length in zip(queries, contexts, strict=True) for i in range(count)]
    indices = torch.full((len(seen), topk), -1, dtype=torch.int32)
    for row, count in zip(indices, seen, strict=True):
        chosen = torch.randperm(count)[:topk].sort().values
        row[: len(chosen)] = chosen
    pages = draw.scale * make_pages(draw, blocks, block, dim)
    latents, rotary_channels = split_pages(pages, value_dim) if split else (pages, None)
    if coded and pages.is_meta:
        latents = make_pages(draw, blocks, block, latent_bytes(value_dim, dim - value_dim), True)
    elif coded:
        parts = pages.flatten(0, 1).split((value_dim, dim - value_dim), 1)
        latents = pack_latents(*parts).unflatten(0, (blocks, block))
    return {
        "T": sum(queries),
        "q": draw.normal,
        "cache": latents,
        **tables,
        "indices": indices.to(draw.device) if topk else None,
        "rotary_cache": rotary_channels,
        "scale": dim**-0.5,
    }


latent_attention.inputs(cases=_CASES, bench=_BENCH, words={"heads": "HQ", "dim": "D"})(_make)
