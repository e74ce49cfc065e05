"""torch's own product for many rows, wherever a trial has shown that it has the bits of our kernels.

A library picks its kernel by shape, and some of them split K. So row counts are padded to a multiple, which leaves few
of them, and each (rows, N, K) is tried once, when it first comes; what was found is kept on disk for the next start.
One that is not equal is left to our kernel, as is one that first comes while a graph is recorded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.device import accelerator, is_recording

from ._trial_store import TrialStore

MULTIPLE = 128  # rows
ALIGNMENT = 16  # bytes: with less, a library takes other kernels


class Shape(NamedTuple):
    """Of a product, and what else chooses the library's kernel."""

    rows: int
    columns: int
    length: int
    dtype: torch.dtype
    device: torch.device
    may_round_sums: bool
    has_bias: bool


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_trials: dict[Shape, bool] = {}  # whether torch's product is equal
_STORE = TrialStore("linear_library", __file__, str(Path(__file__).with_name("linear_triton.py")))


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, ours: Product) -> Tensor | None:
    """x @ weight.T + bias by torch, or None where that is not known to be equal to `ours`."""
    if accelerator(x.device.type) is None or x.element_size() != 2 or not (_is_plain(x) and _is_plain(weight)):
        return None
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous() or bias.data_ptr() % ALIGNMENT):
        return None
    shape = _shape(x, weight, bias)
    if shape not in _trials and not is_recording(x.device.type):
        _trials[shape] = _STORE.outcome(_key(shape), x.device.type, lambda: _is_equal(shape, weight, ours))
    if not _trials.get(shape, False):
        return None
    count = len(x)
    if shape.rows != count:
        padded = x.new_empty(shape.rows, shape.length)  # nobody reads what the rows behind give
        padded[:count] = x
        x = padded
    return torch.nn.functional.linear(x, weight, bias)[:count]


def trials() -> dict[Shape, bool]:
    """What was tried so far, and whether torch's product was equal."""
    return dict(_trials)


def _is_plain(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 and x.shape[1] * x.element_size() % ALIGNMENT == 0


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Shape:
    settings = torch.backends.cuda.matmul
    is_bf16 = x.dtype == torch.bfloat16
    may_round = (
        settings.allow_bf16_reduced_precision_reduction if is_bf16 else settings.allow_fp16_reduced_precision_reduction
    )
    (columns, length), rows = weight.shape, len(x) + -len(x) % MULTIPLE
    return Shape(rows, columns, length, x.dtype, x.device, bool(may_round), bias is not None)


def _key(shape: Shape) -> str:
    """With the card's own name: a machine may have several kinds."""
    module = accelerator(shape.device.type)
    assert module is not None
    sizes = f"{shape.rows}x{shape.columns}x{shape.length}"
    rounds = "may round sums" if shape.may_round_sums else "keeps sums"
    added = ", with a bias" if shape.has_bias else ""
    return f"{sizes} {shape.dtype} {module.get_device_name(shape.device)} {rounds}{added}"


def _is_equal(shape: Shape, weight: Tensor, ours: Product) -> bool:
    """Where K is split, some 2 of 1000 results differ: one product of random rows tells. A bias of random numbers, too,
    whatever the weight's is: a library that rounds before it adds must be found out."""
    generator = torch.Generator(shape.device).manual_seed(0)
    x = torch.randn(shape.rows, shape.length, device=shape.device, generator=generator).to(shape.dtype)
    bias = None
    if shape.has_bias:
        bias = torch.randn(shape.columns, device=shape.device, generator=generator).to(shape.dtype)
    found = torch.nn.functional.linear(x, weight, bias)
    return bool(found.any()) and torch.equal(found, ours(x, weight, bias))
