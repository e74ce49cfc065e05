# mypy: allow-untyped-defs
"""`packed_linear` in Triton: tiles of weight rows by tokens. The tile sizes affect speed alone, never bits.

Up to 8 tokens on Hopper the kernel is that of few_tokens_hopper_triton.py, where its `fits` takes them; for all others
it is `_packed_kernel`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._chunks_triton import add_chunks, make_parts, shared_chunks
from .._hopper import on_hopper
from .._launch_triton import launched
from .._overlap_triton import follow, overlap
from .._rows import ceil_div, unit_stride
from .layout import CHUNK, Weight
from .product_triton import fp32_block, product, weight_arguments

FEWEST = 8  # up to so many tokens the Gluon kernel runs
FEW = 16  # tokens of the narrowest tile

few_tokens_on_hopper = on_hopper(f"{__package__}.few_tokens_hopper_triton")


@launched
@triton.jit
def _packed_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    y_ptr,
    x_stride,
    T,
    N,
    K,
    width,
    groups,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NEAR: tl.constexpr,
    CHUNK: tl.constexpr,
    CHAIN: tl.constexpr,
    IS_SHARED: tl.constexpr,
    EVEN: tl.constexpr,
    FAST: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply a tile of weight rows by a tile of tokens.

    Programs that run at the same time cover NEAR tiles of tokens and few tiles of rows, so that they share L2 lines.
    IS_SHARED: only one chunk of K is computed, to be added by `add_chunks`; y is [chunks, T, N] fp32.
    """
    follow(OVERLAP)
    token_tiles, row_tiles = tl.cdiv(T, TOKENS), tl.cdiv(N, ROWS)
    program = tl.program_id(0)
    first = program // (NEAR * row_tiles) * NEAR
    tile_rows = tl.minimum(token_tiles - first, NEAR)
    offset = program % (NEAR * row_tiles)
    tokens = (first + offset % tile_rows) * TOKENS + tl.arange(0, TOKENS)
    rows = (offset // tile_rows) * ROWS + tl.arange(0, ROWS)
    x_at = x_ptr + tokens.to(tl.int64)[None, :] * x_stride
    first_column, last_column = tl.program_id(1) * CHUNK, K
    if IS_SHARED:
        last_column = tl.minimum(first_column + CHUNK, K)
    # Rows past the end wrap around to valid memory; their results are not stored.
    total, _ = product(
        x_at,
        (tokens < T)[None, :],
        codes_ptr,
        scales_ptr,
        zeros_ptr,
        rows % N,
        0,
        first_column,
        last_column,
        K,
        width,
        groups,
        False,
        GROUP,
        GROUP_ROWS,
        HAS_ZEROS,
        LAYOUT,
        ROWS,
        TOKENS,
        BLOCK_K,
        CHUNK,
        CHAIN,
        EVEN,
        FAST,
        WIDEN,
    )
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    at = y_ptr + tl.program_id(1).to(tl.int64) * T * N + tokens.to(tl.int64)[None, :] * N + rows[:, None]
    tl.store(at, total.to(y_ptr.dtype.element_ty), mask=(tokens < T)[None, :] & (rows < N)[:, None])


def forward(x: Tensor, bias: Tensor | None, **packed: Any) -> Tensor:
    x, weight = unit_stride(x), Weight(**packed)
    y = torch.empty(len(x), len(weight.codes), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if len(x) <= FEWEST and (few := few_tokens_on_hopper(x, weight)) is not None:
        few.linear(x, weight, bias, y)
        return y
    launch(x, weight, bias, y, plan(len(x)) if x.element_size() == 2 else fp32_plan(weight))
    return y


def launch(x: Tensor, weight: Weight, bias: Tensor | None, y: Tensor, sizes: dict[str, Any]) -> None:
    """Launch the kernel with the given tile sizes, and the sum of chunks where programs share a tile."""
    count, num_rows = y.shape
    tiles = ceil_div(count, sizes["TOKENS"]) * ceil_div(num_rows, sizes["ROWS"])
    programs = shared_chunks(y, tiles, x.shape[1], CHUNK)
    out = y if programs == 1 else make_parts(y, programs)
    has_bias = bias is not None and programs == 1
    _packed_kernel[(tiles, programs)](
        x,
        *weight.tensors,
        bias.contiguous() if has_bias else y,  # type: ignore[union-attr]
        out,
        x.stride(0),
        count,
        num_rows,
        HAS_BIAS=has_bias,
        IS_SHARED=programs > 1,
        enable_fp_fusion=False,
        **weight_arguments(x, weight, sizes["BLOCK_K"]),
        **sizes,
        **overlap(x),
    )
    if programs > 1:
        add_chunks(out, bias, y)


def plan(count: int) -> dict[str, int]:
    """Return tile sizes by the number of tokens.

    Tiles have at least 64 rows: with fewer, the compiler would choose the order in which tensor cores add columns by
    the width of the codes. A tile needs registers for two accumulators, that of the chunk and the total.
    """
    if is_interpreting():
        return {"ROWS": 32, "TOKENS": 16, "BLOCK_K": 128, "NEAR": 2}
    if count <= FEW:
        return {"ROWS": 64, "TOKENS": 16, "BLOCK_K": 128, "NEAR": 8, "num_warps": 4, "num_stages": 5}
    if count <= 4 * FEW:
        return {"ROWS": 64, "TOKENS": 64, "BLOCK_K": 128, "NEAR": 8, "num_warps": 4, "num_stages": 3}
    return {"ROWS": 128, "TOKENS": 128, "BLOCK_K": 128, "NEAR": 8, "num_warps": 8, "num_stages": 3}


def fp32_plan(weight: Weight) -> dict[str, int]:
    """Return tile sizes in fp32, whatever the number of tokens."""
    sizes = {"NEAR": 8, "BLOCK_K": fp32_block(weight)}
    if is_interpreting():
        return sizes | {"ROWS": 32, "TOKENS": 16}
    return sizes | {"ROWS": 64, "TOKENS": 32, "num_warps": 8, "num_stages": 1}
