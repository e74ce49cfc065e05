"""Which keys each query sees, as bounds on the positions of keys; and iteration over chunks of queries."""

from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

CHUNK = 2**25  # scores per chunk: 128 MiB in fp32
# Statements of arguments that the indexer's operators share: the first and last position that a query sees, exclusive,
# and the position of each key.
Bound = Annotated[Tensor | None, "[T] int32"]
Positions = Annotated[Tensor | None, "[S] int32"]


def causal_bounds(
    num_queries: int,
    num_keys: int,
    *,
    cu_seqlens: Tensor | None = None,
    positions: Tensor | None = None,
    device: str | torch.device = "cpu",
) -> tuple[Tensor, Tensor]:
    """Return `starts` and `ends` of causal attention: query t sees the keys with positions in [starts[t], ends[t]).

    num_queries, num_keys: T and S. positions: [T], the positions of the queries among all packed tokens, for a rank
    that holds a slice of them; by default the last T of the S positions. cu_seqlens: [B + 1] offsets at which the
    packed sequences begin, followed by the total; by default there is one sequence. device: where the result lies, if
    neither tensor is passed. Returns two int32 tensors [T]. Raises ValueError when positions is not [T].

        starts, ends = ops.causal_bounds(T, S, cu_seqlens=cu_seqlens)
    """
    if cu_seqlens is not None:
        device = cu_seqlens.device
    if positions is None:
        positions = torch.arange(num_keys - num_queries, num_keys, device=device)
    if positions.shape != (num_queries,):
        raise ValueError(f"causal_bounds: positions is {list(positions.shape)}, expected [{num_queries}]")
    ends = (positions + 1).int()
    if cu_seqlens is None:
        return torch.zeros_like(ends), ends
    sequence = torch.searchsorted(cu_seqlens.long(), positions.long(), right=True) - 1
    return cu_seqlens.to(positions.device)[sequence].int(), ends


def check_bounds(
    name: str, *, starts: Tensor | None, ends: Tensor | None, key_positions: Tensor | None, **_: object
) -> None:
    """Raise ValueError if starts or key_positions come without ends."""
    if ends is None and (starts is not None or key_positions is not None):
        raise ValueError(
            f"{name}: starts or key_positions is given without ends; pass both bounds, as causal_bounds returns them"
        )


def full_bounds(
    num_queries: int, num_keys: int, starts: Tensor | None, ends: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return both bounds as tensors [T] int32. Defaults: starts 0; ends causal, with the last query at the last key."""
    if ends is None:
        ends = torch.arange(num_keys - num_queries + 1, num_keys + 1, dtype=torch.int32, device=device)
    return torch.zeros_like(ends) if starts is None else starts, ends


def visible_keys(
    num_queries: int,
    num_keys: int,
    starts: Tensor | None,
    ends: Tensor | None,
    key_positions: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Return the mask [T, S] bool of the keys that each query sees; None means the defaults of `index_scores`."""
    starts, ends = full_bounds(num_queries, num_keys, starts, ends, device)
    if key_positions is None:
        key_positions = torch.arange(num_keys, device=device)
    return (key_positions >= starts[:, None]) & (key_positions < ends[:, None])


def chunks(num_rows: int, row_size: int, budget: int = CHUNK) -> Iterator[slice]:
    """Yield slices of num_rows rows of row_size elements each, with at most `budget` elements but at least one row."""
    step = max(1, budget // max(1, row_size))
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of accumulation for x: fp32, or fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
