"""The steps between a Qwen3 qkv projection and attention: RMSNorm of every q and k head, then the rotation."""

import functools
from typing import Annotated, Any

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, operator
from ..rms_norm import rms_norm, rms_norm_backward
from ..rope.contract import check_rotation, make_tables, rope
from ..rope.contract import triton_reason as table_reason
from ..rope.tables import Style

_QKV = Annotated[Tensor, "[..., (num_heads + 2*num_kv_heads)*D] float"]
_WEIGHT = Annotated[Tensor, "[D] qkv or fp32"]
_TABLE = Annotated[Tensor, "[*P, 2*H>0] fp32 or qkv, constant"]
_POSITIONS = Annotated[Tensor | None, "[...] int"]
_HEADS = Annotated[Tensor, "[..., num_heads, D] qkv"]
_KV_HEADS = Annotated[Tensor, "[..., num_kv_heads, D] qkv"]
_COUNT = Annotated[int, "> 0"]
_EPS = Annotated[float, "> 0"]


def split_heads(qkv: Tensor, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    """Return views of q, k and v in the packed projection [*tokens, (HQ + 2 HK) D], each [*tokens, heads, D]."""
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    return list(heads.split([num_heads, num_kv_heads, num_kv_heads], -2))


def _copied(v: Tensor) -> Tensor:
    """Return a contiguous copy, even of a contiguous tensor: an operator's output shares no memory with its inputs."""
    return v.clone(memory_format=torch.contiguous_format)


def check_heads(name: str, *, qkv: Tensor, num_heads: int, num_kv_heads: int, **arguments: Any) -> None:
    """Raise ValueError unless the table is no wider than a head and has a row for each token, [T] or [B, S]."""
    check_rotation(name, split_heads(qkv, num_heads, num_kv_heads)[0], arguments["cos_sin"], arguments["positions"])


def _bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of all heads and of a table row per token.

    Heads are read and written once; in the backward q and k count three times: gradients, values and results.
    """
    qkv, table = values["qkv"], values["cos_sin"]
    heads = (values["num_heads"], values["num_kv_heads"], values["num_kv_heads"])
    has_v = values.get("with_v", True) if "dq" not in values else values["dv"] is not None
    moved = (3 if "dq" in values else 2) * (heads[0] + heads[1]) + 2 * has_v * heads[2]
    tokens, dim = qkv.shape[:-1].numel(), qkv.shape[-1] // sum(heads)
    return tokens * (moved * dim * qkv.element_size() + table.shape[-1] * table.element_size())


@operator(check=functools.partial(check_heads, "qk_norm_rope"), absent={2: "with_v"}, bytes=_bytes)
def qk_norm_rope(
    qkv: _QKV,
    q_weight: _WEIGHT,
    k_weight: _WEIGHT,
    cos_sin: _TABLE,
    positions: _POSITIONS = None,
    *,
    num_heads: _COUNT,
    num_kv_heads: _COUNT,
    eps: _EPS = 1e-6,
    plus_one: bool = False,
    style: Style = "half",
    with_v: bool = True,
) -> tuple[_HEADS, _KV_HEADS, Annotated[Tensor | None, "[..., num_kv_heads, D] qkv"]]:
    """Normalise each query and key head by RMSNorm, rotate them, and return q, k and v, each contiguous.

    qkv has the q heads first, then k, then v. v is copied, so that the backward writes one gradient of qkv; with
    with_v=False it is None, and the caller reads it from qkv. cos_sin, positions and style are those of `rope`, for the
    leading R channels. Everything from the projection to the result is in fp32, rounded once; Hugging Face also rounds
    after the norm. Differentiable in qkv and the weights.

        q, k, v = ops.qk_norm_rope(qkv, q_norm, k_norm, table, positions, num_heads=32, num_kv_heads=4)
    """
    wide = qkv if qkv.dtype == torch.float64 else qkv.float()
    q, k, v = split_heads(wide, num_heads, num_kv_heads)
    q = rms_norm.reference(q, q_weight, eps, plus_one=plus_one)
    k = rms_norm.reference(k, k_weight, eps, plus_one=plus_one)
    q, k = rope.reference(q, k, cos_sin, positions, style=style)
    return q.to(qkv.dtype), k.to(qkv.dtype), _copied(v.to(qkv.dtype)) if with_v else None


@operator(check=functools.partial(check_heads, "qk_norm_rope_backward"), bytes=_bytes)
def qk_norm_rope_backward(
    dq: _HEADS,
    dk: _KV_HEADS,
    dv: Annotated[Tensor | None, "[..., num_kv_heads, D] qkv"],
    qkv: _QKV,
    q_weight: _WEIGHT,
    k_weight: _WEIGHT,
    cos_sin: _TABLE,
    positions: _POSITIONS = None,
    *,
    num_heads: _COUNT,
    num_kv_heads: _COUNT,
    eps: _EPS = 1e-6,
    plus_one: bool = False,
    style: Style = "half",
) -> tuple[
    Annotated[Tensor, "[..., (num_heads + 2*num_kv_heads)*D] qkv"],
    Annotated[Tensor, "[D] q_weight"],
    Annotated[Tensor, "[D] k_weight"],
]:
    """Gradients of `qk_norm_rope` with respect to qkv, q_weight and k_weight, in fp32, each rounded once.

    dq, dk and dv are the gradients of the forward's q, k and v; the other arguments are those of the forward. Where dv
    is None, the gradient of qkv is zero for the v heads.
    """
    wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    dq, dk = rope.reference(dq.to(wide), dk.to(wide), cos_sin, positions, style=style, inverse=True)
    q, k, _ = split_heads(qkv.to(wide), num_heads, num_kv_heads)
    dq, dq_weight = rms_norm_backward.reference(dq, q, q_weight, eps=eps, plus_one=plus_one)
    dk, dk_weight = rms_norm_backward.reference(dk, k, k_weight, eps=eps, plus_one=plus_one)
    dv = torch.zeros_like(dk) if dv is None else dv.to(wide)
    dqkv = torch.cat((dq, dk, dv), -2).flatten(-2).to(qkv.dtype)
    return dqkv, dq_weight, dk_weight


@qk_norm_rope.gradient(save=("qkv", "q_weight", "k_weight", "cos_sin", "positions"))
def _(grads: tuple[Tensor | None, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    likes = split_heads(args["qkv"], args["num_heads"], args["num_kv_heads"])[:2]
    dq, dk = (torch.zeros_like(like) if g is None else g for g, like in zip(grads[:2], likes, strict=True))
    options = {n: v for n, v in args.items() if n != "with_v"}
    dqkv, dq_weight, dk_weight = qk_norm_rope_backward(dq, dk, grads[2], **options)
    return {"qkv": dqkv, "q_weight": dq_weight, "k_weight": dk_weight}


# ---- backends


def triton_reason(qkv: Tensor, cos_sin: Tensor, num_heads: int, num_kv_heads: int, **_: object) -> str | None:
    """Return None, or the reason that the Triton kernels cannot take these arguments."""
    dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    return table_reason(cos_sin) or (None if dim <= 512 else f"head size {dim} is larger than 512")


qk_norm_rope.impl("cpp", "whorl.ops.cpu.rotation:qk_norm_rope")
qk_norm_rope_backward.impl("cpp", takes_fp64=False)(qk_norm_rope_backward.reference)
qk_norm_rope.impl("triton", "qk_norm_rope_triton:forward", accepts=triton_reason)
qk_norm_rope_backward.impl("triton", "qk_norm_rope_backward_triton:backward", accepts=triton_reason)


def _npu_reason(qkv: Tensor, cos_sin: Tensor, num_heads: int, num_kv_heads: int, **_: object) -> str | None:
    q = split_heads(qkv, num_heads, num_kv_heads)[0]
    return rope.impls["torch_npu"].accepts(q=q, cos_sin=cos_sin)


def _npu_rotate(q: Tensor, k: Tensor, args: Values, *, inverse: bool) -> tuple[Tensor, Tensor]:
    options = {n: args[n] for n in ("cos_sin", "positions", "style")} | {"out_style": None, "where": "leading"}
    rotated: tuple[Tensor, Tensor] = rope.impls["torch_npu"].function(q, k, **options, inverse=inverse)
    return rotated


@qk_norm_rope.impl("torch_npu", accepts=_npu_reason)
def _(
    qkv: Tensor, num_heads: int, num_kv_heads: int, with_v: bool, **args: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    norm = rms_norm.impls["torch_npu"].function
    q, k, v = split_heads(qkv, num_heads, num_kv_heads)
    q, k = (norm(x, args[w], args["eps"], args["plus_one"]) for x, w in ((q, "q_weight"), (k, "k_weight")))
    q, k = _npu_rotate(q, k, args, inverse=False)
    return q, k, _copied(v) if with_v else None


@qk_norm_rope_backward.impl("torch_npu", accepts=_npu_reason)
def _(
    dq: Tensor, dk: Tensor, dv: Tensor | None, qkv: Tensor, num_heads: int, num_kv_heads: int, **args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    backward = rms_norm_backward.impls["torch_npu"].function
    q, k, _ = split_heads(qkv, num_heads, num_kv_heads)
    dq, dk = _npu_rotate(dq, dk, args, inverse=True)
    dq, dq_weight = backward(dq, q, args["q_weight"], None, args["eps"], args["plus_one"])
    dk, dk_weight = backward(dk, k, args["k_weight"], None, args["eps"], args["plus_one"])
    dv = torch.zeros_like(dk) if dv is None else dv
    return torch.cat((dq, dk, dv), -2).flatten(-2), dq_weight, dk_weight


# ---- cases


_CASES: list[Values] = [
    {"tokens": (1,), "heads": 1, "kv_heads": 1, "dim": 2},
    {"tokens": (17,), "heads": 4, "kv_heads": 2, "dim": 128, "scale": 0.01},
    {"tokens": (2, 3), "heads": 3, "kv_heads": 1, "dim": 96, "rotary": 48, "plus_one": True},
    {"tokens": (5,), "heads": 4, "kv_heads": 1, "dim": 64, "style": "pairs"},
    {"tokens": (7,), "heads": 5, "kv_heads": 2, "dim": 128},
    {"tokens": (4,), "heads": 2, "kv_heads": 1, "dim": 80, "rotary": 24, "looked_up": True},
    {"tokens": (0,), "heads": 2, "kv_heads": 1, "dim": 64},
    {"tokens": (9,), "heads": 2, "kv_heads": 1, "dim": 64, "sliced": 7, "eps": 1e-3},
    {"tokens": (3,), "heads": 2, "kv_heads": 1, "dim": 64, "with_v": False},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "heads": heads, "kv_heads": 4, "dim": 128}
    for tokens, heads in ((16384, 32), (16384, 64), (1, 32), (64, 64))
] + [{"tokens": (16384,), "heads": 32, "kv_heads": 4, "dim": 128, "with_v": False}]


WORDS = {"heads": "num_heads", "kv_heads": "num_kv_heads", "dim": "D"}


def _make_backward(
    draw: Draw, tokens: tuple[int, ...], dim: int, rotary: int = 0, looked_up: bool = False, with_v: bool = True
) -> Values:
    return make_tables(draw, tokens, dim, rotary, looked_up) | {"dv": with_v}


qk_norm_rope.inputs(cases=_CASES, bench=_BENCH, words=WORDS)(make_tables)
qk_norm_rope_backward.inputs(
    cases=[*_CASES, {"tokens": (130,), "heads": 2, "kv_heads": 1, "dim": 64}], bench=_BENCH[:2], words=WORDS
)(_make_backward)
