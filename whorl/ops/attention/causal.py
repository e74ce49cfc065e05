"""Causal attention of packed sequences, with a gradient: what `paged_attention` is for inference, for training."""

from typing import Any

import torch
from torch import Tensor

from .._draw import Draw, Sizes
from .._op import Values, narrow, operator, widen
from .._tracing import is_readable
from ..sparse_attention.contract import check_outputs
from ..sparse_attention.masked import masked_attention_backward
from . import causal_torch_npu
from .packed import backward_by_sequence, check_starts, read, sequences
from .tiles import attend, log_sum_exp


def _check_shapes(name: str, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, window: int) -> None:
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{name}: q is {q.dtype}, k {k.dtype}, v {v.dtype}, expected one floating point dtype")
    fits = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[::2] == k.shape[::2]
    if not fits or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{name}: q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, expected [T, HQ, D] and two of "
            "[T, HK, D] with HQ a multiple of HK"
        )
    if starts.dim() != 1 or not len(starts) or starts.dtype != torch.int32:
        raise ValueError(f"{name}: starts is {list(starts.shape)} {starts.dtype}, expected [B + 1] torch.int32")
    if not scale > 0:
        raise ValueError(f"{name}: scale is {scale}, expected a positive number")
    if window < 0:
        raise ValueError(f"{name}: window is {window}, expected 0 (none) or a positive number of keys")
    if is_readable(starts):
        check_starts(name, starts.tolist(), len(q))


def _check(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, window: int) -> None:
    _check_shapes("causal_attention", q, k, v, starts, scale, window)


def _check_backward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, window: int, **outputs: Any) -> None:
    name = "causal_attention_backward"
    _check_shapes(name, q, k, v, starts, scale, window)
    check_outputs(name, q, q.shape[2], **outputs)


def _fake(q: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=lse_dtype)


def _num_pairs(values: Values) -> int:
    """Return the number of (query, key) pairs in which the query attends to the key."""
    window, total = values["window"], 0
    num_tokens = len(values["q"])
    for part in sequences("causal_attention", read(values["starts"], num_tokens), num_tokens):
        count = part.stop - part.start
        hidden = max(0, count - window) if window else 0
        total += (count * (count + 1) - hidden * (hidden + 1)) // 2
    return total


def _flops(values: Values) -> int:
    return 4 * _num_pairs(values) * values["q"].shape[1] * values["q"].shape[2]


def _backward_flops(values: Values) -> int:
    return 10 * _num_pairs(values) * values["q"].shape[1] * values["q"].shape[2]


@operator(check=_check, fake=_fake, flops=_flops)
def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Causal attention within packed sequences.

    q: [T, HQ, D] bf16, fp16 or fp32; k, v: [T, HK, D] in q's dtype, HQ a multiple of HK; starts: [B + 1] int32;
    sequence b is tokens starts[b] to starts[b + 1] (exclusive); scale multiplies the scores. A token attends to the
    keys of its sequence up to its own; with window > 0 only to the last `window` of them. Returns out like q,
    contiguous, and lse [T, HQ] fp32, the natural log-sum-exp of the scores. Tokens past the last start are padding:
    their out is zero and their lse -inf. Scores, softmax and sums are in fp32, and out is rounded once.

    The bits of out are equal to those of `paged_attention` for the same tokens, whether it decodes them or prefills
    them whole or in chunks, and whatever else is packed with them. This does not hold on Ascend, where neither operator
    promises its bits, nor for lse, which sums weights before they are rounded. Differentiable in q, k and v, through
    lse too; the bits of the gradient are equal in every run, on Ascend only under torch.use_deterministic_algorithms.

    starts must begin at 0, must not decrease and must not exceed T. The CPU and Ascend raise ValueError otherwise; CUDA
    kernels do not check. The forward on CUDA reads nothing back to the host. The backward reads starts once, so it
    waits for the device and cannot be captured in a CUDA graph.

        out, lse = ops.causal_attention(q, k, v, cu_seqlens, scale=head_size**-0.5)
    """
    heads = k.shape[1]
    wide = widen(q).unflatten(1, (heads, q.shape[1] // heads))
    outs, logs, end = [], [], 0
    for part in sequences("causal_attention", read(starts, len(q)), len(q)):
        keys, values = (widen(x[part].contiguous()).transpose(0, 1) for x in (k, v))
        out, sums = attend(wide[part], keys, values, window, scale)
        outs.append(out)
        logs.append(log_sum_exp(sums, out))
        end = part.stop
    # The zeros of padding tokens are computed from q, k and v, so that autograd returns zeros for them, not None.
    padding = wide[end:] + widen(k[end:, :, None]) + widen(v[end:, :, None])
    padding = padding.masked_fill(torch.ones_like(padding, dtype=torch.bool), 0)
    out, lse = torch.cat([*outs, padding]), torch.cat([*logs, padding.sum(-1) - torch.inf])
    return narrow(out.flatten(1, 2), q.dtype).contiguous(), lse.flatten(1, 2).contiguous()


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, **_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@operator(check=_check_backward, fake=_fake_backward, flops=_backward_flops)
def causal_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `causal_attention` with respect to q, k and v; dlse is the gradient that reaches lse.

    dout, out: [T, HQ, D], lse, dlse: [T, HQ]; the other arguments are those of the forward. Returns dq, dk and dv like
    q, k and v. Each sequence is computed by itself, as in `masked_attention_backward`: sums are in fp32 and rounded
    once, and the gradients of padding tokens are zero. starts are read back to the host once.
    """
    backward = masked_attention_backward.reference
    return backward_by_sequence(backward, dout, q, k, v, read(starts, len(q)), out, lse, dlse, scale, window)


@causal_attention.gradient(save=("q", "k", "v", "starts"), save_outputs=(0, 1))
def _(grads: tuple[Tensor | None, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor | None]:
    dout, dlse = grads
    dq, dk, dv = causal_attention_backward(
        torch.zeros_like(outputs[0]) if dout is None else dout,
        *(args[n] for n in ("q", "k", "v", "starts")),
        outputs[0],
        outputs[1],
        dlse,
        scale=args["scale"],
        window=args["window"],
        # torch_npu returns lse but takes no gradient of it: where it was forced, the reference computes the backward.
        backend="torch" if dlse is not None and args["backend"] == "torch_npu" else args["backend"],
    )
    return {"q": dq, "k": dk, "v": dv}


def _triton_reason(q: Tensor, **_: object) -> str | None:
    if q.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    return None if q.shape[2] <= 256 else f"a head of {q.shape[2]} channels does not fit one program (256)"


causal_attention.impl("triton", "causal_triton:forward", accepts=_triton_reason)
causal_attention_backward.impl("triton", "causal_triton:backward", accepts=_triton_reason)
causal_attention.impl("torch_npu", "causal_torch_npu:forward", accepts=causal_torch_npu.reason)
causal_attention_backward.impl("torch_npu", "causal_torch_npu:backward", accepts=causal_torch_npu.backward_reason)


_HEADS = {"heads": 4, "kv_heads": 2, "dim": 32}
_CASES: list[Values] = [
    # With two keys the score gradients would be one number and its negative, and a ratio of errors would mean little.
    {"lengths": (9,), "heads": 1, "kv_heads": 1, "dim": 16},
    {"lengths": (7, 5, 1), **_HEADS},
    {"lengths": (12, 9), "window": 4, "scale": 0.01, **_HEADS},
    {"lengths": (6, 0, 8), "idle": 3, "heads": 6, "kv_heads": 2, "dim": 40},
    {"lengths": (0,), **_HEADS},
    {"lengths": (), "idle": 2, **_HEADS},
    {"lengths": (20, 11), "sliced": True, "heads": 8, "kv_heads": 1, "dim": 64},
    {"lengths": (140, 20), "window": 100, **_HEADS},
    {"lengths": (8,), **_HEADS},
]
_QWEN = {"heads": 32, "kv_heads": 4, "dim": 128}
_BENCH: list[Values] = [{"lengths": (8192,), **_QWEN}, {"lengths": (4000, 1192, 3000), **_QWEN}]


def _make(
    draw: Draw,
    lengths: Sizes,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int = 0,
    idle: int = 0,
    tokens: Sizes = (),
) -> Values:
    count = sum(lengths) + idle
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "q": draw.normal(count, heads, dim),
        "k": draw.scaled(count, kv_heads, dim),
        "v": draw.scaled(count, kv_heads, dim),
        "starts": starts.to(draw.device),
        "scale": dim**-0.5,
        "window": window,
    }


def _make_backward(draw: Draw, with_dlse: bool = False, **case: Any) -> Values:
    args = _make(draw, **case)
    out, lse = _fake(**args) if args["q"].is_meta else causal_attention(**args)
    dlse = torch.randn_like(lse) if with_dlse else None
    return {"dout": torch.randn_like(out), **args, "out": out, "lse": lse, "dlse": dlse}


def _with_tokens(case: Values) -> Values:
    return {"tokens": (sum(case["lengths"]) + case.get("idle", 0),), **case}


causal_attention.inputs(cases=[_with_tokens(c) for c in _CASES], bench=[_with_tokens(c) for c in _BENCH])(_make)
causal_attention_backward.inputs(
    cases=[_with_tokens(c) for c in (*_CASES, {**_CASES[1], "with_dlse": True})],
    bench=[_with_tokens(c) for c in _BENCH],
)(_make_backward)
