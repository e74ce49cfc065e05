"""The rotation on Ascend. npu_mrope looks positions up itself, in a table of q's dtype.

With such a table (`table_dtype`), positions are passed to npu_mrope and no rows are gathered. With an fp32 table, and
for an inverse rotation, the rows of the tokens are gathered and rounded first, because casting T rows is cheap and
casting a whole table in every layer is not. npu_mrope then gets the rows as its table and 0..T-1 as positions, as it
does where the caller has looked rows up (or merged them: `merge_mrope`). Either way cosines and sines are rounded to
q's dtype. What npu_mrope does not take is rotated by npu_interleave_rope or npu_rotary_mul.
"""

import torch
from torch import Tensor

from whorl.contracts import mrope_limit, rotary_mul_limit

from .. import _torch_npu
from .._torch_npu import dtype_name

_MODE = {"half": "half", "pairs": "interleave"}  # torch_npu's rotary_mode


def reason(q: Tensor, cos_sin: Tensor, **_: object) -> str | None:
    """Return None, or the reason that no torch_npu operator takes this rotation."""
    if not q.numel():
        return "empty tensors are not taken"
    tokens, rotary = q.shape[:-2].numel(), cos_sin.shape[-1]
    return rotary_mul_limit(
        shape=(1, tokens, q.shape[-2], rotary),
        cos_shape=(1, tokens, 1, rotary),
        dtype=dtype_name(q),
        rotary_mode="half",
        layout="BSND",
    )


def rotate_both(
    q: Tensor, k: Tensor | None, rows: Tensor, read: str, write: str, where: str, inverse: bool
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by rows [*tokens, R], by one npu_mrope where its limits allow, else by one call per tensor.

    Channels are read in the order `read` and written in the order `write`, each "half" or "pairs".
    """
    rows = rows.reshape(-1, rows.shape[-1])
    if inverse:
        cos, sin = rows.chunk(2, -1)
        rows = torch.cat((cos, -sin), -1)
    if k is not None and read == write and where == "leading" and _mrope_reason(q, k, rows) is None:
        positions = torch.arange(rows.shape[0], device=q.device)
        return _mrope(q, k, rows.to(q.dtype), positions, read)
    return _rotate(q, rows, read, write, where), None if k is None else _rotate(k, rows, read, write, where)


def rope_directly(
    q: Tensor, k: Tensor | None, cos_sin: Tensor, positions: Tensor | None, style: str
) -> tuple[Tensor, Tensor] | None:
    """Rotate by npu_mrope, which looks positions up itself; None where its documented limits forbid that."""
    if k is None or positions is None or cos_sin.dtype != q.dtype or _mrope_reason(q, k, cos_sin) is not None:
        return None
    return _mrope(q, k, cos_sin, positions.reshape(-1).contiguous(), style)


def _mrope_reason(q: Tensor, k: Tensor, table: Tensor) -> str | None:
    tokens = q.shape[:-2].numel()
    return mrope_limit(
        query_shape=(tokens, q.shape[-2] * q.shape[-1]),
        key_shape=(tokens, k.shape[-2] * k.shape[-1]),
        rotary_dim=table.shape[-1],
        head_size=q.shape[-1],
        dtype=dtype_name(q),
        table_dtype=dtype_name(q),
        positions_shape=(tokens,),
    )


def _mrope(q: Tensor, k: Tensor, table: Tensor, positions: Tensor, style: str) -> tuple[Tensor, Tensor]:
    q_out, k_out = _torch_npu.call(
        "npu_mrope",
        positions=positions,
        query=q.reshape(positions.shape[-1], -1).contiguous(),
        key=k.reshape(positions.shape[-1], -1).contiguous(),
        cos_sin_cache=table.contiguous(),
        head_size=q.shape[-1],
        rotary_mode=_MODE[style],
        mrope_section=[0, 0, 0],
        cache_mode="default",
    )
    return q_out.reshape(q.shape), k_out.reshape(k.shape)


def _rotate(x: Tensor, rows: Tensor, read: str, write: str, where: str) -> Tensor:
    """Rotate the rotary slice of x, at either end and in any order, by npu_interleave_rope or npu_rotary_mul."""
    rotary = rows.shape[-1]
    start = 0 if where == "leading" else x.shape[-1] - rotary
    part = x[..., start : start + rotary].reshape(rows.shape[0], x.shape[-2], rotary)
    rotated = _interleave_rope(part, rows) if _is_deepseek(part, read, write) else _rotary_mul(part, rows, read, write)
    rotated = rotated.reshape(*x.shape[:-1], rotary)
    if rotary == x.shape[-1]:
        return rotated
    return torch.cat((x[..., :start], rotated, x[..., start + rotary :]), -1)


def _is_deepseek(part: Tensor, read: str, write: str) -> bool:
    """Whether npu_interleave_rope takes these: it reads pairs, writes half order and takes 64 channels of 16 bits."""
    return (read, write) == ("pairs", "half") and part.shape[-1] == 64 and part.element_size() == 2


def _interleave_rope(part: Tensor, rows: Tensor) -> Tensor:
    cos, sin = (torch.cat((t, t), -1)[:, None, None].to(part.dtype) for t in rows.chunk(2, -1))  # [T, 1, 1, 64]
    x = part[:, :, None].contiguous()  # [B = T, N, S = 1, 64]
    return _torch_npu.call("npu_interleave_rope", x=x, cos=cos, sin=sin)


def _rotary_mul(part: Tensor, rows: Tensor, read: str, write: str) -> Tensor:
    """npu_rotary_mul writes the order it reads; another order takes a shuffle before (to half) or after (to pairs)."""
    if read == "pairs" and write == "half":
        part, read = part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), "half"
    widths = {"half": lambda t: torch.cat((t, t), -1), "pairs": lambda t: t.repeat_interleave(2, -1)}
    cos, sin = (widths[read](t)[None, :, None].to(part.dtype) for t in rows.chunk(2, -1))  # [1, T, 1, R]
    rotated = _torch_npu.call(
        "npu_rotary_mul", input=part[None].contiguous(), r1=cos, r2=sin, rotary_mode=_MODE[read], rotate=None
    )
    if read != write:
        rotated = rotated.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return rotated
