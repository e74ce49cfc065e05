"""torch's own matrix product for many rows, wherever a trial has shown that its bits are equal to our kernels'.

A library (cuBLAS) picks its kernel by shape, and some of its kernels split K, which changes the order of sums. Each
shape (rows, N, K) is therefore tried once, when it first occurs, and the outcome is stored on disk for the next start.
Row counts are padded to a multiple of MULTIPLE, so that few different shapes occur. Shapes whose bits are not equal run
in our kernel, and so do shapes that first occur while a graph is recorded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.device import accelerator, is_recording

from ._trial_store import TrialStore

MULTIPLE = 128  # row counts are padded to a multiple of this
ALIGNMENT = 16  # bytes; with less alignment a library chooses other kernels


class Shape(NamedTuple):
    """The shape of a product, and everything else that the library chooses its kernel by."""

    rows: int  # of x, padded
    columns: int  # N, rows of the weight
    length: int  # K
    dtype: torch.dtype
    device: torch.device
    may_round_sums: bool  # torch.backends.cuda.matmul.allow_*_reduced_precision_reduction
    has_bias: bool


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight and bias to x @ weight.T + bias
_trials: dict[Shape, bool] = {}  # whether the bits of torch's product are equal to ours
_STORE = TrialStore("linear_library", __file__, str(Path(__file__).with_name("linear_triton.py")))


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, ours: Product) -> Tensor | None:
    """Return x @ weight.T + bias by torch, or None where its bits are not known to be equal to those of `ours`.

    x: [T, K], weight: [N, K], bias: [N] or None. ours: our kernel, which the trial compares torch's product with.
    """
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
        padded = x.new_empty(shape.rows, shape.length)  # the results of the padding rows are dropped
        padded[:count] = x
        x = padded
    return torch.nn.functional.linear(x, weight, bias)[:count]


def trials() -> dict[Shape, bool]:
    """Return the shapes used so far in this process, and whether the bits of torch's product were equal."""
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
    """Return the key of a shape in the store, with the name of the GPU, since a machine may have several kinds."""
    module = accelerator(shape.device.type)
    assert module is not None
    sizes = f"{shape.rows}x{shape.columns}x{shape.length}"
    rounds = "may round sums" if shape.may_round_sums else "keeps sums"
    added = ", with a bias" if shape.has_bias else ""
    return f"{sizes} {shape.dtype} {module.get_device_name(shape.device)} {rounds}{added}"


def _is_equal(shape: Shape, weight: Tensor, ours: Product) -> bool:
    """Return whether torch's product of random rows with this weight has the bits of `ours`.

    One product is enough: where a library splits K, about 2 of 1000 results differ. The bias is random too, whatever
    the layer's is, so that a library that rounds before it adds the bias is detected.
    """
    generator = torch.Generator(shape.device).manual_seed(0)
    x = torch.randn(shape.rows, shape.length, device=shape.device, generator=generator).to(shape.dtype)
    bias = None
    if shape.has_bias:
        bias = torch.randn(shape.columns, device=shape.device, generator=generator).to(shape.dtype)
    actual = torch.nn.functional.linear(x, weight, bias)
    return bool(actual.any()) and torch.equal(actual, ours(x, weight, bias))
