"""Rotary embedding of queries and keys, in new tensors (`rope`) or in place (`rope_`).

Tables are fp32 and of half width: a row is [cos of R/2 angles | sin of R/2 angles], R numbers for R channels. Tables
rounded to q's dtype are accepted too, since torch_npu's kernel needs them (`table_dtype`). The token dims come first;
`tokens_first` gives a view of the other orders in this form, without a copy. Several position axes are merged into one
row per token before (`merge_mrope`).
"""

import functools
from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, narrow, operator, widen
from . import torch_npu as npu
from .tables import OutStyle, Style, Where, check_places, token_rows

_Q = Annotated[Tensor, "[..., HQ, D] float"]
_K = Annotated[Tensor | None, "[..., HK, D] q"]
_TABLE = Annotated[Tensor, "[*P, 2*H>0] fp32 or q, constant"]
_POSITIONS = Annotated[Tensor | None, "[...] int"]


def check_rotation(name: str, q: Tensor, cos_sin: Tensor, positions: Tensor | None, **_: object) -> None:
    """Raise ValueError unless the table is no wider than a head and has a row for each token, [T] or [B, S].

    Where positions are not `is_readable`, kernels return NaN for a token whose position is outside the table.
    """
    if q.dim() not in (3, 4):
        raise ValueError(f"{name}: q is {list(q.shape)}, expected [T, HQ, D] or [B, S, HQ, D]")
    if cos_sin.shape[-1] > q.shape[-1]:
        raise ValueError(
            f"{name}: cos_sin has width {cos_sin.shape[-1]}, expected an even rotary size of at most {q.shape[-1]}"
        )
    if positions is None and cos_sin.shape[:-1] != q.shape[:-2]:
        raise ValueError(
            f"{name}: cos_sin is {list(cos_sin.shape)}, expected one row for each token, {[*q.shape[:-2], 'R']}, "
            "or positions to look up"
        )
    if positions is not None:
        check_places(name, cos_sin, positions)


# ---- the rotation


def _split(x: Tensor, style: str) -> tuple[Tensor, Tensor]:
    """Return the first and the second channel of every pair of x [..., R], each [..., R/2]."""
    if style == "pairs":
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def _join(first: Tensor, second: Tensor, style: str) -> Tensor:
    """Undo `_split`."""
    return torch.stack((first, second), -1).flatten(-2) if style == "pairs" else torch.cat((first, second), -1)


def _rotate(x: Tensor, rows: Tensor, style: str, out_style: str, where: str, inverse: bool) -> Tensor:
    """Rotate R channels of every head of x [*tokens, H, D] by rows [*tokens, R]; return a new tensor like x."""
    rotary, dim = rows.shape[-1], x.shape[-1]
    start = 0 if where == "leading" else dim - rotary
    wide = widen(x if rotary == dim else x[..., start : start + rotary])
    cos, sin = narrow(rows, wide.dtype).unsqueeze(-2).chunk(2, -1)  # [*tokens, 1, R/2]
    sin = -sin if inverse else sin
    first, second = _split(wide, style)
    rotated = narrow(_join(first * cos - second * sin, second * cos + first * sin, out_style), x.dtype)
    return rotated if rotary == dim else torch.cat((x[..., :start], rotated, x[..., start + rotary :]), -1)


def _bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of q and k, read and written, of the positions, and of one table row per token.

    The rest of the table is not read.
    """
    q, k, table, positions = (values[n] for n in ("q", "k", "cos_sin", "positions"))
    heads = q.numel() + (0 if k is None else k.numel())
    rows = q.shape[:-2].numel() * table.shape[-1] * table.element_size()
    return 2 * heads * q.element_size() + rows + (0 if positions is None else positions.nbytes)


# ---- operators


@operator(check=functools.partial(check_rotation, "rope"), absent={1: "k"}, bytes=_bytes)
def rope(
    q: _Q,
    k: _K,
    cos_sin: _TABLE,
    positions: _POSITIONS = None,
    *,
    style: Style = "half",
    out_style: OutStyle = None,
    where: Where = "leading",
    inverse: bool = False,
) -> tuple[Annotated[Tensor, "[..., HQ, D] q"], _K]:
    """Rotate R of the D channels of every query and key head by the angles of its token.

    q, k: any strides, with one or two token dims, T or B, S. cos_sin: one row for each token, [*tokens, R], or a table
    [P, R] together with positions. Returns new, contiguous q and k (None where k is None).
    Each pair (a, b) becomes (a cos - b sin, b cos + a sin), in fp32, rounded once; `inverse` rotates back. Pair i of
    R/2 is (x[i], x[i + R/2]) in style `half` (GPT-NeoX) and (x[2i], x[2i+1]) in style `pairs` (GPT-J). Channels are
    read in `style` and written in `out_style`, None: in the same; DeepSeek-V3 reads pairs and writes half order.
    `where` says which R channels rotate, the leading or the trailing ones; the others are copied. Differentiable in q
    and k: the gradient is the inverse rotation with the two styles exchanged. On the CPU a position outside the table
    raises ValueError; on other devices such a token is NaN.

        q, k = ops.rope(q, k, table, positions)
    """
    options = (token_rows(cos_sin, positions), style, out_style or style, where, inverse)
    return _rotate(q, *options), None if k is None else _rotate(k, *options)


@rope.gradient(save=("cos_sin", "positions"))
def _(grads: tuple[Tensor | None, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor | None]:
    """Either gradient may be None. Where only that of k exists, it takes the place of q, which `rope` requires."""
    dq, dk = grads
    orders = {"style": args["out_style"] or args["style"], "out_style": args["style"], "inverse": not args["inverse"]}
    options = {"positions": None} | {n: v for n, v in args.items() if n not in ("q", "k")} | orders
    if dq is None:
        return {"k": None if dk is None else rope(dk, None, **options)[0]}
    dq, dk = rope(dq, dk, **options)
    return {"q": dq, "k": dk}


@operator(check=functools.partial(check_rotation, "rope_"), mutates=("q", "k"), bytes=_bytes)
def rope_(
    q: _Q,
    k: _K,
    cos_sin: _TABLE,
    positions: _POSITIONS = None,
    *,
    style: Style = "half",
    out_style: OutStyle = None,
    where: Where = "leading",
    inverse: bool = False,
) -> None:
    """`rope` in place: q and k are overwritten, nothing is returned. Raises RuntimeError where a gradient is needed."""
    options = {"style": style, "out_style": out_style, "where": where, "inverse": inverse}
    _overwrite(q, k, rope.reference(q, k, cos_sin, positions, **options))


def _overwrite(q: Tensor, k: Tensor | None, rotated: tuple[Tensor, Tensor | None]) -> None:
    """Copy rotated heads into q and k."""
    q.copy_(rotated[0])
    if k is not None and rotated[1] is not None:
        k.copy_(rotated[1])


# ---- backends


def triton_reason(cos_sin: Tensor, **_: object) -> str | None:
    """Return None, or the reason that Triton kernels do not read this table."""
    return f"reads fp32 tables, got {cos_sin.dtype}" if cos_sin.element_size() < 4 else None


def _in_place_reason(
    q: Tensor, k: Tensor | None, cos_sin: Tensor, style: str, out_style: str | None, **_: object
) -> str | None:
    if out_style not in (None, style):
        return "in place, writing another channel order would overwrite channels that other threads have yet to read"
    if q.stride(-1) != 1 or (k is not None and k.stride(-1) != 1):
        return "in place, the channels of a head must be adjacent in memory"
    return triton_reason(cos_sin)


rope.impl("cpp", "whorl.ops.cpu.rotation:rope")
rope_.impl("cpp", "whorl.ops.cpu.rotation:rope_")
rope.impl("triton", "triton:forward", accepts=triton_reason)
rope_.impl("triton", "triton:in_place", accepts=_in_place_reason)


@rope.impl("torch_npu", accepts=npu.reason)
def _(q, k, cos_sin, positions, style, out_style, where, inverse):  # type: ignore[no-untyped-def]
    out_style = out_style or style
    if style == out_style and where == "leading" and not inverse:
        fused = npu.rope_directly(q, k, cos_sin, positions, style)
        if fused is not None:
            return fused
    return npu.rotate_both(q, k, token_rows(cos_sin, positions), style, out_style, where, inverse)


@rope_.impl("torch_npu", accepts=npu.reason)
def _(q, k, cos_sin, positions, style, out_style, where, inverse):  # type: ignore[no-untyped-def]
    rotated = rope.impls["torch_npu"].function(q, k, cos_sin, positions, style, out_style, where, inverse)
    _overwrite(q, k, rotated)


# ---- cases


_CASES: list[Values] = [
    {"tokens": (1,), "heads": 1, "kv_heads": 1, "dim": 2},
    {"tokens": (17,), "heads": 5, "kv_heads": 3, "dim": 128, "scale": 0.01},
    {"tokens": (3, 5), "heads": 4, "kv_heads": 2, "dim": 64, "order": "bhsd"},
    {"tokens": (7,), "heads": 3, "kv_heads": 1, "dim": 96, "rotary": 48},
    {"tokens": (9,), "heads": 2, "kv_heads": 2, "dim": 80, "rotary": 24, "style": "pairs", "where": "trailing"},
    {"tokens": (5,), "heads": 4, "kv_heads": 1, "dim": 64, "style": "pairs", "out_style": "half"},
    {"tokens": (6,), "heads": 4, "kv_heads": None, "dim": 192, "rotary": 192, "inverse": True},
    {"tokens": (0,), "heads": 4, "kv_heads": 2, "dim": 64},
    {"tokens": (33,), "heads": 4, "kv_heads": 2, "dim": 64, "sliced": True, "index": torch.int32},
    {"tokens": (11,), "heads": 2, "kv_heads": 1, "dim": 64, "looked_up": True},
]
# No kernel writes it in place.
_EXCHANGED = {"tokens": (6,), "heads": 4, "kv_heads": 1, "dim": 96, "rotary": 48, "out_style": "pairs", "inverse": True}
_BENCH: list[Values] = [
    {"tokens": (tokens,), "heads": heads, "kv_heads": 4, "dim": 128}
    for tokens, heads in ((16384, 32), (16384, 64), (1, 32), (64, 64))
]


def make_tables(
    draw: Draw,
    tokens: tuple[int, ...],
    dim: int,
    rotary: int = 0,
    looked_up: bool = False,
    index: torch.dtype = torch.int64,
) -> Values:
    """Make a table and positions; index: their dtype; looked_up: cos_sin has one row per token, positions is None."""
    device, rows, rotary = draw.device, max(64, torch.Size(tokens).numel()), rotary or dim
    inv_freq = 1e4 ** (-torch.arange(0, rotary, 2, device=device, dtype=torch.float64) / rotary)
    angles = torch.outer(torch.arange(rows, device=device, dtype=torch.float64), inv_freq)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(torch.float32).to(draw.wide)
    positions = torch.randint(0, rows, tokens, device=device, dtype=index)
    return {"cos_sin": table[positions] if looked_up else table, "positions": None if looked_up else positions}


def _heads(draw: Draw, tokens: tuple[int, ...], heads: int, dim: int, order: str) -> Tensor:
    """Random heads in one of the dimension orders that models use."""
    if draw.sliced:  # a slice of a packed projection: the stride between tokens is larger than a token
        return (draw.scale * torch.randn(*tokens, heads + 3, dim, **draw.kind))[..., 1 : heads + 1, :]
    if order == "bhsd":
        return draw.scaled(tokens[0], heads, tokens[1], dim).transpose(1, 2)
    return draw.scaled(*tokens, heads, dim)


def _make(
    draw: Draw,
    tokens: tuple[int, ...],
    heads: int,
    kv_heads: int | None,
    dim: int,
    order: str = "thd",
    rotary: int = 0,
    looked_up: bool = False,
    index: torch.dtype = torch.int64,
) -> Values:
    q = _heads(draw, tokens, heads, dim, order)
    k = None if kv_heads is None else _heads(draw, tokens, kv_heads, dim, order)
    return {"q": q, "k": k, **make_tables(draw, tokens, dim, rotary, looked_up, index)}


rope.inputs(cases=[*_CASES, _EXCHANGED], bench=[*_BENCH, *(case | {"inverse": True} for case in _BENCH)])(_make)
rope_.inputs(cases=_CASES, bench=_BENCH)(_make)
