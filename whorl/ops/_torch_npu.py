"""Calls of the installed torch_npu: imported on first use, schemas probed once, every argument passed by name."""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whorl.contracts import CONTRACTS, Installed, check_installed, schema_arguments

BATCH_INVARIANT = "batch_invariant_ops"  # AscendC's package of batch-invariant operators, and their namespace


@functools.cache
def installed() -> Installed:
    """Return the operators of the installed torch_npu and the names of their arguments.

    Those of AscendC's batch_invariant_ops are among them where that package is installed, too.
    """
    torch_npu = importlib.import_module("torch_npu")
    try:
        importlib.import_module(BATCH_INVARIANT)  # registers its operators
    except (ImportError, OSError) as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != BATCH_INVARIANT:
            warnings.warn(
                f"{BATCH_INVARIANT} is installed but cannot be imported ({error}), so torch_npu's own operators run "
                "and the bits of a token may depend on the batch. Install it again for this CANN, or remove it.",
                stacklevel=2,
            )
    return check_installed(torch_npu.__version__, schema_arguments(torch.ops))


def batch_invariant(op: str) -> Callable[..., Any] | None:
    """Return AscendC's <op>_batch_invariant, or None where it is not installed.

    Pass it arguments by position: the package publishes no names.
    """
    name = f"{op}_batch_invariant"
    return getattr(getattr(torch.ops, BATCH_INVARIANT), name) if name in installed().arguments else None


def batch_invariant_operators() -> str:
    """List those of AscendC's batch-invariant operators that run in place of torch_npu's, or say why none does."""
    names = [contract.name for contract in CONTRACTS.values() if contract.library == BATCH_INVARIANT]
    try:
        present = [name for name in names if name in installed().arguments]
    except RuntimeError as error:  # this torch_npu is not supported
        return str(error)
    return ", ".join(present) or f"none, {BATCH_INVARIANT} is not installed"


def call(op: str, **arguments: Any) -> Any:
    """Call torch.ops.npu.<op>, or that of the operator's own namespace, with the arguments that the installed one has.

    Raises RuntimeError where it lacks the operator, or an argument whose value is not the default.
    """
    namespace = getattr(torch.ops, CONTRACTS[op].namespace or "npu")
    return getattr(namespace, op)(**installed().call_arguments(op, **arguments))


def missing(op: str, **arguments: Any) -> str | None:
    """Return None, or the reason that the installed torch_npu cannot be called with these arguments."""
    try:
        installed().call_arguments(op, **arguments)
    except RuntimeError as error:
        return str(error)
    return None


def on_host(x: Tensor) -> list[int]:
    """Copy a small tensor to the host, for operators that take integers; this waits for the device."""
    return [int(n) for n in x.tolist()]


def positions(num_tokens: int, query_starts: Tensor, context_lens: Tensor) -> Tensor:
    """Return the position of each new token in its sequence, [num_tokens] on the device; -1 for tokens of none.

    query_starts: [B + 1], context_lens: [B], as in `paged_attention`.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=query_starts.device)
    sequence = (tokens[:, None] >= query_starts[1:]).sum(1).clamp_max(len(context_lens) - 1)
    position = (context_lens - query_starts[1:])[sequence] + tokens
    return torch.where(tokens < query_starts[-1], position, -1)


def replace_skipped(slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Replace each token with a negative slot by the first token that has one, for operators that cannot skip tokens.

    Returns three tensors: for each token the index of the token to write instead of it, [T]; the slot to write it to,
    [T]; and whether any token has a slot. Where none has, all slots are 0 and the caller must write back what slot 0
    holds.
    """
    is_written = slots >= 0
    source = torch.where(is_written, torch.arange(len(slots), device=slots.device), is_written.int().argmax())
    return source, slots[source].clamp_min(0), is_written.any()


def dtype_name(x: Tensor) -> str:
    """Return the dtype of x as the functions of whorl.contracts name it, for example "bfloat16"."""
    return str(x.dtype).removeprefix("torch.")
