# mypy: allow-untyped-defs
"""Matmuls with few tokens whose chunks of K are computed by different programs.

A weight with few rows has too few tiles to keep every multiprocessor busy. Where a matmul is defined as a sum of chunks
of K, each from zero, programs may share the chunks of a tile: they store the fp32 results of the chunks, and a second
kernel adds these in order. The bits are those of one program that adds the chunks itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from ._launch_triton import launched
from ._overlap_triton import begin, follow, overlap
from ._rows import ceil_div

PROGRAMS = 396  # three per multiprocessor of an H200: with as many tiles no chunks are shared
SCRATCH = 2**26  # largest scratch memory for the results of chunks, in bytes


@launched
@triton.jit
def _add_chunks_kernel(
    parts_ptr,
    bias_ptr,
    y_ptr,
    size,
    N,
    HAS_BIAS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add CHUNKS results of `size` elements in order, then the bias [N], and round."""
    begin(OVERLAP)
    follow(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for c in tl.static_range(CHUNKS):
        total += tl.load(parts_ptr + c * size + at, mask=is_real, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at % N, mask=is_real, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=is_real)


def shared_chunks(y: Tensor, tiles: int, length: int, chunk: int) -> int:
    """Return how many programs share a tile of y [T, N]: all chunks of K where there are few tiles, else 1."""
    chunks = max(1, ceil_div(length, chunk))
    is_shared = y.shape[0] <= 16 if is_interpreting() else tiles < PROGRAMS
    return chunks if is_shared and 4 * chunks * y.numel() <= SCRATCH else 1


def add_chunks(parts: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Write the sum of parts [chunks, T, N] fp32 and the bias to y [T, N]."""
    block = 256
    _add_chunks_kernel[(ceil_div(y.numel(), block),)](
        parts,
        y if bias is None else bias.contiguous(),
        y,
        y.numel(),
        y.shape[1],
        HAS_BIAS=bias is not None,
        CHUNKS=len(parts),
        BLOCK=block,
        num_warps=2,
        **overlap(y),
    )


def make_parts(y: Tensor, chunks: int) -> Tensor:
    """Allocate the results of chunks, [chunks, T, N] fp32."""
    return torch.empty(chunks, *y.shape, dtype=torch.float32, device=y.device)
