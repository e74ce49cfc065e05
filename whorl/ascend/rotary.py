"""The rotary operators."""

from typing import Any

import torch
from torch import Tensor

from whorl import contracts, ops
from whorl.ops._torch_npu import dtype_name

from .calling import call_torch_npu, is_npu, needs_gradient, refuse, refuse_gradient

_STYLES = {"half": "half", "interleave": "pairs"}  # rotary_mode -> the style of whorl.ops


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """input * r1 + rot(input) * r2, with r1 = cos and r2 = sin of full width, rounded to input's dtype first.

    rot() pairs channel i with i + D/2 (`half`) or 2i with 2i + 1 (`interleave`); with `rotate` it is input @ rotate.
    Differentiable in input, r1 and r2, but not with `rotate`.
    """
    name = "npu_rotary_mul"
    if rotate is not None and needs_gradient(input, r1, r2, rotate):
        raise RuntimeError(f"{name}: `rotate` has no backward pass on the NPU; leave it out, or use torch.no_grad()")
    if is_npu(input):
        return call_torch_npu(name, input, r1, r2, rotary_mode=rotary_mode, rotate=rotate)
    needs_grad = needs_gradient(r1, r2)
    refuse(name, contracts.rotary_mul_limit(**_sizes(input, r1), rotary_mode=rotary_mode, table_needs_grad=needs_grad))
    _check_tables(name, input, r1, r2)
    style = _style(name, rotary_mode)
    return _turn(input, r1, r2, style) if rotate is None else _turn_by_matrix(input, r1, r2, rotate)


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
    """Look cos and sin up by position and turn the first R channels of every head; with sections, MRoPE.

    positions: [T], or [3, T] or [4, T] with sections; query, key: [T, heads * head_size]; cos_sin_cache: [P, R] in
    query's dtype. cache_mode='interleave' follows the vendor's published formula, which ends w at 3h; `ops.mrope`
    follows transformers and ends it at 3w. No gradient: torch_npu drops it silently, this raises.
    """
    name = "npu_mrope"
    rotary_mode, cache_mode = rotary_mode or "half", cache_mode or "default"
    refuse_gradient(name, query, key, cos_sin_cache)
    if is_npu(query):
        return call_torch_npu(
            name,
            positions,
            query,
            key,
            cos_sin_cache,
            head_size,
            mrope_section=mrope_section,
            rotary_mode=rotary_mode,
            cache_mode=cache_mode,
        )
    limit = contracts.mrope_limit(
        **_lookup_sizes(positions, query, key, head_size, cos_sin_cache),
        table_dtype=dtype_name(cos_sin_cache),
        sections=mrope_section,
        rotary_mode=rotary_mode,
        cache_mode=cache_mode,
    )
    refuse(name, limit)
    style = _style(name, rotary_mode)
    if cache_mode not in ("default", "interleave"):
        raise ValueError(f"{name}: cache_mode is {cache_mode!r}, expected 'default' or 'interleave'")
    q, k, table = _heads(name, query, head_size), _heads(name, key, head_size), _wide(cos_sin_cache, query)
    if mrope_section is None or not any(mrope_section):
        q, k = ops.rope(q, k, table, positions, style=style)
    elif cache_mode == "default":
        q, k = ops.mrope(q, k, table, positions, mrope_section, style=style)
    else:
        sections = contracts.vendor_sections(mrope_section)
        q, k = ops.mrope(q, k, table, positions, sections, layout="interleaved", style=style)
    return q.flatten(-2), k.flatten(-2)


def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Read adjacent pairs, turn them, write half order (DeepSeek-V3). No gradient, as in torch_npu.

    x: [B, N, S, 64]; cos, sin: [B, 1, S or 1, 64] in half order.
    """
    name = "npu_interleave_rope"
    refuse_gradient(name, x, cos, sin)
    if is_npu(x):
        return call_torch_npu(name, x, cos, sin)
    contiguous = all(t.is_contiguous() for t in (x, cos, sin))
    refuse(name, contracts.interleave_rope_limit(**_sizes(x, cos), table_dtype=dtype_name(cos), contiguous=contiguous))
    _check_tables(name, x, cos, sin)
    return _turn(x, cos, sin, "pairs", pairs_out="half")


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Turn query and key in place and return them: the same tensors, overwritten. No gradient, as in torch_npu.

    query, key: [B, S, N, D] or, layout TND, [T, N, D]; cos, sin: full width, N = 1.
    """
    name = "npu_apply_rotary_pos_emb"
    refuse_gradient(name, query, key, cos, sin)
    if is_npu(query):
        return call_torch_npu(name, query, key, cos, sin, layout=layout, rotary_mode=rotary_mode)
    refuse(
        name,
        contracts.apply_rotary_pos_emb_limit(
            query_shape=query.shape,
            key_shape=key.shape,
            cos_shape=cos.shape,
            dtype=dtype_name(query),
            table_dtype=dtype_name(cos),
            layout=layout,
            rotary_mode=rotary_mode,
        ),
    )
    style = _style(name, rotary_mode)
    if layout not in ("BSND", "SBND", "BNSD", "TND") or query.dim() != len(layout):
        raise ValueError(f"{name}: layout is {layout!r}, query {list(query.shape)}; expected BSND, SBND, BNSD or TND")
    width = cos.shape[-1]
    _check_tables(name, query[..., :width], cos, sin)
    _check_tables(name, key[..., :width], cos, sin)
    for x in (query, key):
        x[..., :width].copy_(_turn(x[..., :width], cos, sin, style))
    return query, key


def _npu_rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
) -> None:
    """Turn query and key in place, cos and sin looked up by position (ATB). No gradient.

    positions: [T]; query, key: [T, heads * head_size]; cos_sin_cache: [P, head_size]. ATB keeps the table of the
    first call for the life of the process; off the NPU every call uses the table it is given.
    """
    name = "_npu_rotary_embedding"
    refuse_gradient(name, query, key, cos_sin_cache)
    if is_npu(query):
        call_torch_npu(name, positions, query, key, head_size, cos_sin_cache, is_neox_style)
        return
    sizes = _lookup_sizes(positions, query, key, head_size, cos_sin_cache)
    refuse(name, contracts.rotary_embedding_limit(**sizes))
    q, k, table = _heads(name, query, head_size), _heads(name, key, head_size), _wide(cos_sin_cache, query)
    ops.rope_(q, k, table, positions, style="half" if is_neox_style else "pairs")


def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """MindSpeed's name for npu_rotary_mul: mode 0 is half, 1 is interleave.

    Differentiable in x, and in cos and sin where both need a gradient; MindSpeed gives one of them alone none.
    """
    name = "npu_rotary_position_embedding"
    if needs_gradient(cos) != needs_gradient(sin):
        raise RuntimeError(f"{name}: cos and sin get a gradient only when both require one; one of them does")
    if is_npu(x):
        from mindspeed.ops import npu_rotary_position_embedding as extension

        return extension.npu_rotary_position_embedding(x, cos, sin, mode)
    needs_grad = needs_gradient(cos, sin)
    refuse(name, contracts.rotary_position_embedding_limit(**_sizes(x, cos), mode=mode, table_needs_grad=needs_grad))
    if mode not in (0, 1):
        raise ValueError(f"{name}: mode is {mode!r}, expected 0 (half) or 1 (interleave)")
    _check_tables(name, x, cos, sin)
    return _turn(x, cos, sin, ("half", "pairs")[mode])


def _sizes(x: Tensor, cos: Tensor) -> dict[str, Any]:
    """What the limits of a rotation by cos and sin ask for."""
    return {"shape": x.shape, "cos_shape": cos.shape, "dtype": dtype_name(x)}


def _lookup_sizes(positions: Tensor, query: Tensor, key: Tensor, head_size: int, table: Tensor) -> dict[str, Any]:
    """What the limits of a rotation by rows of a table ask for."""
    shapes = {"query_shape": query.shape, "key_shape": key.shape, "positions_shape": positions.shape}
    return {**shapes, "rotary_dim": table.shape[-1], "head_size": head_size, "dtype": dtype_name(query)}


def _style(name: str, rotary_mode: str) -> str:
    if rotary_mode not in _STYLES:
        raise ValueError(f"{name}: rotary_mode is {rotary_mode!r}, expected one of {', '.join(_STYLES)}")
    return _STYLES[rotary_mode]


def _heads(name: str, x: Tensor, head_size: int) -> Tensor:
    if x.dim() != 2 or head_size < 1 or x.shape[-1] % head_size:
        raise ValueError(f"{name}: got {list(x.shape)}, expected [T, heads * head_size] with head_size {head_size}")
    return x.unflatten(-1, (x.shape[-1] // head_size, head_size))


def _wide(table: Tensor, x: Tensor) -> Tensor:
    """A table as the device sees it, rounded to x's dtype, in the dtype that `whorl.ops` computes in."""
    return table.to(x.dtype).to(torch.promote_types(x.dtype, torch.float32))


def _check_tables(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    fits = cos.dim() == x.dim() and all(c in (1, n) for c, n in zip(cos.shape[:-1], x.shape[:-1], strict=True))
    if x.dim() not in (3, 4) or cos.shape != sin.shape or cos.shape[-1] != x.shape[-1] or x.shape[-1] % 2 or not fits:
        raise ValueError(
            f"{name}: cos {list(cos.shape)} and sin {list(sin.shape)} do not fit {list(x.shape)}: expected 3 or 4 "
            "dims, an even last dim of full width, and 1 or the same size in the others"
        )


def _turn(x: Tensor, cos: Tensor, sin: Tensor, style: str, pairs_out: str = "pairs") -> Tensor:
    """x * cos + rot(x) * sin with full-width tables, by `ops.rope`, whose tables are half width.

    The two halves of a full-width table may differ: each half of the output has its own rotation.
    """
    if needs_gradient(cos, sin):
        return _turn_by_formula(x, cos, sin, style)
    order = pairs_out if style == "pairs" else "half"
    heads = next((i for i in reversed(range(x.dim() - 1)) if cos.shape[i] == 1 and x.shape[i] != 1), None)
    if heads is None:  # a row for every head: heads are tokens
        cos, sin = (t.expand(x.shape).reshape(-1, 1, x.shape[-1]) for t in (cos, sin))
        return _turn_heads(x.reshape(-1, 1, x.shape[-1]), cos, sin, style, order).view(x.shape)
    x, cos, sin = (t.movedim(heads, -2) for t in (x, cos, sin))
    return _turn_heads(x, cos, sin, style, order).movedim(-2, heads).contiguous()


def _turn_heads(x: Tensor, cos: Tensor, sin: Tensor, style: str, order: str) -> Tensor:
    """`_turn` of [*tokens, heads, D] with one row of cos and sin for each token."""
    turned = []
    for c, s in zip(_halves(_wide(cos, x), order), _halves(_wide(sin, x), order), strict=True):
        rows = torch.cat((c, s), -1).squeeze(-2).expand(*x.shape[:-2], -1).contiguous()
        turned.append(ops.rope(x, None, rows, style=style, pairs_out=order)[0])
    return _join(_halves(turned[0], order)[0], _halves(turned[1], order)[1], order)


def _turn_by_formula(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """`_turn` for tables that need a gradient."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = _halves(wide, style)
    return (wide * _wide(cos, x) + _join(-second, first, style) * _wide(sin, x)).to(x.dtype)


def _turn_by_matrix(x: Tensor, cos: Tensor, sin: Tensor, rotate: Tensor) -> Tensor:
    if rotate.shape != (x.shape[-1], x.shape[-1]):
        raise ValueError(f"npu_rotary_mul: rotate is {list(rotate.shape)}, expected [{x.shape[-1]}, {x.shape[-1]}]")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * _wide(cos, x) + wide @ _wide(rotate, x) * _wide(sin, x)).to(x.dtype)


def _halves(x: Tensor, order: str) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if order == "pairs" else (x[..., :half], x[..., half:])


def _join(first: Tensor, second: Tensor, order: str) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2) if order == "pairs" else torch.cat((first, second), -1)
