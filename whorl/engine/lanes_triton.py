# mypy: allow-untyped-defs
"""The kernel of lanes.py: what a recorded step begins with, in one launch instead of five."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.ops._launch_triton import launched
from whorl.ops._rows import power_of_2

MOST = 1024  # blocks of a table that are copied at once


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
    """Row `i` gets its token, and entry `i`, whose rows write their blocks first, its table.

    An entry's rows are the only ones of its lane, so no other program reads what they write. Rows behind the last entry
    only fill the call up, and write nothing.
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


def read(last: Tensor, tables: Tensor, given: Mapping[str, Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Of a call with as many entries as rows; those that it has not are padding."""
    names = ("tokens", "lanes", "table_at", "blocks", "entry_lanes", "query_starts")
    count = len(given["tokens"])
    token_ids = torch.empty_like(given["tokens"])
    block_tables = tables.new_empty(count, width)
    arrays = [given[name] for name in names]
    block = min(power_of_2(width), MOST)
    _read_kernel[(count,)](
        last, tables, *arrays, token_ids, block_tables, tables.stride(0), width, BLOCK=block, num_warps=4
    )
    return token_ids, block_tables
