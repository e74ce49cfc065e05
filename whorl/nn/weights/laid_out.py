"""Matrices laid out for the operators that read packed weights, `ops.packed_linear` and `ops.packed_experts`.

codes, scales and, where they are not in the middle, zeros are the parameters; `layout` says how they lie. A CPU has no
such kernels, and formats keep there what they read from a checkpoint.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl import ops
from whorl.device import HOST, unavailable
from whorl.nn.weight import Matrix
from whorl.ops.quantised.layout import packed_int4, tiled_bytes, values, width

Pick = slice | Tensor


class PackedLayout(NamedTuple):
    """As `ops.packed_linear` takes it: the rows and columns that have one scale, and whether codes are tiled."""

    rows: int
    columns: int
    tiled: bool


def is_tiled_on(device: torch.device) -> bool | None:
    """How kernels there want codes of 8 bits; None: there are none."""
    if unavailable("triton", device.type) is None:
        return True
    return False if unavailable("torch_npu", device.type) is None else None


def layout_of(matrix: Matrix) -> PackedLayout | None:
    """None: the matrix is held as its checkpoint has it."""
    return getattr(matrix, "layout", None)


def lay_out_bytes(matrix: Any, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, **block: int) -> bool:
    """codes: plain, int8 or fp8, [.., N, K]; block: rows and columns of a scale. Whether it was done."""
    tiled = is_tiled_on(codes.device)
    if tiled is None or (not tiled and codes.dtype != torch.int8):  # torch_npu multiplies no fp8 with bf16
        return False
    scales = as_wanted(matrix, scales)
    if tiled:
        codes = _by_entry(codes, tiled_bytes, width(codes.dtype, codes.shape[-1], tiled))
    _hold(matrix, codes, scales, zeros, PackedLayout(block.get("rows", 1), block.get("columns", 0), tiled))
    return True


def warn_unpacked(device: torch.device, what: str) -> None:
    """Said once for each kind of weights that no kernel of an accelerator reads."""
    if device.type not in (HOST, "meta"):
        warnings.warn(
            f"{what}: {device.type} has no kernel that reads them packed, so every product unpacks its matrix",
            RuntimeWarning,
            stacklevel=2,
        )


def as_wanted(matrix: Any, scales: Tensor) -> Tensor:
    """torch_npu wants scales in the dtype of tokens: in that where nothing is lost by it."""
    narrow = scales.to(matrix.dtype)
    return narrow if is_tiled_on(scales.device) is False and torch.equal(narrow.float(), scales.float()) else scales


def lay_out_int4(
    matrix: Any, words: Tensor, unpack: Callable[[Tensor], Tensor], scales: Tensor, zeros: Tensor | None, columns: int
) -> bool:
    """unpack: numbers from 0 to 15, [N, K], of one entry's words."""
    if not is_tiled_on(words.device):
        return False
    wide = width(torch.int32, matrix.shape[-1], True)
    codes = _by_entry(words, lambda entry: packed_int4(unpack(entry)), wide)
    _hold(matrix, codes, scales, zeros, PackedLayout(1, columns, False))
    return True


def _by_entry(x: Tensor, change: Callable[[Tensor], Tensor], wide: int) -> Tensor:
    """One at a time, and in its place where it fits: experts are most of a model."""
    if x.dim() == 2:
        return change(x)
    found = x if x.shape[-1] == wide else x.new_empty(*x.shape[:-1], wide)
    for i, entry in enumerate(x):
        found[i].copy_(change(entry))
    return found


def _hold(matrix: Any, codes: Tensor, scales: Tensor, zeros: Tensor | None, layout: PackedLayout) -> None:
    matrix.replace(codes=codes, scales=scales, **({} if zeros is None else {"zeros": zeros}))
    matrix.layout = layout


def _spread_rows(matrix: Any) -> None:
    """Scales for every row."""
    rows = matrix.layout.rows
    if rows > 1:
        scales = matrix.scales.repeat_interleave(rows, -2)[..., : matrix.shape[-2], :].contiguous()
        matrix.replace(codes=matrix.codes.data, scales=scales)
        matrix.layout = matrix.layout._replace(rows=1)


def values_of(matrix: Any, pick: Pick) -> Tensor:
    """As `Quantised.values_of`, of a matrix that is laid out."""
    rows, columns, tiled = matrix.layout
    scales, zeros, codes = matrix.scales, getattr(matrix, "zeros", None), matrix.codes
    at: Any = pick
    if len(matrix.shape) == 2 and rows > 1:
        at, rows = (torch.arange(matrix.shape[0], device=codes.device) // rows)[pick], 1
    kind = torch.int32 if codes.dtype == torch.int32 else torch.uint8  # not every device gathers fp8
    chosen = codes.view(kind)[pick].view(codes.dtype)
    zeros = None if zeros is None else zeros[at]
    return values(chosen, scales[at], zeros, matrix.shape[-1], matrix.dtype, block=(rows, columns), tiled=tiled)


def linear(matrix: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    held = matrix.codes, matrix.scales, getattr(matrix, "zeros", None)
    return ops.packed_linear(x, *held, bias, **matrix.layout._asdict())  # type: ignore[no-any-return]


def experts(gate_up: Any, down: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    if gate_up.layout != down.layout:  # where a block ends within gate, its scales are those of rows
        for each in (gate_up, down):
            _spread_rows(each)
    held = [getattr(each, name, None) for each in (gate_up, down) for name in ("codes", "scales", "zeros")]
    return ops.packed_experts(x, *held, weights, ids, **gate_up.layout._asdict())  # type: ignore[no-any-return]
