"""torch_npu as it is installed: imported on first use, its schemas probed once, every argument passed by name."""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from whorl.contracts import Installed, probe, schema_arguments


@functools.cache
def installed() -> Installed:
    torch_npu = importlib.import_module("torch_npu")
    return probe(torch_npu.__version__, schema_arguments(torch.ops))


def call(op: str, **wanted: Any) -> Any:
    """Call a torch_npu operator with the arguments that the installed version has."""
    return getattr(torch.ops.npu, op)(**installed().call_arguments(op, **wanted))


def missing(op: str, **wanted: Any) -> str | None:
    """Why the installed torch_npu cannot be called so, or None."""
    try:
        installed().call_arguments(op, **wanted)
    except RuntimeError as error:
        return str(error)
    return None


def on_host(x: Tensor) -> list[int]:
    """The numbers of a small tensor, for operators that take them as integers; waits for the device."""
    return [int(n) for n in x.tolist()]


def positions(num_rows: int, query_starts: Tensor, context_lens: Tensor) -> Tensor:
    """[num_rows] on the device: where each new token is in its sequence; -1 for rows that belong to none."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=query_starts.device)
    sequence = (rows[:, None] >= query_starts[1:]).sum(1).clamp_max(len(context_lens) - 1)
    found = (context_lens - query_starts[1:])[sequence] + rows
    return torch.where(rows < query_starts[-1], found, -1)


def kept(slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For operators that have no slot that means skip: (which row to write in the place of each, into which slot,
    whether any is kept). A row to be skipped repeats the first that is kept; where none is, all must write what is in
    slot 0."""
    is_kept = slots >= 0
    source = torch.where(is_kept, torch.arange(len(slots), device=slots.device), is_kept.int().argmax())
    return source, slots[source].clamp_min(0), is_kept.any()


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
