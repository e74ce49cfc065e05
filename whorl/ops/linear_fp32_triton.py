# mypy: allow-untyped-defs
"""The fp32 linear layer in Triton, without tensor cores: K in chunks of 256, each from zero, added in order.

One chain of additions along K takes four cycles per element, however few the tokens: 16 us for the 7168 channels of
DeepSeek's router, in the few programs that its 256 rows make. Chunks can be computed at the same time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from ._chunks_triton import add_chunks, make_parts, shared_chunks
from ._launch_triton import launched
from ._overlap_triton import follow, overlap
from ._rows import ceil_div

CHUNK = 256  # a longer chain of additions has a larger error than torch's own matmul
FEW, MODERATE = 16, 64  # rows of the tiles for few tokens


@launched
@triton.jit
def _fp32_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    x_stride,
    weight_stride,
    T,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_SHARED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute a tile of y; with IS_SHARED only one chunk of it, to be added by `add_chunks`: y is then [chunks, T, N].

    Rows and columns past the end wrap around to valid memory, so that the loop needs no mask for them.
    """
    follow(OVERLAP)
    column_tiles = tl.cdiv(N, COLUMNS)
    rows = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    x_at = x_ptr + (rows % T).to(tl.int64)[:, None] * x_stride
    weight_at = weight_ptr + (columns % N).to(tl.int64)[None, :] * weight_stride
    first, last = tl.program_id(1) * CHUNK, K
    if IS_SHARED:
        last = tl.minimum(first + CHUNK, K)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for chunk in range(first, last, CHUNK):
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(chunk, tl.minimum(chunk + CHUNK, K), BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_at + k[None, :], mask=(k < K)[None, :], other=0.0)
            weight = tl.load(weight_at + k[:, None], mask=(k < K)[:, None], other=0.0)
            part = tl.dot(x, weight, part, input_precision="ieee")
        total += part
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    at = y_ptr + tl.program_id(1).to(tl.int64) * T * N + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(at, total, mask=(rows < T)[:, None] & (columns < N)[None, :])


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `linear` of fp32 tensors; x and weight have unit stride along K."""
    (count, length), columns = x.shape, weight.shape[0]
    y = torch.empty(count, columns, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    plan = tile_plan(count)
    tiles = ceil_div(count, plan["ROWS"]) * ceil_div(columns, plan["COLUMNS"])
    programs = shared_chunks(y, tiles, length, CHUNK)
    out = y if programs == 1 else make_parts(y, programs)
    has_bias = bias is not None and programs == 1
    _fp32_kernel[(tiles, programs)](
        x,
        weight,
        bias.contiguous() if has_bias else y,  # type: ignore[union-attr]
        out,
        x.stride(0),
        weight.stride(0),
        count,
        columns,
        length,
        HAS_BIAS=has_bias,
        CHUNK=CHUNK,
        IS_SHARED=programs > 1,
        **plan,
        **overlap(x),
    )
    if programs > 1:
        add_chunks(out, bias, y)
    return y


def tile_plan(count: int) -> dict[str, int]:
    """Return tile sizes, which affect speed alone: each sum is one chain per chunk, whatever the tile."""
    if is_interpreting():
        return {"ROWS": 16, "COLUMNS": 32, "BLOCK_K": 32}
    if count <= FEW:
        return {"ROWS": FEW, "COLUMNS": 16, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
    if count <= MODERATE:
        return {"ROWS": MODERATE, "COLUMNS": 16, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
    return {"ROWS": 64, "COLUMNS": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
