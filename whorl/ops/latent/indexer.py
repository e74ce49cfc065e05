"""The lightning indexer over a paged cache of its keys: it selects the keys that each new token attends to."""

from typing import Annotated

import torch
from torch import Tensor

from .._check import check_sequences
from .._draw import Draw
from .._op import Values, operator, widen
from ..indexer.bounds import chunks
from ..indexer.scores import triton_reason
from ..indexer.top_k import top_k, topk_limit
from ..linear import multiply
from . import indexer_torch_npu
from .codes import alignment_reason, gather_index, index_bytes, round_queries, store_index
from .pages import check_pages, gather, make_pages

KEYS = 256  # keys per matmul; each begins at a position that is a multiple of this


def _check(q: Tensor, weights: Tensor, cache: Tensor, topk: int, **tables: Tensor) -> None:
    check_pages("paged_indexer", cache, q.shape[2], index_bytes(q.shape[2]))
    check_sequences("paged_indexer", q, cache, **tables)


def _add_heads(x: Tensor) -> Tensor:
    """Sum x [T, HI, KEYS] over the heads, by adding the second half of them to the first until one is left.

    torch.sum would add in an order that depends on the shape.
    """
    while x.shape[1] > 1:
        half = (x.shape[1] + 1) // 2
        num_pairs = x.shape[1] - half
        pairs = x[:, :num_pairs] + x[:, half:]
        x = torch.cat((pairs, x[:, num_pairs:half]), 1) if num_pairs < half else pairs
    return x[:, 0]


def compute_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return all scores [n, S] of q [n, HI, D], weights [n, HI] and keys [S, D], all in the dtype of accumulation.

    Keys are multiplied KEYS at a time, the last group padded, so that a score's bits depend on its query and key alone.
    """
    length, scores = keys.shape[0], []
    keys = torch.nn.functional.pad(keys, (0, 0, 0, -length % KEYS))
    rows = q.flatten(0, 1).contiguous()
    for block in keys.split(KEYS):
        dots = multiply(rows, block).relu_().view(*q.shape[:2], KEYS)
        scores.append(_add_heads(dots * weights[..., None]))
    return torch.cat(scores, 1)[:, :length]


def _gather_keys(cache: Tensor, dim: int, table: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
    """Return the keys of one sequence and, for an 8-bit cache, their scales."""
    if cache.dtype == torch.uint8:
        return gather_index(cache, dim, table, length)
    return widen(gather(cache, table, length)), None


@operator(check=_check, forward_only=True)
def paged_indexer(
    q: Annotated[Tensor, "[T, HI, D] float"],
    weights: Annotated[Tensor, "[T, HI] float"],
    cache: Annotated[Tensor, "[blocks, block_size, width] q or uint8"],
    block_tables: Annotated[Tensor, "[B, MB] int32"],
    query_starts: Annotated[Tensor, "[B + 1] int32"],
    context_lens: Annotated[Tensor, "[B] int32"],
    topk: Annotated[int, "> 0"],
) -> Annotated[Tensor, "[T, topk] int32"]:
    """Select for each new token the `topk` highest-scoring keys of its sequence.

    Returns their positions in the sequence, ascending. weights include every constant factor; cache: D wide, already
    holds the new tokens' keys; block_tables, query_starts, context_lens and the visible keys are those of
    `paged_attention`. score = sum over heads of weights * max(0, q . k), products and sums in fp32, as in
    `index_scores`; ties go to the lowest position, as in `top_k`. A token that sees fewer than topk keys gets all of
    them, followed by -1. A token's selection depends on itself and the keys it sees alone: not on other sequences, on
    how a prompt is chunked, nor on prefill or decode. Rows of q after the last query_starts are -1. A uint8 cache, as
    `index_write` writes it, holds codes, which are multiplied as they are: queries are transformed and quantised in the
    same way, their scales are multiplied into the weights, and the score is multiplied by the key's scale last. No
    gradient.

        indices = ops.paged_indexer(q, weights, cache, block_tables, query_starts, context_lens, topk=2048)
    """
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    is_coded = cache.dtype == torch.uint8
    wide, factors = round_queries(q, weights) if is_coded else (widen(q), weights.to(widen(q).dtype))
    out = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    for b, length in enumerate(lengths):
        first, last = starts[b], starts[b + 1]
        if last == first:
            continue
        keys, scales = _gather_keys(cache, q.shape[2], block_tables[b], length)
        ends = torch.arange(length - (last - first) + 1, length + 1, dtype=torch.int32, device=q.device)
        for part in chunks(last - first, max(length, q.shape[1] * KEYS)):
            rows = slice(first + part.start, first + part.stop)
            scores = compute_scores(wide[rows], factors[rows], keys)
            scores = scores if scales is None else scores * scales
            out[rows] = top_k.reference(scores, topk, None, ends[part])[0]
    return out


def _triton_reason(q: Tensor, cache: Tensor, topk: int, **_: object) -> str | None:
    reason = triton_reason(q) or topk_limit(topk)
    if reason is not None or cache.dtype != torch.uint8:
        return reason
    dim = q.shape[2]
    if dim & (dim - 1):
        return f"takes codes of a power of two of channels, got {dim}"
    return alignment_reason(cache, cache.shape[1] * dim)


paged_indexer.impl("triton", "indexer_triton:forward", accepts=_triton_reason)
paged_indexer.impl("torch_npu", "indexer_torch_npu:indexer", accepts=indexer_torch_npu.reason)

_CASES: list[Values] = [
    {"queries": (1,), "contexts": (5,), "heads": 1, "dim": 8, "topk": 3},
    {"queries": (3, 1, 2), "contexts": (3, 9, 20), "heads": 4, "dim": 16, "topk": 6},
    {"queries": (2, 1), "contexts": (30, 7), "heads": 3, "dim": 24, "topk": 16, "scale": 1 / 64},
    {"queries": (1, 3), "contexts": (300, 70), "heads": 5, "dim": 16, "topk": 33, "sliced": True},
    {"queries": (0,), "contexts": (4,), "heads": 2, "dim": 8, "topk": 4},
    {"queries": (35,), "contexts": (70,), "heads": 8, "dim": 32, "topk": 64, "block": 16},
    {"queries": (2, 1, 3), "contexts": (40, 9, 130), "heads": 8, "dim": 16, "topk": 24, "coded": True},
]
_DEEPSEEK = {"heads": 64, "dim": 128, "topk": 2048, "block": 64}
_BENCH: list[Values] = [
    {"queries": queries, "contexts": contexts, "coded": coded, **_DEEPSEEK}
    for coded in (False, True)
    for queries, contexts in (((1,), (32768,)), ((1,) * 64, (8192,) * 64), ((2048,), (8192,)))
]


@paged_indexer.inputs(cases=_CASES, bench=_BENCH)
def _(
    draw: Draw,
    queries: tuple[int, ...],
    contexts: tuple[int, ...],
    heads: int,
    dim: int,
    block: int = 8,
    coded: bool = False,
) -> Values:
    """Draw small integers and powers of two: sums are exact in any order, so that all dtypes select the same keys."""
    tables, blocks = draw.sequences(queries, contexts, block)
    device, dtype, count = draw.device, draw.dtype, sum(queries)
    shape = (blocks, block + 2 * bool(draw.sliced), dim)
    cache = torch.randint(-2, 3, shape, device=device).to(dtype)[:, :block]
    if coded:
        keys, cache = cache.flatten(0, 1), make_pages(draw, blocks, block, index_bytes(dim), True)
        if not keys.is_meta:
            store_index(keys, cache, torch.arange(len(keys), device=device))
    return {
        "q": torch.randint(-2, 3, (count, heads, dim + draw.gap), device=device)[..., :dim].to(dtype),
        "weights": draw.scale * torch.randint(-3, 5, (count, heads), device=device).to(draw.wide) / 8,
        "cache": cache,
        **tables,
    }
