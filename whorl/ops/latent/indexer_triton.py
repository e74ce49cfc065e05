# mypy: allow-untyped-defs
"""The indexer over a paged cache: scores by `scores_triton.py`, the selection by `indexer/top_k_triton.py`.

No value is read back to the host: kernels read the lengths of sequences on the device, and the grid covers as many keys
as the block tables can hold. Only the scores of one chunk of tokens are in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._overlap_triton import begin, follow, overlap
from .._rows import ceil_div, unit_stride
from ..indexer import top_k_triton
from ..indexer.bounds import chunks
from .codes_triton import byte_views, codes_for, hadamard_rows, scale_for
from .scores_triton import write_scores


@triton.jit
def _round_kernel(
    q_ptr,
    weights_ptr,
    codes_ptr,
    factors_ptr,
    q_stride_t,
    q_stride_h,
    weights_stride,
    count,
    HI: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute `round_queries`: transform queries to codes, and multiply their scales into the weights."""
    begin(OVERLAP)
    follow(OVERLAP)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_real = rows < count
    token, head = rows // HI, rows % HI
    channels = tl.arange(0, D)[None, :]
    at = q_ptr + (token * q_stride_t + head * q_stride_h)[:, None] + channels
    x = hadamard_rows(tl.load(at, mask=is_real[:, None], other=0.0).to(tl.float32), ROWS, D)
    scale = scale_for(tl.max(tl.abs(x), 1))
    codes = codes_for(x, tl.broadcast_to(scale[:, None], x.shape)).to(tl.float8e4nv).to(tl.float32)
    tl.store(codes_ptr + rows[:, None] * D + channels, codes.to(codes_ptr.dtype.element_ty), mask=is_real[:, None])
    weight = tl.load(weights_ptr + token * weights_stride + head, mask=is_real, other=0.0).to(tl.float32)
    tl.store(factors_ptr + rows, weight * scale, mask=is_real)


def forward(q: Tensor, weights: Tensor, cache: Tensor, block_tables: Tensor, topk: int, **lengths: Tensor) -> Tensor:
    num_tokens, width = q.shape[0], block_tables.shape[1] * cache.shape[1]
    indices = q.new_empty(num_tokens, topk, dtype=torch.int32)
    values = q.new_empty(num_tokens, topk, dtype=torch.float32)
    # Zero, because no program writes the ends of tokens after the last sequence, which see nothing.
    starts, ends = torch.zeros(2, num_tokens, dtype=torch.int32, device=q.device)
    q, weights, cache, tables = (unit_stride(x) for x in (q, weights, cache, block_tables))
    sequences = lengths["query_starts"].contiguous(), lengths["context_lens"].contiguous()
    scales = None
    if cache.dtype == torch.uint8:
        q, weights = _round(q, weights)
        cache, scales = byte_views(cache)[:2]
    rows = next(chunks(num_tokens, width), slice(0, 0))
    scores = q.new_empty(rows.stop, width, dtype=torch.float32)
    for rows in chunks(num_tokens, width):
        part = scores[: rows.stop - rows.start]
        write_scores(q, weights, (cache, scales), tables, sequences, (rows, part, ends))
        top_k_triton.select(part, starts[rows], ends[rows], None, indices[rows], values[rows])
    return indices


def _round(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of the queries in fp16, which e4m3 is converted to exactly and fastest, and the new weights."""
    tokens, heads, dim = q.shape
    codes = q.new_empty(q.shape, dtype=torch.float16)
    factors = q.new_empty(tokens, heads, dtype=torch.float32)
    size = 16 if is_interpreting() else 8
    if codes.numel():
        _round_kernel[(ceil_div(tokens * heads, size),)](
            q,
            weights,
            codes,
            factors,
            *q.stride()[:2],
            weights.stride(0),
            tokens * heads,
            HI=heads,
            D=dim,
            ROWS=size,
            num_warps=2,
            enable_fp_fusion=False,
            **overlap(q),
        )
    return codes, factors
