"""Rotary embedding of queries and keys: one position per token (`rope`) or several axes of them (`mrope`).

Tables are fp32 and half width: row = [cos of R/2 angles | sin of R/2 angles]; rounded to q's dtype they are taken too,
which is what torch_npu's kernel wants (`table_dtype`). The token dims lead; `tokens_first` views the other orders that
way, without a copy.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from whorl.contracts import interleaved_range_reason
from whorl.device import BACKENDS

from .._op import Op, Values, narrow, operator, widen
from .._tracing import is_readable

Style = Literal["half", "pairs"]
Where = Literal["leading", "trailing"]
Layout = Literal["chunked", "interleaved", "hwt"]

_SWAPPED = {"thd": None, "bshd": None, "bhsd": (1, 2), "sbhd": (0, 1)}


def tokens_first(x: Tensor, order: str) -> Tensor:
    """A view of x with its token dims first: [T, H, D] or [B, S, H, D]. It is its own inverse."""
    if order not in _SWAPPED:
        raise ValueError(f"tokens_first: order is {order!r}, expected one of {', '.join(_SWAPPED)}")
    swapped = _SWAPPED[order]
    return x if swapped is None else x.transpose(*swapped)


def table_dtype(device: torch.device | str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a table for q of `dtype` on a device: fp32, but q's own 16 bits where the kernel knows no other.

    npu_mrope looks positions up itself in a table of q's dtype. A table that is kept in that dtype is rounded once; any
    other has its rows gathered and rounded in every layer.
    """
    is_rounded = torch.device(device).type == BACKENDS["torch_npu"].home and dtype in (torch.bfloat16, torch.float16)
    return dtype if is_rounded else torch.float32


def _mrope_slices(sections: Sequence[int], layout: str) -> list[tuple[int, slice]]:
    """Axes and the channels they turn; axis 0 turns the others."""
    if layout == "chunked":
        ends = list(itertools.accumulate(sections))
        return [(axis, slice(ends[axis - 1], ends[axis])) for axis in range(1, len(sections))]
    if layout == "interleaved":
        _, h, w = sections
        return [(1, slice(1, 3 * h, 3)), (2, slice(2, 3 * w, 3))]
    h, w, _ = sections  # hwt
    return [(1, slice(0, h + w, 2)), (2, slice(1, h + w, 2))]


def mrope_axes(sections: Sequence[int], layout: str) -> list[int]:
    """For each of the R/2 channels, the row of `positions` (0 t, 1 h, 2 w) that turns it."""
    axes = [0] * sum(sections)
    for axis, channels in _mrope_slices(sections, layout):
        axes[channels] = [axis] * len(axes[channels])
    return axes


def merge_mrope(cos_sin: Tensor, positions: Tensor, sections: Sequence[int], layout: str = "chunked") -> Tensor:
    """Rows for `rope`, each channel taken at its own axis' position: look them up once a step, share over layers.

    cos_sin: [P, R], positions: [A, *tokens] -> [*tokens, R].
    """
    check_sections("merge_mrope", cos_sin, positions, sections, layout)
    _check_range("merge_mrope", cos_sin, positions)
    return merged_rows(cos_sin, positions, sections, layout)


# ---- checks


def check_tensors(name: str, q: Tensor, k: Tensor | None, cos_sin: Tensor, prefix: str = "") -> None:
    """prefix: "d" for gradients, which are called dq and dk."""
    if q.dim() not in (3, 4):
        raise ValueError(f"{name}: {prefix}q is {list(q.shape)}, expected [T, HQ, D] or [B, S, HQ, D]")
    if not q.is_floating_point():
        raise ValueError(f"{name}: {prefix}q is {q.dtype}, expected a floating point dtype")
    if k is not None and (k.dtype != q.dtype or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]):
        raise ValueError(
            f"{name}: {prefix}k is {list(k.shape)} {k.dtype}, expected the tokens, head size and dtype of {prefix}q, "
            f"{list(q.shape)} {q.dtype}"
        )
    if cos_sin.dtype not in (torch.float32, torch.float64, q.dtype):
        raise ValueError(f"{name}: cos_sin is {cos_sin.dtype}, expected torch.float32, or q's dtype {q.dtype}")
    if cos_sin.requires_grad:
        raise ValueError(f"{name}: cos_sin requires a gradient, expected a constant table")
    rotary = cos_sin.shape[-1]
    if rotary % 2 or not 0 < rotary <= q.shape[-1]:
        raise ValueError(f"{name}: cos_sin has width {rotary}, expected an even rotary size of at most {q.shape[-1]}")


def check_positions(name: str, positions: Tensor, shape: Sequence[int], cos_sin: Tensor) -> None:
    if positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: positions is {positions.dtype}, expected torch.int32 or torch.int64")
    if list(positions.shape) != list(shape):
        raise ValueError(f"{name}: positions is {list(positions.shape)}, expected {list(shape)}")
    if cos_sin.dim() != 2:
        raise ValueError(f"{name}: cos_sin is {list(cos_sin.shape)}, expected a table [P, R] to look positions up in")
    _check_range(name, cos_sin, positions)


def _check_range(name: str, cos_sin: Tensor, positions: Tensor) -> None:
    """Where values can be read for free; kernels give NaN for a position outside the table."""
    if positions.numel() and is_readable(positions):
        low, high = (int(v) for v in positions.aminmax())
        if low < 0 or high >= cos_sin.shape[0]:
            wrong = low if low < 0 else high
            raise ValueError(f"{name}: position {wrong} is outside the table of {cos_sin.shape[0]} rows")


def check_axes(name: str, q: Tensor, cos_sin: Tensor, positions: Tensor, sections: Sequence[int], layout: str) -> None:
    """Several positions a token: [A, *tokens], one row for each section."""
    shape = [len(sections), *q.shape[:-2]]
    if positions.dim() == len(shape):
        check_sections(name, cos_sin, positions, sections, layout)
    check_positions(name, positions, shape, cos_sin)


def check_sections(name: str, cos_sin: Tensor, positions: Tensor, sections: Sequence[int], layout: str) -> None:
    half = cos_sin.shape[-1] // 2
    if len(sections) != positions.shape[0]:
        raise ValueError(
            f"{name}: positions has {positions.shape[0]} rows, sections {list(sections)} need {len(sections)}"
        )
    if len(sections) not in (3, 4) or min(sections) < 0:
        raise ValueError(f"{name}: sections is {list(sections)}, expected 3 or 4 counts of channels")
    if sum(sections) != half:
        raise ValueError(f"{name}: sections {list(sections)} sum to {sum(sections)}, the table has {half} channels")
    if layout != "chunked" and len(sections) != 3:
        raise ValueError(f"{name}: layout {layout!r} takes 3 sections, got {list(sections)}")
    if layout == "interleaved" and (why := interleaved_range_reason(sections)):
        raise ValueError(f"{name}: sections {list(sections)} cannot be interleaved: {why}")
    if layout == "hwt" and sections[0] != sections[1]:
        raise ValueError(f"{name}: sections {list(sections)}: h and w alternate in layout 'hwt' and must be equal")


def _check_rope(
    q: Tensor, k: Tensor | None, cos_sin: Tensor, positions: Tensor | None, name: str = "rope", **_: object
) -> None:
    check_tensors(name, q, k, cos_sin)
    check_rows(name, q, cos_sin, positions)


def check_rows(name: str, q: Tensor, cos_sin: Tensor, positions: Tensor | None) -> None:
    """One row for each token: looked up by position, or given."""
    if positions is not None:
        check_positions(name, positions, q.shape[:-2], cos_sin)
    elif cos_sin.shape[:-1] != q.shape[:-2]:
        raise ValueError(
            f"{name}: cos_sin is {list(cos_sin.shape)}, expected one row for each token, {[*q.shape[:-2], 'R']}, "
            "or positions to look up"
        )


def _check_mrope(
    q: Tensor,
    k: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    sections: Sequence[int],
    layout: str,
    name: str = "mrope",
    **_: object,
) -> None:
    check_tensors(name, q, k, cos_sin)
    check_axes(name, q, cos_sin, positions, sections, layout)


def _check_rope_backward(dq: Tensor, dk: Tensor | None, cos_sin: Tensor, positions: Tensor | None, **_: object) -> None:
    check_tensors("rope_backward", dq, dk, cos_sin, "d")
    check_rows("rope_backward", dq, cos_sin, positions)


def _check_mrope_backward(
    dq: Tensor,
    dk: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    sections: Sequence[int],
    layout: str,
    **_: object,
) -> None:
    check_tensors("mrope_backward", dq, dk, cos_sin, "d")
    check_axes("mrope_backward", dq, cos_sin, positions, sections, layout)


# ---- the rotation


def _split(x: Tensor, style: str) -> tuple[Tensor, Tensor]:
    if style == "pairs":
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def _join(first: Tensor, second: Tensor, style: str) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2) if style == "pairs" else torch.cat((first, second), -1)


def _rotate(x: Tensor, rows: Tensor, read: str, write: str, where: str, inverse: bool) -> Tensor:
    """Turn R channels of every head: read them in one order, write them in another. x: [*tokens, H, D]."""
    rotary, dim = rows.shape[-1], x.shape[-1]
    start = 0 if where == "leading" else dim - rotary
    wide = widen(x if rotary == dim else x[..., start : start + rotary])
    cos, sin = narrow(rows, wide.dtype).unsqueeze(-2).chunk(2, -1)  # [*tokens, 1, R/2]
    sin = -sin if inverse else sin
    first, second = _split(wide, read)
    turned = narrow(_join(first * cos - second * sin, second * cos + first * sin, write), x.dtype)
    return turned if rotary == dim else torch.cat((x[..., :start], turned, x[..., start + rotary :]), -1)


def read_write_orders(style: str, pairs_out: str) -> tuple[str, str]:
    """How channels are read and written."""
    return (style, pairs_out) if style == "pairs" else ("half", "half")


def rotate_both(q: Tensor, k: Tensor | None, *how: object) -> tuple[Tensor, Tensor | None]:
    return _rotate(q, *how), None if k is None else _rotate(k, *how)  # type: ignore[arg-type]


def token_rows(cos_sin: Tensor, positions: Tensor | None) -> Tensor:
    return cos_sin if positions is None else cos_sin[positions]


def merged_rows(cos_sin: Tensor, positions: Tensor, sections: Sequence[int], layout: str) -> Tensor:
    """cos_sin: [P, R], positions: [A, *tokens] -> [*tokens, R]."""
    rows = cos_sin[positions].unflatten(-1, (2, -1))  # [A, *tokens, cos and sin, R/2]
    merged = rows[0].clone()
    for axis, channels in _mrope_slices(sections, layout):
        merged[..., channels] = rows[axis][..., channels]
    return merged.flatten(-2)


def rope_bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """q and k read and written, one table row for each token; a larger table is not read."""
    heads = [t for n in ("q", "k", "dq", "dk") if (t := values.get(n)) is not None]
    tokens = heads[0].shape[:-2].numel()
    positions = values["positions"]
    rows = tokens * values["cos_sin"].shape[-1] * values["cos_sin"].element_size()
    index = 0 if positions is None else positions.numel() * positions.element_size()
    return 2 * sum(t.numel() * t.element_size() for t in heads) + rows + index


# ---- operators


@operator(check=_check_rope, absent={1: "k"}, bytes=rope_bytes)
def rope(
    q: Tensor,
    k: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor | None = None,
    *,
    style: Style = "half",
    pairs_out: Style = "pairs",
    where: Where = "leading",
    inverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Turn R of the D channels of every query and key head by its token's angles.

    q: [*tokens, HQ, D], k: [*tokens, HK, D] or None; *tokens is T or B, S; bf16, fp16 or fp32; any strides.
    cos_sin: fp32 or q's dtype, [*tokens, R], or a table [P, R] with positions: [*tokens] int32 or int64.
    (a, b) -> (a cos - b sin, b cos + a sin) in fp32, rounded once; `inverse` turns back. Channel i of R/2 is
    (x[i], x[i + R/2]) in style `half` (GPT-NeoX) and (x[2i], x[2i+1]) in style `pairs` (GPT-J); `pairs_out="half"`
    writes what was read as pairs in half order (DeepSeek-V3). `where` says which R channels: the first or the last;
    the others pass unchanged. Outputs are new and contiguous. Differentiable in q and k.
    """
    read, write = read_write_orders(style, pairs_out)
    return rotate_both(q, k, token_rows(cos_sin, positions), read, write, where, inverse)


@operator(check=_check_rope_backward, absent={1: "dk"}, bytes=rope_bytes)
def rope_backward(
    dq: Tensor,
    dk: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor | None = None,
    *,
    style: Style = "half",
    pairs_out: Style = "pairs",
    where: Where = "leading",
    inverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `rope` with its own arguments: the inverse rotation, read and write orders exchanged."""
    read, write = read_write_orders(style, pairs_out)
    return rotate_both(dq, dk, token_rows(cos_sin, positions), write, read, where, not inverse)


@operator(check=_check_mrope, absent={1: "k"}, bytes=rope_bytes)
def mrope(
    q: Tensor,
    k: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    sections: Sequence[int],
    *,
    layout: Layout = "chunked",
    style: Style = "half",
    pairs_out: Style = "pairs",
    where: Where = "leading",
    inverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`rope` with several positions a token: each channel turns by the angle of its own axis.

    positions: [A, *tokens], rows t, h, w (and a fourth); sections: A counts of channels, summing to R/2; the rest as
    `rope`. `layout` assigns axes to channels: `chunked` in bands t | h | w (Qwen2-VL); `interleaved` h at 1, 4, ...
    below 3h, w at 2, 5, ... below 3w, else t (Qwen3-VL, as transformers; torch_npu's published formula bounds w by
    3h); `hwt` with sections (h, w, t): h and w alternate, then t (Ernie-4.5-VL). Differentiable in q and k.
    """
    read, write = read_write_orders(style, pairs_out)
    return rotate_both(q, k, merged_rows(cos_sin, positions, sections, layout), read, write, where, inverse)


@operator(check=_check_mrope_backward, absent={1: "dk"}, bytes=rope_bytes)
def mrope_backward(
    dq: Tensor,
    dk: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    sections: Sequence[int],
    *,
    layout: Layout = "chunked",
    style: Style = "half",
    pairs_out: Style = "pairs",
    where: Where = "leading",
    inverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `mrope` with its own arguments."""
    read, write = read_write_orders(style, pairs_out)
    return rotate_both(dq, dk, merged_rows(cos_sin, positions, sections, layout), write, read, where, not inverse)


@rope.gradient(save=("cos_sin", "positions"))
def _(grads: tuple[Tensor | None, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor | None]:
    return _gradients(rope_backward, grads, args)


@mrope.gradient(save=("cos_sin", "positions"))
def _(grads: tuple[Tensor | None, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor | None]:
    return _gradients(mrope_backward, grads, args)


def _gradients(backward: Op, grads: tuple[Tensor | None, ...], args: Values) -> dict[str, Tensor | None]:
    """Either gradient may be missing: the one that is there goes first."""
    dq, dk = grads
    how = {"positions": None} | {n: v for n, v in args.items() if n not in ("q", "k")}
    if dq is None:
        return {"k": None if dk is None else backward(dk, None, **how)[0]}
    dq, dk = backward(dq, dk, **how)
    return {"q": dq, "k": dk}


@operator(check=functools.partial(_check_rope, name="rope_"), mutates=("q", "k"), bytes=rope_bytes)
def rope_(
    q: Tensor,
    k: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor | None = None,
    *,
    style: Style = "half",
    pairs_out: Style = "pairs",
    where: Where = "leading",
    inverse: bool = False,
) -> None:
    """`rope` in place: q and k are overwritten, nothing is returned; refused where a gradient is needed."""
    overwrite(
        q, k, rope.reference(q, k, cos_sin, positions, style=style, pairs_out=pairs_out, where=where, inverse=inverse)
    )


@operator(check=functools.partial(_check_mrope, name="mrope_"), mutates=("q", "k"), bytes=rope_bytes)
def mrope_(
    q: Tensor,
    k: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    sections: Sequence[int],
    *,
    layout: Layout = "chunked",
    style: Style = "half",
    pairs_out: Style = "pairs",
    where: Where = "leading",
    inverse: bool = False,
) -> None:
    """`mrope` in place: q and k are overwritten, nothing is returned; refused where a gradient is needed."""
    how = {"layout": layout, "style": style, "pairs_out": pairs_out, "where": where, "inverse": inverse}
    overwrite(q, k, mrope.reference(q, k, cos_sin, positions, sections, **how))


def overwrite(q: Tensor, k: Tensor | None, turned: tuple[Tensor, Tensor | None]) -> None:
    q.copy_(turned[0])
    if k is not None and turned[1] is not None:
        k.copy_(turned[1])
