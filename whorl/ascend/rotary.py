"""The rotary operators: rotation by full-width cos and sin, and by a table that is looked up by position."""

import torch
from torch import Tensor

from whorl import contracts, ops

from .calling import Misfit, Values, needs_gradient, operator

_STYLES = {"half": "half", "interleave": "pairs"}  # rotary_mode -> the style of whorl.ops


def _lost_rotate(call: Values) -> str | None:
    if call["rotate"] is None or not needs_gradient(*(call[name] for name in ("input", "r1", "r2", "rotate"))):
        return None
    return "`rotate` has no backward pass on the NPU; leave it out, or use torch.no_grad()"


def _lost_table(call: Values) -> str | None:
    if needs_gradient(call["cos"]) == needs_gradient(call["sin"]):
        return None
    return "cos and sin get a gradient only when both require one, but only one does"


@operator(
    contracts.rotary_mul_limit,
    no_gradient=_lost_rotate,
    choices={"rotary_mode": tuple(_STYLES)},
    cos="r1",
    table_needs_grad=lambda call: needs_gradient(call["r1"], call["r2"]),
)
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Return input * r1 + rot(input) * r2, with r1 = cos and r2 = sin of full width, rounded to input's dtype first.

    input: 3 or 4 dims, [..., D]; r1, r2: the same number of dims, 1 or the same size in all but the last, which is D.
    rot() pairs channel i with i + D/2 (rotary_mode "half") or 2i with 2i + 1 ("interleave"); with `rotate` [D, D] it is
    input @ rotate. Differentiable in input, r1 and r2, but not with `rotate`. Raises RuntimeError when a gradient is
    needed with `rotate`, ValueError for shapes or modes that do not fit.

    Example: y = npu_rotary_mul(q, cos, sin)
    """
    _check_tables(input, r1, r2)
    if rotate is not None:
        return _rotate_by_matrix(input, r1, r2, rotate)
    return _rotate(input, r1, r2, _STYLES[rotary_mode])


@operator(
    contracts.mrope_limit,
    no_gradient="query key cos_sin_cache",
    choices={"rotary_mode": tuple(_STYLES), "cache_mode": ("default", "interleave")},
    rotary_dim=lambda call: call["cos_sin_cache"].shape[-1],
    table="cos_sin_cache",
    sections="mrope_section",
)
def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """Look up cos and sin by position and rotate the first R channels of every head; with sections, apply MRoPE.

    positions: [T], or [3, T] or [4, T] with mrope_section; query, key: [T, heads * head_size]; cos_sin_cache: [P, R] in
    query's dtype. rotary_mode says which channels pair up, cache_mode which axis a channel belongs to.
    cache_mode="interleave" follows the vendor's published formula, which ends the w axis at channel 3h;
    `ops.merge_mrope` follows transformers and ends it at 3w. Returns new query and key. Raises RuntimeError when a
    gradient is needed (torch_npu drops it silently), ValueError for shapes or modes that do not fit.

    Example: q, k = npu_mrope(positions, q, k, table, 128, mrope_section=[24, 20, 20], cache_mode="interleave")
    """
    q, k = _split_heads(query, head_size), _split_heads(key, head_size)
    table = _accumulation_table(cos_sin_cache, query)
    style = _STYLES[rotary_mode or "half"]
    if mrope_section is None or not any(mrope_section):
        q, k = ops.rope(q, k, table, positions, style=style)
    else:
        layout, sections = "chunked", tuple(mrope_section)
        if cache_mode == "interleave":
            layout, sections = "interleaved", contracts.vendor_sections(mrope_section)
        q, k = ops.rope(q, k, ops.merge_mrope(table, positions, sections, layout), style=style)
    return q.flatten(-2), k.flatten(-2)


@operator(
    contracts.interleave_rope_limit,
    no_gradient="x cos sin",
    table="cos",
    contiguous=lambda call: all(t.is_contiguous() for t in call.values()),
)
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs and write them in half order, as DeepSeek-V3 does.

    x: [B, N, S, 64]; cos, sin: [B, 1, S or 1, 64] in half order. Returns a tensor like x. Raises RuntimeError when a
    gradient is needed, which torch_npu does not have, and ValueError for shapes that do not fit.
    Example: q_rope = npu_interleave_rope(q_rope, cos, sin)
    """
    _check_tables(x, cos, sin)
    return _rotate(x, cos, sin, "pairs", out_style="half")


@operator(
    contracts.apply_rotary_pos_emb_limit,
    no_gradient="query key cos sin",
    choices={"rotary_mode": tuple(_STYLES), "layout": ("BSND", "SBND", "BNSD", "TND")},
    table="cos",
)
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Rotate query and key in place and return them: the same tensors, overwritten.

    query, key: [B, S, N, D], or [T, N, D] in layout TND; cos, sin: of full width, with N = 1. Raises RuntimeError when
    a gradient is needed, which torch_npu does not have, and ValueError for shapes, layouts or modes that do not fit.

    Example: npu_apply_rotary_pos_emb(q, k, cos, sin, layout="TND")
    """
    if query.dim() != len(layout):
        raise Misfit(f"layout is {layout!r}, query {list(query.shape)}, expected {len(layout)} dims")
    width = cos.shape[-1]
    for x in (query, key):
        _check_tables(x[..., :width], cos, sin)
    for x in (query, key):
        x[..., :width].copy_(_rotate(x[..., :width], cos, sin, _STYLES[rotary_mode]))
    return query, key


@operator(
    contracts.rotary_embedding_limit,
    no_gradient="query key cos_sin_cache",
    rotary_dim=lambda call: call["cos_sin_cache"].shape[-1],
)
def _npu_rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
) -> None:
    """Look up cos and sin by position and rotate query and key in place (ATB's operator).

    positions: [T]; query, key: [T, heads * head_size]; cos_sin_cache: [P, head_size]. On an NPU, ATB uses the table of
    the process's first call in every later call; off the NPU every call uses its own table. Raises RuntimeError when a
    gradient is needed, and ValueError for shapes that do not fit.
    """
    q, k = _split_heads(query, head_size), _split_heads(key, head_size)
    table = _accumulation_table(cos_sin_cache, query)
    ops.rope_(q, k, table, positions, style="half" if is_neox_style else "pairs")


@operator(
    contracts.rotary_position_embedding_limit,
    no_gradient=_lost_table,
    choices={"mode": {0: "half", 1: "interleave"}},
    table_needs_grad=lambda call: needs_gradient(call["cos"], call["sin"]),
)
def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """Rotate x as npu_rotary_mul does; this is MindSpeed's operator, where mode 0 is half and 1 is interleave.

    Differentiable in x, and in cos and sin where both need a gradient. Raises RuntimeError when only one of them needs
    one, because MindSpeed then computes none. Example: y = npu_rotary_position_embedding(q, cos, sin, 0)
    """
    _check_tables(x, cos, sin)
    return _rotate(x, cos, sin, ("half", "pairs")[mode])


def _split_heads(x: Tensor, head_size: int) -> Tensor:
    if x.dim() != 2 or head_size < 1 or x.shape[-1] % head_size:
        raise Misfit(f"query or key is {list(x.shape)}, expected [T, heads * head_size] with head_size {head_size}")
    return x.unflatten(-1, (x.shape[-1] // head_size, head_size))


def _accumulation_table(table: Tensor, x: Tensor) -> Tensor:
    """Round a table to x's dtype, as the device does, and return it in the accumulation dtype of `whorl.ops`."""
    return table.to(x.dtype).to(torch.promote_types(x.dtype, torch.float32))


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    fits = cos.dim() == x.dim() and all(c in (1, n) for c, n in zip(cos.shape[:-1], x.shape[:-1], strict=True))
    if x.dim() not in (3, 4) or cos.shape != sin.shape or cos.shape[-1] != x.shape[-1] or x.shape[-1] % 2 or not fits:
        raise Misfit(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} do not fit {list(x.shape)}; expected 3 or 4 "
            "dims, an even last dim of full width, and 1 or the same size in the other dims"
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str, out_style: str = "pairs") -> Tensor:
    """Return x * cos + rot(x) * sin with full-width tables, computed by `ops.rope`, whose tables are half width.

    The two halves of a full-width table may differ, so each half of the output is rotated by its own half.
    """
    if needs_gradient(cos, sin):
        return _rotate_by_formula(x, cos, sin, style)
    order = out_style if style == "pairs" else "half"
    heads = next((i for i in reversed(range(x.dim() - 1)) if cos.shape[i] == 1 and x.shape[i] != 1), None)
    if heads is None:  # cos has a row for every head, so each head counts as a token
        cos, sin = (t.expand(x.shape).reshape(-1, 1, x.shape[-1]) for t in (cos, sin))
        return _rotate_heads(x.reshape(-1, 1, x.shape[-1]), cos, sin, style, order).view(x.shape)
    x, cos, sin = (t.movedim(heads, -2) for t in (x, cos, sin))
    return _rotate_heads(x, cos, sin, style, order).movedim(-2, heads).contiguous()


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, style: str, order: str) -> Tensor:
    """Rotate [*tokens, heads, D] as `_rotate` does, with one row of cos and sin for each token."""
    rotations = []
    for c, s in zip(
        _halves(_accumulation_table(cos, x), order), _halves(_accumulation_table(sin, x), order), strict=True
    ):
        rows = torch.cat((c, s), -1).squeeze(-2).expand(*x.shape[:-2], -1).contiguous()
        rotations.append(ops.rope(x, None, rows, style=style, out_style=order)[0])
    return _join(_halves(rotations[0], order)[0], _halves(rotations[1], order)[1], order)


def _rotate_by_formula(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Rotate as `_rotate` does, with tables that need a gradient."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = _halves(wide, style)
    return (wide * _accumulation_table(cos, x) + _join(-second, first, style) * _accumulation_table(sin, x)).to(x.dtype)


def _rotate_by_matrix(x: Tensor, cos: Tensor, sin: Tensor, rotate: Tensor) -> Tensor:
    if rotate.shape != (x.shape[-1], x.shape[-1]):
        raise Misfit(f"rotate is {list(rotate.shape)}, expected [{x.shape[-1]}, {x.shape[-1]}]")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (
        wide * _accumulation_table(cos, x) + wide @ _accumulation_table(rotate, x) * _accumulation_table(sin, x)
    ).to(x.dtype)


def _halves(x: Tensor, order: str) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2  # the channels of a pair are neighbours ("pairs"), or one in each half ("half")
    return (x[..., ::2], x[..., 1::2]) if order == "pairs" else (x[..., :half], x[..., half:])


def _join(first: Tensor, second: Tensor, order: str) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2) if order == "pairs" else torch.cat((first, second), -1)
