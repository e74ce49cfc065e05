"""The backends of the rotation: Triton on NVIDIA GPUs, torch_npu on Ascend."""

import torch
from torch import Tensor

from . import torch_npu as npu
from .contract import mrope, mrope_, mrope_backward, overwrite, rope, rope_, rope_backward
from .tables import merged_rows, read_write_orders, token_rows


def _triton_reason(q: Tensor, cos_sin: Tensor | None = None, **_: object) -> str | None:
    if cos_sin is not None and cos_sin.element_size() < 4:
        return f"reads fp32 tables, got {cos_sin.dtype}"
    return f"computes in fp32, got {q.dtype}" if q.dtype == torch.float64 else None


def _triton_in_place_reason(
    q: Tensor, k: Tensor | None, style: str, pairs_out: str, cos_sin: Tensor | None = None, **_: object
) -> str | None:
    if len(set(read_write_orders(style, pairs_out))) > 1:
        return "in place, writing another channel order would overwrite channels that other threads have yet to read"
    if q.stride(-1) != 1 or (k is not None and k.stride(-1) != 1):
        return "in place, the channels of a head must be adjacent in memory"
    return _triton_reason(q, cos_sin)


def _triton_backward_reason(dq: Tensor, cos_sin: Tensor | None = None, **_: object) -> str | None:
    return _triton_reason(dq, cos_sin)


for _op, _op_backward, _op_in_place in ((rope, rope_backward, rope_), (mrope, mrope_backward, mrope_)):
    _op.impl("triton", "triton:forward", accepts=_triton_reason)
    _op_backward.impl("triton", "triton:backward", accepts=_triton_backward_reason)
    _op_in_place.impl("triton", "triton:in_place", accepts=_triton_in_place_reason)


def _npu_reason(q: Tensor, k: Tensor | None, cos_sin: Tensor, **_: object) -> str | None:
    return npu.reason(q, k, cos_sin)


def _npu_backward_reason(dq: Tensor, dk: Tensor | None, cos_sin: Tensor, **_: object) -> str | None:
    return npu.reason(dq, dk, cos_sin)


@rope.impl("torch_npu", accepts=_npu_reason)
def _(q, k, cos_sin, positions, style, pairs_out, where, inverse):  # type: ignore[no-untyped-def]
    read, write = read_write_orders(style, pairs_out)
    if read == write and where == "leading" and not inverse:
        fused = npu.rope_directly(q, k, cos_sin, positions, style)
        if fused is not None:
            return fused
    return npu.rotate_both(q, k, token_rows(cos_sin, positions), read, write, where, inverse)


@rope_backward.impl("torch_npu", accepts=_npu_backward_reason)
def _(dq, dk, cos_sin, positions, style, pairs_out, where, inverse):  # type: ignore[no-untyped-def]
    orders = read_write_orders(style, pairs_out)[::-1]
    return npu.rotate_both(dq, dk, token_rows(cos_sin, positions), *orders, where, not inverse)


@mrope.impl("torch_npu", accepts=_npu_reason)
def _(q, k, cos_sin, positions, sections, layout, style, pairs_out, where, inverse):  # type: ignore[no-untyped-def]
    read, write = read_write_orders(style, pairs_out)
    if read == write and where == "leading" and not inverse:
        fused = npu.mrope_directly(q, k, cos_sin, positions, sections, layout, style)
        if fused is not None:
            return fused
    rows = merged_rows(cos_sin, positions, sections, layout)
    return npu.rotate_both(q, k, rows, read, write, where, inverse)


@mrope_backward.impl("torch_npu", accepts=_npu_backward_reason)
def _(dq, dk, cos_sin, positions, sections, layout, style, pairs_out, where, inverse):  # type: ignore[no-untyped-def]
    rows = merged_rows(cos_sin, positions, sections, layout)
    return npu.rotate_both(dq, dk, rows, *read_write_orders(style, pairs_out)[::-1], where, not inverse)


@rope_.impl("torch_npu", accepts=_npu_reason)
def _(q, k, cos_sin, positions, style, pairs_out, where, inverse):  # type: ignore[no-untyped-def]
    rotated = rope.impls["torch_npu"].function(q, k, cos_sin, positions, style, pairs_out, where, inverse)
    overwrite(q, k, rotated)


@mrope_.impl("torch_npu", accepts=_npu_reason)
def _(q, k, cos_sin, positions, sections, layout, style, pairs_out, where, inverse):  # type: ignore[no-untyped-def]
    options = (cos_sin, positions, sections, layout, style, pairs_out, where, inverse)
    overwrite(q, k, mrope.impls["torch_npu"].function(q, k, *options))
