"""The peers of rope, forward and backward, and of rope_."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whorl.bench.peer import Bound, Peer, Values, backward_alone, compile_static, liger_function
from whorl.ops.rope.tables import token_rows


def rotate_half(x: Tensor) -> Tensor:
    """Return transformers' rotate_half(x)."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def hf_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate as transformers' apply_rotary_pos_emb does; q, k: [B, H, S, D], cos, sin: [B, S, D]."""
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def to_hf(x: Tensor) -> Tensor:
    """Return x [T, H, D] as the view [1, H, T, D] that Hugging Face models use, with tokens outermost in memory."""
    return x[None].transpose(1, 2)


def from_hf(out: Any) -> list[Tensor]:
    """Return q and k [1, H, T, D] as [T, H, D]."""
    return [t.transpose(1, 2)[0] for t in out[:2]]


def hf_tables(values: Values, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [1, T, D] in the model's dtype, looked up, as models do once per step."""
    rows = token_rows(values["cos_sin"], values["positions"])
    cos, sin = (torch.cat((t, t), -1).to(dtype)[None] for t in rows.chunk(2, -1))
    return cos.contiguous(), sin.contiguous()


def is_hf_rope(values: Values, heads: Tensor, other: Tensor | None) -> bool:
    """Return whether Hugging Face's formula computes these arguments: full rotation of halves, with keys."""
    style = values.get("style", "half") == "half" and values.get("out_style") in (None, "half")
    return style and other is not None and heads.dim() == 3 and values["cos_sin"].shape[-1] == heads.shape[-1]


def rope_peers(values: Values, compiled: bool) -> list[Peer]:
    """Return the peers of rope for these arguments; the inverse rotation is its gradient."""
    if not is_hf_rope(values, values["q"], values["k"]):
        return []
    is_inverse = values.get("inverse", False)
    liger = liger_function(values, "rope", "rope_backward" if is_inverse else "LigerRopeFunction")

    def bind_liger(values: Values) -> Bound:
        q, k = to_hf(values["q"].clone()), to_hf(values["k"].clone())
        tables = hf_tables(values, q.dtype)
        run = liger if is_inverse else liger.apply
        return Bound(run=lambda: run(q, k, *tables), outputs=from_hf)

    peers = _hf_backward(compiled) if is_inverse else _hf_forward(compiled)
    return peers if liger is None else [*peers, Peer(label="Liger, in place", bind=bind_liger)]


def _hf_forward(compiled: bool) -> list[Peer]:
    def bind(function: Callable[..., Any]) -> Callable[[Values], Bound]:
        def bind_hf(values: Values) -> Bound:
            q, k, tables = to_hf(values["q"]), to_hf(values["k"]), hf_tables(values, values["q"].dtype)
            return Bound(run=lambda: function(q, k, *tables), outputs=from_hf)

        return bind_hf

    peers = [Peer(label="Hugging Face, eager", bind=bind(hf_rope))]
    if compiled:
        peers.append(Peer(label="Hugging Face, torch.compile", bind=bind(compile_static(hf_rope))))
    return peers


def _hf_backward(compiled: bool) -> list[Peer]:
    def bind(values: Values) -> Bound:
        dq, dk, tables = to_hf(values["q"]), to_hf(values["k"]), hf_tables(values, values["q"].dtype)
        run = backward_alone(
            lambda q, k: forward(q, k, *tables), [torch.randn_like(dq), torch.randn_like(dk)], [dq, dk]
        )
        return Bound(run=run, outputs=from_hf)

    if not compiled:
        return []
    forward = compile_static(hf_rope)
    return [Peer(label="Hugging Face, torch.compile, backward alone", bind=bind, through_autograd=True)]
