"""The peers of rope and mrope."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whorl.bench.peer import Bound, Peer, Values, backward_alone, compile_static, liger_function
from whorl.ops.rope.tables import merged_rows, token_rows


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
    """Return cos and sin [1, T, D] in the model's dtype, looked up and merged over axes, as models do once per step."""
    table, positions = values["cos_sin"], values["positions"]
    if values.get("sections") is None:
        rows = token_rows(table, positions)
    else:
        rows = merged_rows(table, positions, values["sections"], values["layout"])
    cos, sin = (torch.cat((t, t), -1).to(dtype)[None] for t in rows.chunk(2, -1))
    return cos.contiguous(), sin.contiguous()


def is_hf_rope(values: Values, heads: Tensor, other: Tensor | None) -> bool:
    """Return whether Hugging Face's formula computes these arguments: full rotation of halves, forward, with keys."""
    style = values.get("style", "half") == "half" and not values.get("inverse", False)
    return style and other is not None and heads.dim() == 3 and values["cos_sin"].shape[-1] == heads.shape[-1]


def rope_peers(values: Values, compiled: bool) -> list[Peer]:
    """Return the peers of rope and mrope for these arguments."""
    if not is_hf_rope(values, values["q"], values["k"]):
        return []

    def bind_hf(function: Callable[..., Any]) -> Callable[[Values], Bound]:
        def bind(values: Values) -> Bound:
            q, k, tables = to_hf(values["q"]), to_hf(values["k"]), hf_tables(values, values["q"].dtype)
            return Bound(run=lambda: function(q, k, *tables), outputs=from_hf)

        return bind

    def bind_liger(values: Values) -> Bound:
        q, k = to_hf(values["q"].clone()), to_hf(values["k"].clone())
        tables = hf_tables(values, q.dtype)
        return Bound(run=lambda: liger.apply(q, k, *tables), outputs=from_hf)

    merged = ", axes merged before" if "sections" in values else ""
    peers = [Peer(label=f"Hugging Face, eager{merged}", bind=bind_hf(hf_rope))]
    if compiled:
        peers.append(Peer(label=f"Hugging Face, torch.compile{merged}", bind=bind_hf(compile_static(hf_rope))))
    if (liger := liger_function(values, "rope", "LigerRopeFunction")) is not None:
        peers.append(Peer(label=f"Liger, in place{merged}", bind=bind_liger))
    if len(values.get("sections", ())) == 3:
        peers += _liger_mrope(values, ("q", "k"), "qwen2vl_mrope_forward")
    return peers


def rope_backward_peers(values: Values, compiled: bool) -> list[Peer]:
    """Return the peers of the backward of rope and mrope for these arguments."""
    if not is_hf_rope(values, values["dq"], values["dk"]):
        return []

    def bind_hf(values: Values) -> Bound:
        dq, dk, tables = to_hf(values["dq"]), to_hf(values["dk"]), hf_tables(values, values["dq"].dtype)
        run = backward_alone(
            lambda q, k: forward(q, k, *tables), [torch.randn_like(dq), torch.randn_like(dk)], [dq, dk]
        )
        return Bound(run=run, outputs=from_hf)

    def bind_liger(values: Values) -> Bound:
        dq, dk = to_hf(values["dq"].clone()), to_hf(values["dk"].clone())
        tables = hf_tables(values, dq.dtype)
        return Bound(run=lambda: liger(dq, dk, *tables), outputs=from_hf)

    merged, peers = ", axes merged before" if "sections" in values else "", []
    if compiled:
        forward = compile_static(hf_rope)
        label = f"Hugging Face, torch.compile, backward alone{merged}"
        peers.append(Peer(label=label, bind=bind_hf, through_autograd=True))
    if (liger := liger_function(values, "rope", "rope_backward")) is not None:
        peers.append(Peer(label=f"Liger, in place{merged}", bind=bind_liger))
    if len(values.get("sections", ())) == 3:
        peers += _liger_mrope(values, ("dq", "dk"), "qwen2vl_mrope_backward")
    return peers


def _liger_mrope(values: Values, names: tuple[str, str], name: str) -> list[Peer]:
    """Return Liger's mrope, which merges axes in its kernel. It has only the chunked order and is checked with it."""
    function = liger_function(values, "qwen2vl_mrope", name)
    if function is None:
        return []

    def bind(values: Values) -> Bound:
        first, second = (to_hf(values[n].clone()) for n in names)
        rows = values["cos_sin"][values["positions"]][:, None]  # [3, 1, T, R]
        tables = [torch.cat((t, t), -1).to(first.dtype) for t in rows.chunk(2, -1)]
        return Bound(run=lambda: function(first, second, *tables, values["sections"]), outputs=from_hf)

    return [Peer(label="Liger mrope, in place, chunked", bind=bind, substitutes={"layout": "chunked"})]
