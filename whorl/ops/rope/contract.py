"""Rotary embedding of queries and keys: one position per token (`rope`) or several position axes (`mrope`).

Tables are fp32 and of half width: a row is [cos of R/2 angles | sin of R/2 angles], R numbers for R channels. Tables
rounded to q's dtype are accepted too, since torch_npu's kernel needs them (`table_dtype`). The token dims come first;
`tokens_first` gives a view of the other orders in this form, without a copy.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .._op import Op, Values, narrow, operator, widen
from .checks import check_axes, check_rows, check_tensors
from .tables import Layout, Style, Where, merged_rows, read_write_orders, token_rows


def _check_rope(
    q: Tensor, k: Tensor | None, cos_sin: Tensor, positions: Tensor | None, name: str = "rope", **_: object
) -> None:
    check_tensors(name, q, k, cos_sin)
    check_rows(name, q, cos_sin, positions)


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
    """Return the first and the second channel of every pair of x [..., R], each [..., R/2]."""
    if style == "pairs":
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def _join(first: Tensor, second: Tensor, style: str) -> Tensor:
    """Undo `_split`."""
    return torch.stack((first, second), -1).flatten(-2) if style == "pairs" else torch.cat((first, second), -1)


def _rotate(x: Tensor, rows: Tensor, read: str, write: str, where: str, inverse: bool) -> Tensor:
    """Rotate R channels of every head of x [*tokens, H, D] by rows [*tokens, R]; return a new tensor like x.

    The channels are read in the order `read` and written in the order `write`, each "half" or "pairs".
    """
    rotary, dim = rows.shape[-1], x.shape[-1]
    start = 0 if where == "leading" else dim - rotary
    wide = widen(x if rotary == dim else x[..., start : start + rotary])
    cos, sin = narrow(rows, wide.dtype).unsqueeze(-2).chunk(2, -1)  # [*tokens, 1, R/2]
    sin = -sin if inverse else sin
    first, second = _split(wide, read)
    rotated = narrow(_join(first * cos - second * sin, second * cos + first * sin, write), x.dtype)
    return rotated if rotary == dim else torch.cat((x[..., :start], rotated, x[..., start + rotary :]), -1)


def rotate_both(q: Tensor, k: Tensor | None, *options: object) -> tuple[Tensor, Tensor | None]:
    """Apply `_rotate` with the same options to q and, unless it is None, to k."""
    return _rotate(q, *options), None if k is None else _rotate(k, *options)  # type: ignore[arg-type]


def rope_bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of q and k, read and written, of the positions, and of one table row per token.

    The rest of the table is not read.
    """
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
    """Rotate R of the D channels of every query and key head by the angles of its token.

    q: [*tokens, HQ, D], k: [*tokens, HK, D] or None, where *tokens is T or B, S; bf16, fp16 or fp32; any strides.
    cos_sin: [*tokens, R] in fp32 or q's dtype, or a table [P, R] together with positions: [*tokens] int32 or int64.
    Returns new, contiguous q and k (None where k is None).
    Each pair (a, b) becomes (a cos - b sin, b cos + a sin), in fp32, rounded once; `inverse` rotates back. Pair i of
    R/2 is (x[i], x[i + R/2]) in style `half` (GPT-NeoX) and (x[2i], x[2i+1]) in style `pairs` (GPT-J);
    `pairs_out="half"` writes channels that were read as pairs in half order (DeepSeek-V3); it has no effect in style
    `half`. `where` says which R channels rotate, the leading or the trailing ones; the others are copied.
    Differentiable in q and k. Raises ValueError when shapes or dtypes do not fit or, on the CPU, a position is outside
    the table; on other devices such a token is NaN.

        q, k = ops.rope(q, k, table, positions)
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
    """Gradients of `rope` with respect to q and k: the inverse rotation with read and write orders exchanged.

    dq, dk: the gradients of `rope`'s two outputs, shaped like them, dk None where there is no k; the other arguments
    are those of the forward. Returns the gradients of q and k, contiguous.
    """
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
    """`rope` with several positions per token: each pair of channels rotates by the position of its own axis.

    positions: [A, *tokens], A = 3 rows t, h, w (time, height, width) or 4; sections: A counts of pairs that sum to R/2;
    the other arguments and the outputs are those of `rope`. `layout` assigns the R/2 pairs to axes. `chunked`
    (Qwen2-VL): first the pairs of t, then of h, then of w. `interleaved` (Qwen3-VL, as in transformers): pairs 1, 4,
    ... below 3h follow h, pairs 2, 5, ... below 3w follow w, the others t, where h and w are their sections;
    torch_npu's published formula bounds w by 3h instead. `hwt` (Ernie-4.5-VL), with sections (h, w, t): pairs of h and
    w alternate, then t. Differentiable in q and k. Raises ValueError as `rope` does, and when sections do not fit.

        q, k = ops.mrope(q, k, table, positions, [24, 20, 20], layout="interleaved")
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
    """Gradients of `mrope` with respect to q and k; arguments and results are those of `rope_backward` and `mrope`."""
    read, write = read_write_orders(style, pairs_out)
    return rotate_both(dq, dk, merged_rows(cos_sin, positions, sections, layout), write, read, where, not inverse)


@rope.gradient(save=("cos_sin", "positions"))
def _(grads: tuple[Tensor | None, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor | None]:
    return _gradients(rope_backward, grads, args)


@mrope.gradient(save=("cos_sin", "positions"))
def _(grads: tuple[Tensor | None, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor | None]:
    return _gradients(mrope_backward, grads, args)


def _gradients(backward: Op, grads: tuple[Tensor | None, ...], args: Values) -> dict[str, Tensor | None]:
    """Call `backward` on the gradients of the two outputs; return the gradients of q and k by name.

    Either gradient may be None. Where only that of k exists, it is passed as dq, which `backward` requires.
    """
    dq, dk = grads
    options = {"positions": None} | {n: v for n, v in args.items() if n not in ("q", "k")}
    if dq is None:
        return {"k": None if dk is None else backward(dk, None, **options)[0]}
    dq, dk = backward(dq, dk, **options)
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
    """`rope` in place: q and k are overwritten, nothing is returned. Raises RuntimeError where a gradient is needed."""
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
    """`mrope` in place: q and k are overwritten, nothing is returned. RuntimeError where a gradient is needed."""
    options = {"layout": layout, "style": style, "pairs_out": pairs_out, "where": where, "inverse": inverse}
    overwrite(q, k, mrope.reference(q, k, cos_sin, positions, sections, **options))


def overwrite(q: Tensor, k: Tensor | None, rotated: tuple[Tensor, Tensor | None]) -> None:
    """Copy rotated heads into q and k."""
    q.copy_(rotated[0])
    if k is not None and rotated[1] is not None:
        k.copy_(rotated[1])
