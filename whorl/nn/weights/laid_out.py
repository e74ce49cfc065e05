"""Matrices rearranged for the operators that read packed weights, `ops.packed_linear` and `ops.packed_experts`.

A matrix that is laid out has the parameters codes, scales and, unless all zero points have the default value, zeros.
Its attribute `packing` says how. This is done once, when a matrix is loaded; products copy nothing. A
CPU has no kernels for it; there a matrix keeps its format's parameters.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl import ops
from whorl.device import HOST, unavailable
from whorl.nn.weight import Matrix
from whorl.ops.quantised.layout import LAYOUTS, MIDDLE, Pick, find, packed_int4, paired_int4, tiled_bytes, values
from whorl.ops.quantised.packed_torch_npu import weight_reason

NO_KERNELS = "there are no kernels for packed weights"


class Packing(NamedTuple):
    """Keywords of `ops.packed_linear`: rows and columns per scale (columns 0: all), and the layout of the codes."""

    rows: int
    columns: int
    layout: str


def is_tiled_on(device: torch.device) -> bool | None:
    """Return whether the device's kernels take codes in tiles, as Triton's do and torch_npu's do not.

    None: it has no kernels for packed weights.
    """
    if unavailable("triton", device.type) is None:
        return True
    return False if unavailable("torch_npu", device.type) is None else None


def packing_of(matrix: Matrix) -> Packing | None:
    """Return how a matrix is packed for kernels; None if it is not laid out for them."""
    return getattr(matrix, "packing", None)


def lay_out_bytes(matrix: Any, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, **block: int) -> str | None:
    """Rearrange a matrix of 8-bit codes for the device's kernels. Returns None, or the reason that they cannot read it.

    codes: int8 or fp8 [.., N, K] in plain order; scales and zeros: [.., ceil(N / rows), ceil(K / columns)]; block: rows
    and columns per scale, by default 1 row and all columns.
    """
    tiled = is_tiled_on(codes.device)
    if tiled is None:
        return NO_KERNELS
    packing = Packing(block.get("rows", 1), block.get("columns", 0), "bytes_tiled" if tiled else "bytes")
    if tiled:
        codes = _by_entry(codes, tiled_bytes, LAYOUTS["bytes_tiled"].width(codes.shape[-1]))
        _set_parameters(matrix, codes, scales, zeros, packing)
        return None
    if codes.dtype != torch.int8:
        return "torch_npu multiplies bf16 by int8 and int4, not by fp8"
    scales, reason = _scales_for_npu(matrix, scales, zeros, packing)
    if reason is None:
        _set_parameters(matrix, codes, scales, zeros, packing)
    return reason


def warn_unpacked(device: torch.device, kind: str, reason: str) -> None:
    """Warn, once per kind of weights and reason, that no kernel of the accelerator reads them packed."""
    if device.type not in (HOST, "meta"):
        warnings.warn(
            f"{kind}: {device.type} has no kernel that reads them packed ({reason}), so every product unpacks its "
            "matrix",
            RuntimeWarning,
            stacklevel=2,
        )


def narrow_for_npu(matrix: Any, scales: Tensor) -> Tensor:
    """Return scales in the model's dtype, which torch_npu's kernels need, if that loses nothing."""
    narrow = scales.to(matrix.dtype)
    return narrow if is_tiled_on(scales.device) is False and torch.equal(narrow.float(), scales.float()) else scales


def _scales_for_npu(matrix: Any, scales: Tensor, zeros: Tensor | None, packing: Packing) -> tuple[Tensor, str | None]:
    """Return scales as torch_npu's kernels read them without a copy, and the reason that they cannot read the matrix.

    The scales are in the model's dtype, [.., N, groups] as a view of memory in the order [.., groups, N].
    """
    scales = narrow_for_npu(matrix, scales)
    reason = weight_reason(matrix.shape, packing.layout, matrix.dtype, scales, zeros, packing.columns)
    if reason is not None and scales.dtype != matrix.dtype == torch.bfloat16:
        reason = f"its scales are {scales.dtype} and not exact in bfloat16; with dtype float16 they may be"
    return scales.mT.contiguous().mT, reason


def lay_out_int4(
    matrix: Any, words: Tensor, unpack: Callable[[Tensor], Tensor], scales: Tensor, zeros: Tensor | None, columns: int
) -> str | None:
    """Rearrange a matrix of 4-bit codes for the device's kernels. Returns None, or the reason that they cannot read it.

    words: as in packed.py; unpack: a function from the words of one matrix to its codes [N, K], 0 to 15; scales and
    zeros: [.., N, groups]; columns: per group, 0 for one group per row.
    """
    tiled = is_tiled_on(words.device)
    if tiled is None:
        return NO_KERNELS
    packing = Packing(1, columns, "int4_tiled" if tiled else "int4_paired")
    if tiled:
        packed_width = LAYOUTS["int4_tiled"].width(matrix.shape[-1])
        codes = _by_entry(words, lambda entry: packed_int4(unpack(entry)), packed_width)
        _set_parameters(matrix, codes, scales, zeros, packing)
        return None
    scales, reason = _scales_for_npu(matrix, scales, zeros, packing)
    if reason is None:
        codes = _paired(words, unpack, matrix.shape)
        _set_parameters(matrix, codes, scales, None if zeros is None else zeros.to(torch.int8) - MIDDLE, packing)
    return reason


def _paired(words: Tensor, unpack: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return the codes of a matrix, or of a stack one matrix at a time, in torch_npu's order."""
    if words.dim() == 2:
        return paired_int4(unpack(words))
    count, rows, columns = shape
    codes = torch.empty(count, columns, rows // 2, dtype=torch.uint8, device=words.device).mT
    for entry, target in zip(words, codes, strict=True):
        target.copy_(paired_int4(unpack(entry)))
    return codes


def _by_entry(x: Tensor, change: Callable[[Tensor], Tensor], packed_width: int) -> Tensor:
    """Apply `change` to one matrix of a stack at a time, in place where the width stays the same.

    This saves memory, since experts are most of a model's weights.
    """
    if x.dim() == 2:
        return change(x)
    changed = x if x.shape[-1] == packed_width else x.new_empty(*x.shape[:-1], packed_width)
    for i, entry in enumerate(x):
        changed[i].copy_(change(entry))
    return changed


def _set_parameters(matrix: Any, codes: Tensor, scales: Tensor, zeros: Tensor | None, packing: Packing) -> None:
    matrix.replace(codes=codes, scales=scales, **({} if zeros is None else {"zeros": zeros}))
    matrix.packing = packing


def _spread_rows(matrix: Any) -> None:
    """Repeat scales that several rows share, so that every row has its own; the values do not change."""
    rows = matrix.packing.rows
    if rows > 1:
        scales = matrix.scales.repeat_interleave(rows, -2)[..., : matrix.shape[-2], :].contiguous()
        matrix.replace(codes=matrix.codes.data, scales=scales)
        matrix.packing = matrix.packing._replace(rows=1)


def values_of(matrix: Any, pick: Pick) -> Tensor:
    """Do what `Quantised.values_of` does, for a matrix that is laid out."""
    rows, columns, name = matrix.packing
    scales, zeros, codes, layout = matrix.scales, getattr(matrix, "zeros", None), matrix.codes, find(name)
    scale_index: Any = pick
    if len(matrix.shape) == 2 and rows > 1:
        scale_index, rows = (torch.arange(matrix.shape[0], device=codes.device) // rows)[pick], 1
    zeros = None if zeros is None else zeros[scale_index]
    numbers = layout.picked(codes, pick, matrix.shape[-1])
    return values(numbers, scales[scale_index], zeros, matrix.dtype, block=(rows, columns), middle=layout.middle)


def linear(matrix: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias for a matrix that is laid out."""
    parameters = matrix.codes, matrix.scales, getattr(matrix, "zeros", None)
    return ops.packed_linear(x, *parameters, bias, **matrix.packing._asdict())  # type: ignore[no-any-return]


def experts(gate_up: Any, down: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Return the output of experts whose matrices are laid out, as `ops.experts` does."""
    # The operator takes one packing for both. gate_up has scales per row where a block would span gate and up.
    if gate_up.packing != down.packing:
        for matrix in (gate_up, down):
            _spread_rows(matrix)
    parameters = [getattr(matrix, name, None) for matrix in (gate_up, down) for name in ("codes", "scales", "zeros")]
    return ops.packed_experts(x, *parameters, weights, ids, **gate_up.packing._asdict())  # type: ignore[no-any-return]
