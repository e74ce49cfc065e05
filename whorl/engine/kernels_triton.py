# mypy: allow-untyped-defs
"""The Triton kernels of the engine itself: for inputs.py a copy of a few bytes, and for lanes.py the start of a
recorded decode call in one launch instead of five."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.ops._launch_triton import launched
from whorl.ops._rows import ceil_div, power_of_2

BLOCK = 2048  # bytes that a program copies
MOST = 1024  # entries of a block table that are copied at once


@launched
@triton.jit
def _copy_kernel(source_ptr, to_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(source_ptr + at, mask=at < count), mask=at < count)


def copy(source: Tensor, to: Tensor) -> None:
    """Copy the bytes of `source` to `to`."""
    count = source.numel()
    _copy_kernel[(ceil_div(count, BLOCK),)](source, to, count, BLOCK=BLOCK, num_warps=4)


@launched
@triton.jit
def _read_kernel(
    last_ptr,
    tables_ptr,
    tokens_ptr,
    lanes_ptr,
    table_at_ptr,
    blocks_ptr,
    entry_lanes_ptr,
    starts_ptr,
    token_ids_ptr,
    block_tables_ptr,
    stride,
    width,
    BLOCK: tl.constexpr,
):
    """Program `i` reads the id of token `i`, writes the new blocks of sequence `i`, then copies its block table.

    The tokens of a sequence are the only ones of its lane, so no other program reads what they write. Programs after
    the last sequence are padding and write no blocks.
    """
    i = tl.program_id(0)
    token = tl.load(tokens_ptr + i)
    if token < 0:
        token = tl.load(last_ptr + tl.load(lanes_ptr + i))
    tl.store(token_ids_ptr + i, token)
    for row in range(tl.load(starts_ptr + i), tl.load(starts_ptr + i + 1)):
        tl.store(tables_ptr + tl.load(table_at_ptr + row), tl.load(blocks_ptr + row))
    tl.debug_barrier()
    table = tables_ptr + tl.load(entry_lanes_ptr + i) * stride
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(block_tables_ptr + i.to(tl.int64) * width + at, tl.load(table + at, mask=at < width), mask=at < width)


def read(last: Tensor, tables: Tensor, inputs: Mapping[str, Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Return token ids and block tables of a call with as many (padded) sequences as tokens; see `Lanes.read`."""
    names = ("tokens", "lanes", "table_at", "blocks", "entry_lanes", "query_starts")
    count = len(inputs["tokens"])
    token_ids = torch.empty_like(inputs["tokens"])
    block_tables = tables.new_empty(count, width)
    arrays = [inputs[name] for name in names]
    block = min(power_of_2(width), MOST)
    _read_kernel[(count,)](
        last, tables, *arrays, token_ids, block_tables, tables.stride(0), width, BLOCK=block, num_warps=4
    )
    return token_ids, block_tables
