"""The peers of whorl's operators: Hugging Face's formulas, torch's operators, Liger, and whorl's unfused operators.

A peer gets its arguments in the form that suits it best (tables looked up in the input dtype, its own memory order)
before the clock starts.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whorl import device as devices
from whorl.bench.attention_peers import ATTENTION_PEERS
from whorl.bench.peer import (
    Bound,
    Peer,
    Values,
    backward_alone,
    bind_plainly,
    compile_static,
    functions_of,
    tensors_of,
)
from whorl.bench.rope_peers import from_hf, hf_rope, hf_tables, is_hf_rope, rope_peers, to_hf
from whorl.ops import OPS, Op, rms_norm, rope


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


def _arguments(values: Values, *names: str) -> list[Any]:
    return [values[n] for n in names]


def _simple(label: str, function: Callable[..., Any], *names: str) -> Peer:
    """Return a peer that takes our arguments `names`, in this order."""

    def bind(values: Values) -> Bound:
        arguments = _arguments(values, *names)
        return Bound(run=lambda: function(*arguments), outputs=tensors_of)

    return Peer(label=label, bind=bind)


def _added(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, weight, eps), total

    return function


def _norm_functions(values: Values, compiled: bool, *, has_residual: bool) -> dict[str, Callable[..., Any]]:
    if values["plus_one"]:
        return {}
    label, wrap, liger = "", lambda norm: norm, ("rms_norm", "LigerRMSNormFunction")
    if has_residual:
        label, wrap, liger = "add, then ", _added, ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    return functions_of(
        values,
        compiled,
        eager={f"{label}torch.nn.functional.rms_norm": wrap(_torch_rms_norm)},
        compile_too={"Hugging Face": wrap(hf_rms_norm)},
        liger=liger,
    )


def _norm(values: Values, compiled: bool) -> list[Peer]:
    names = ("x", *(["residual"] if "residual" in values else []), "weight", "eps")
    functions = _norm_functions(values, compiled, has_residual="residual" in values)
    return [_simple(label, function, *names) for label, function in functions.items()]


def _norm_backward(values: Values, compiled: bool) -> list[Peer]:
    has_residual = values["residual_grad"] is not None

    def bind(norm: Callable[..., Any], values: Values) -> Bound:
        grads = [t.clone() for t in _arguments(values, "dy", "residual_grad") if t is not None]
        zero = (torch.zeros_like(values["x"]),) if has_residual else ()
        run = backward_alone(lambda x, w: norm(x, *zero, w, values["eps"]), _arguments(values, "x", "weight"), grads)
        return Bound(run=run, outputs=tensors_of)

    functions = _norm_functions(values, compiled, has_residual=has_residual)
    return [_alone(label, functools.partial(bind, function)) for label, function in functions.items()]


def _alone(label: str, bind: Callable[[Values], Bound]) -> Peer:
    """Return a peer of a backward, which autograd runs on a forward that is not timed."""
    return Peer(label=f"{label}, backward alone", bind=bind, through_autograd=True)


# ---- glu


def hf_glu(x: Tensor, activation: str = "silu") -> Tensor:
    """Return a gated activation as Hugging Face models compute it."""
    gate, up = x.chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def _glu_functions(values: Values, compiled: bool) -> dict[str, Callable[..., Any]]:
    if values["interleaved"]:
        return {}
    name = values["activation"]
    eager: dict[str, Callable[..., Any]] = {f"{name}, then multiply": functools.partial(hf_glu, activation=name)}
    liger = ("swiglu", "LigerFusedGateUpSiLUMulFunction") if name == "silu" else None  # it has no such GeGLU
    return functions_of(values, compiled, eager=eager, compile_too=eager, liger=liger)


def _glu(values: Values, compiled: bool) -> list[Peer]:
    return [_simple(label, function, "x") for label, function in _glu_functions(values, compiled).items()]


def _glu_backward(values: Values, compiled: bool) -> list[Peer]:
    def bind(function: Callable[..., Any], values: Values) -> Bound:
        return Bound(run=backward_alone(function, [values["x"]], [values["dy"]]), outputs=tensors_of)

    functions = _glu_functions(values, compiled)
    return [_alone(label, functools.partial(bind, function)) for label, function in functions.items()]


# ---- qk_norm_rope


def _split_heads(values: Values, qkv: Tensor) -> list[Tensor]:
    hq, hk = values["num_heads"], values["num_kv_heads"]
    return list(qkv.unflatten(-1, (hq + 2 * hk, -1)).split([hq, hk, hk], -2))


def _with_v(values: Values, v: Tensor) -> list[Tensor]:
    """Return v as an output where the operator does; here it stays a view of the projection, the operator copies it."""
    return [v] if values.get("with_v", True) else []


def hf_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate q and k as Qwen3 does; q, k: [1, S, H, D], views of the packed projection."""
    q, k = hf_rms_norm(q, q_weight, eps).transpose(1, 2), hf_rms_norm(k, k_weight, eps).transpose(1, 2)
    return hf_rope(q, k, cos, sin)


def _is_hf_norm_rope(values: Values) -> bool:
    q, k, _ = _split_heads(values, values["qkv"])
    return not values["plus_one"] and is_hf_rope(values, q, k)


def _qk_norm_rope(values: Values, compiled: bool) -> list[Peer]:
    if not _is_hf_norm_rope(values):
        return []

    def bind_ours(values: Values) -> Bound:
        q, k, v = _split_heads(values, values["qkv"])
        table = [values["cos_sin"], values["positions"]]

        def run() -> tuple[Tensor, Tensor]:
            normed = [rms_norm(x, values[f"{n}_weight"], values["eps"]) for n, x in (("q", q), ("k", k))]
            return rope(*normed, *table)

        return Bound(run=run, outputs=lambda out: [*out, *_with_v(values, v)])

    def bind_hf(function: Callable[..., Any]) -> Callable[[Values], Bound]:
        def bind(values: Values) -> Bound:
            q, k, v = _split_heads(values, values["qkv"])
            constants = [*_arguments(values, "q_weight", "k_weight"), *hf_tables(values, q.dtype), values["eps"]]
            return Bound(
                run=lambda: function(q[None], k[None], *constants),
                outputs=lambda out: [*from_hf(out), *_with_v(values, v)],
            )

        return bind

    peers = [
        Peer(label="unfused: rms_norm twice, then rope", bind=bind_ours),
        Peer(label="Hugging Face, eager", bind=bind_hf(hf_qk_norm_rope)),
    ]
    if compiled:
        peers.append(Peer(label="Hugging Face, torch.compile", bind=bind_hf(compile_static(hf_qk_norm_rope))))
    return peers


def _qk_norm_rope_backward(values: Values, compiled: bool) -> list[Peer]:
    if not compiled or values["dv"] is None or not _is_hf_norm_rope(values):
        return []

    def bind(values: Values) -> Bound:
        tables = hf_tables(values, values["qkv"].dtype)

        def forward(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = _split_heads(values, qkv)
            return *hf_qk_norm_rope(q[None], k[None], q_weight, k_weight, *tables, values["eps"]), v

        grads = [to_hf(values["dq"]), to_hf(values["dk"]), values["dv"]]
        run = backward_alone(compile_static(forward), _arguments(values, "qkv", "q_weight", "k_weight"), grads)
        return Bound(run=run, outputs=tensors_of)

    return [_alone("Hugging Face, torch.compile", bind)]


# ---- grouped_matmul


def _grouped_matmul(name: str) -> Callable[[Values, bool], list[Peer]]:
    """Return the peers function of an operator that has two backends on a GPU: both are timed, whichever is chosen."""

    def peers(values: Values, compiled: bool) -> list[Peer]:
        device, op = values["x"].device.type, OPS[name]
        return [
            Peer(label=label, bind=bind_plainly(op, op.impls[backend].function))
            for backend, label in {"torch_cuda": "torch's grouped_mm", "triton": "the Triton kernel"}.items()
            if devices.unavailable(backend, device) is None and op.impls[backend].accepts(**values) is None
        ]

    return peers


_PEERS: dict[str, Callable[[Values, bool], list[Peer]]] = {
    "rope": rope_peers,
    "rope_": rope_peers,
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
