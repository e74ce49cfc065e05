"""The peers of whorl's operators: Hugging Face's formulas, torch's operators, Liger, and whorl's unfused operators.

A peer gets its arguments in the form that suits it best (tables looked up in the input dtype, its own memory order)
before the clock starts.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whorl import device as devices
from whorl.bench.attention_peers import ATTENTION_PEERS
from whorl.bench.peer import (
    Function,
    Peer,
    PeersOf,
    Values,
    backward_peers,
    bind_plainly,
    compile_static,
    compiled_functions,
    forward_peers,
    liger_function,
    liger_functions,
    pick,
)
from whorl.ops import OPS, Op, rms_norm, rope
from whorl.ops.rope.tables import token_rows


def peers_of(op: Op, values: Values, *, compiled: bool) -> list[Peer]:
    """Return every peer that can take these arguments, ready to be bound to them."""
    peers = [Peer(label="reference, eager", bind=bind_plainly(op, op.reference), is_contract=True)]
    if compiled and op.flops is None:  # references with flops loop over tokens, which torch.compile would unroll
        peers.append(Peer(label="reference, torch.compile", bind=bind_plainly(op, compile_static(op.reference))))
    known = _PEERS | ATTENTION_PEERS
    return peers + (known[op.name](values, compiled) if op.name in known else [])


# ---- norms


def hf_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm as Hugging Face models compute it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _added(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, weight, eps), total

    return function


def _norm_functions(values: Values, compiled: bool, *, has_residual: bool) -> dict[str, Function]:
    if values["plus_one"]:
        return {}
    label, wrap, liger = "", lambda norm: norm, ("rms_norm", "LigerRMSNormFunction")
    if has_residual:
        label, wrap, liger = "add, then ", _added, ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    functions: dict[str, Function] = {f"{label}torch.nn.functional.rms_norm": wrap(_torch_rms_norm)}
    functions |= compiled_functions({"Hugging Face": wrap(hf_rms_norm)}, compiled)
    return functions | liger_functions(values, *liger)


def _norm(values: Values, compiled: bool) -> list[Peer]:
    names = ("x", *(["residual"] if "residual" in values else []), "weight", "eps")
    return forward_peers(_norm_functions(values, compiled, has_residual="residual" in values), pick(*names))


def _norm_backward(values: Values, compiled: bool) -> list[Peer]:
    has_residual = values["residual_grad"] is not None

    def residual_last(norm: Function) -> Function:
        return lambda x, weight, eps, *zero: norm(x, *zero, weight, eps)

    functions = _norm_functions(values, compiled, has_residual=has_residual)
    return backward_peers(
        {label: residual_last(norm) for label, norm in functions.items()},
        pick("x", "weight"),
        lambda v: [t.clone() for t in (v["dy"], v["residual_grad"]) if t is not None],
        constants=lambda v: [v["eps"], *([torch.zeros_like(v["x"])] if has_residual else [])],
    )


# ---- glu


def hf_glu(x: Tensor, activation: str = "silu") -> Tensor:
    """Return a gated activation as Hugging Face models compute it."""
    gate, up = x.chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def _glu_functions(values: Values, compiled: bool) -> dict[str, Function]:
    if values["interleaved"]:
        return {}
    name = values["activation"]
    functions: dict[str, Function] = {f"{name}, then multiply": lambda x: hf_glu(x, name)}
    functions |= compiled_functions(functions, compiled)
    # Liger has no such GeGLU.
    return functions | (liger_functions(values, "swiglu", "LigerFusedGateUpSiLUMulFunction") if name == "silu" else {})


def _glu(values: Values, compiled: bool) -> list[Peer]:
    return forward_peers(_glu_functions(values, compiled), pick("x"))


def _glu_backward(values: Values, compiled: bool) -> list[Peer]:
    return backward_peers(_glu_functions(values, compiled), pick("x"), pick("dy"))


# ---- rope


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


def _from_hf(out: Any) -> list[Tensor]:
    """Return q and k [1, H, T, D] as [T, H, D], and other outputs as they are."""
    return [*(t.transpose(1, 2)[0] for t in out[:2]), *out[2:]]


def hf_tables(values: Values, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [1, T, D] in the model's dtype, looked up, as models do once per step."""
    rows = token_rows(values["cos_sin"], values["positions"])
    cos, sin = (torch.cat((t, t), -1).to(dtype)[None] for t in rows.chunk(2, -1))
    return cos.contiguous(), sin.contiguous()


def _is_hf_rope(values: Values, heads: Tensor, other: Tensor | None) -> bool:
    """Return whether Hugging Face's formula computes these arguments: full rotation of halves, with keys."""
    style = values.get("style", "half") == "half" and values.get("out_style") in (None, "half")
    return style and other is not None and heads.dim() == 3 and values["cos_sin"].shape[-1] == heads.shape[-1]


def _hf_heads(values: Values) -> list[Tensor]:
    return [to_hf(values["q"]), to_hf(values["k"])]


def _hf_table(values: Values) -> tuple[Tensor, Tensor]:
    return hf_tables(values, values["q"].dtype)


def _rope(values: Values, compiled: bool) -> list[Peer]:
    """Return the peers of rope for these arguments; the inverse rotation is its gradient."""
    if not _is_hf_rope(values, values["q"], values["k"]):
        return []
    functions = compiled_functions({"Hugging Face": hf_rope}, compiled)
    if values.get("inverse", False):
        liger = liger_function(values, "rope", "rope_backward")
        peers = backward_peers(
            functions,
            lambda v: [torch.randn_like(t) for t in _hf_heads(v)],
            _hf_heads,
            constants=_hf_table,
            outputs=_from_hf,
        )
    else:
        liger = getattr(liger_function(values, "rope", "LigerRopeFunction"), "apply", None)
        functions = {"Hugging Face, eager": hf_rope} | functions
        peers = forward_peers(functions, lambda v: (*_hf_heads(v), *_hf_table(v)), outputs=_from_hf)
    return peers + forward_peers(
        {} if liger is None else {"Liger, in place": liger},
        lambda v: (*(to_hf(v[name].clone()) for name in ("q", "k")), *_hf_table(v)),
        outputs=_from_hf,
    )


# ---- qk_norm_rope


def _split_heads(values: Values, qkv: Tensor) -> list[Tensor]:
    hq, hk = values["num_heads"], values["num_kv_heads"]
    return list(qkv.unflatten(-1, (hq + 2 * hk, -1)).split([hq, hk, hk], -2))


def hf_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate q and k as Qwen3 does; q, k: [1, S, H, D], views of the packed projection."""
    q, k = hf_rms_norm(q, q_weight, eps).transpose(1, 2), hf_rms_norm(k, k_weight, eps).transpose(1, 2)
    return hf_rope(q, k, cos, sin)


def _is_hf_norm_rope(values: Values) -> bool:
    q, k, _ = _split_heads(values, values["qkv"])
    return not values["plus_one"] and _is_hf_rope(values, q, k)


def _qk_norm_rope(values: Values, compiled: bool) -> list[Peer]:
    if not _is_hf_norm_rope(values):
        return []
    keeps_v = values.get("with_v", True)  # v is then an output: here a view of the projection, the operator copies it

    def unfused(q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, *more: Any) -> tuple[Tensor, ...]:
        eps, *table = more
        normed = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
        return *rope(*normed, *table), *([v] if keeps_v else [])

    def with_v(function: Function) -> Function:
        return lambda q, k, v, *more: (*function(q[None], k[None], *more), *([v] if keeps_v else []))

    def arguments(values: Values, *table: Any) -> list[Any]:
        return [*_split_heads(values, values["qkv"]), values["q_weight"], values["k_weight"], *table]

    functions: dict[str, Function] = {"Hugging Face, eager": hf_qk_norm_rope}
    functions |= compiled_functions({"Hugging Face": hf_qk_norm_rope}, compiled)
    return [
        *forward_peers(
            {"unfused: rms_norm twice, then rope": unfused},
            lambda v: arguments(v, *pick("eps", "cos_sin", "positions")(v)),
        ),
        *forward_peers(
            {label: with_v(function) for label, function in functions.items()},
            lambda v: arguments(v, *hf_tables(v, v["qkv"].dtype), v["eps"]),
            outputs=_from_hf,
        ),
    ]


def _qk_norm_rope_backward(values: Values, compiled: bool) -> list[Peer]:
    if not compiled or values["dv"] is None or not _is_hf_norm_rope(values):
        return []

    def forward(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _split_heads(values, qkv)
        return *hf_qk_norm_rope(q[None], k[None], q_weight, k_weight, *more), v

    return backward_peers(
        compiled_functions({"Hugging Face": forward}, compiled),
        pick("qkv", "q_weight", "k_weight"),
        lambda v: [to_hf(v["dq"]), to_hf(v["dk"]), v["dv"]],
        constants=lambda v: [*hf_tables(v, v["qkv"].dtype), v["eps"]],
    )


# ---- grouped_matmul


def _grouped_matmul(name: str) -> PeersOf:
    """Return the peers function of an operator that has two backends on a GPU: both are timed, whichever is chosen."""

    def peers(values: Values, compiled: bool) -> list[Peer]:
        device, op = values["x"].device.type, OPS[name]
        return [
            Peer(label=label, bind=bind_plainly(op, op.impls[backend].function))
            for backend, label in {"torch_cuda": "torch's grouped_mm", "triton": "the Triton kernel"}.items()
            if devices.unavailable(backend, device) is None and op.impls[backend].accepts(**values) is None
        ]

    return peers


_PEERS: dict[str, PeersOf] = {
    "rope": _rope,
    "rope_": _rope,
    "rms_norm": _norm,
    "add_rms_norm": _norm,
    "rms_norm_backward": _norm_backward,
    "glu": _glu,
    "glu_backward": _glu_backward,
    "grouped_matmul": _grouped_matmul("grouped_matmul"),
    "grouped_matmul_backward": _grouped_matmul("grouped_matmul_backward"),
    "qk_norm_rope": _qk_norm_rope,
    "qk_norm_rope_backward": _qk_norm_rope_backward,
}
