"""Causal attention of packed sequences, with a gradient: what `paged_attention` is for inference, for training."""

from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from .._draw import Draw
from .._gradient import Arguments
from .._op import Values, narrow, operator, widen
from ..sparse_attention.contract import OutputGradients, attention_gradients
from ..sparse_attention.masked import masked_attention_backward
from . import causal_torch_npu
from .packed import Starts, backward_by_sequence, check_starts, head_reason, read, sequences, special_inputs
from .tiles import attend, log_sum_exp

_QUERIES = Annotated[Tensor, "[T, G*HK, D] float"]
_KEYS = Annotated[Tensor, "[T, HK>0, D] q"]
_OUT = Annotated[Tensor, "[T, G*HK, D] q"]
_LSE = Annotated[Tensor, "[T, G*HK] fp32"]
_SCALE = Annotated[float, "> 0"]
_WINDOW = Annotated[int, ">= 0"]


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
    """Count two operations of each product: of two products in the forward, and of five in the backward."""
    products = 5 if "dout" in values else 2
    return 2 * products * _num_pairs(values) * values["q"].shape[1] * values["q"].shape[2]


@operator(check=partial(check_starts, "causal_attention"), flops=_flops)
def causal_attention(
    q: _QUERIES,
    k: _KEYS,
    v: _KEYS,
    starts: Starts,
    sinks: Annotated[Tensor | None, "[G*HK] q or fp32"] = None,
    *,
    scale: _SCALE,
    window: _WINDOW = 0,
) -> tuple[_OUT, _LSE]:
    """Causal attention within packed sequences.

    Sequence b is tokens starts[b] to starts[b + 1] (exclusive); scale multiplies the scores. A token attends to the
    keys of its sequence up to its own; with window > 0 only to the last `window` of them. sinks: as in
    `paged_attention`. Returns out, contiguous, and lse, the natural log-sum-exp of the scores and the sink. Tokens past
    the last start are padding: their out is zero and their lse -inf. Scores, softmax and sums are in fp32, and out is
    rounded once.

    The bits of out are equal to those of `paged_attention` for the same tokens, whether it decodes them or prefills
    them whole or in chunks, and whatever else is packed with them. This does not hold on Ascend, where neither operator
    promises its bits, nor for lse, which sums weights before they are rounded. Differentiable in q, k, v and sinks,
    through lse too; the bits of the gradient are equal in every run, on Ascend only under
    torch.use_deterministic_algorithms.

    starts must begin at 0, must not decrease and must not exceed T. The CPU and Ascend raise ValueError otherwise; CUDA
    kernels do not check. The forward on CUDA reads nothing back to the host. The backward reads starts once, so it
    waits for the device and cannot be captured in a CUDA graph.

        out, lse = ops.causal_attention(q, k, v, cu_seqlens, scale=head_size**-0.5)
    """
    heads = k.shape[1]
    wide = widen(q).unflatten(1, (heads, q.shape[1] // heads))
    tops = None if sinks is None else sinks.to(wide.dtype).view(wide.shape[1:3])
    outs, logs, end = [], [], 0
    for part in sequences("causal_attention", read(starts, len(q)), len(q)):
        keys, values = (widen(x[part].contiguous()).transpose(0, 1) for x in (k, v))
        out, sums = attend(wide[part], keys, values, window, scale, sinks=tops)
        outs.append(out)
        logs.append(log_sum_exp(sums, out))
        end = part.stop
    # The zeros of padding tokens are computed from q, k and v, so that autograd returns zeros for them, not None.
    padding = wide[end:] + widen(k[end:, :, None]) + widen(v[end:, :, None])
    padding = padding.masked_fill(torch.ones_like(padding, dtype=torch.bool), 0)
    out, lse = torch.cat([*outs, padding]), torch.cat([*logs, padding.sum(-1) - torch.inf])
    return narrow(out.flatten(1, 2), q.dtype).contiguous(), lse.flatten(1, 2).contiguous()


@operator(check=partial(check_starts, "causal_attention_backward"), flops=_flops)
def causal_attention_backward(
    dout: _OUT,
    q: _QUERIES,
    k: _KEYS,
    v: _KEYS,
    starts: Starts,
    out: _OUT,
    lse: _LSE,
    dlse: Annotated[Tensor | None, "[T, G*HK] fp32"] = None,
    *,
    scale: _SCALE,
    window: _WINDOW = 0,
) -> tuple[_OUT, Annotated[Tensor, "[T, HK, D] q"], Annotated[Tensor, "[T, HK, D] q"]]:
    """Gradients of `causal_attention` with respect to q, k and v; dlse is the gradient that reaches lse.

    Each sequence is computed by itself, as in `masked_attention_backward`: sums are in fp32 and rounded once, and the
    gradients of padding tokens are zero. starts are read back to the host once.
    """
    backward = masked_attention_backward.reference
    return backward_by_sequence(backward, dout, q, k, v, read(starts, len(q)), out, lse, dlse, scale, window)


@causal_attention.gradient(save=("q", "k", "v", "starts", "sinks"), save_outputs=(0, 1))
def _(grads: OutputGradients, args: Arguments, outputs: dict[int, Tensor]) -> dict[str, Tensor | None]:
    tensors = ("q", "k", "v", "starts")
    dq, dk, dv = attention_gradients(causal_attention_backward, tensors, grads, args, outputs, window=args["window"])
    input_grads = {"q": dq, "k": dk, "v": dv}
    if "sinks" in args.needs_grad:
        input_grads["sinks"] = _sink_gradient(grads, args["sinks"], outputs[0], outputs[1])
    return input_grads


def _sink_gradient(grads: OutputGradients, sinks: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of sinks: each takes a share of the softmax, and gives no value for it."""
    dout, dlse = grads
    delta = torch.zeros_like(lse) if dout is None else (widen(dout) * widen(out)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    share = torch.exp(sinks.to(lse.dtype) - lse.masked_fill(lse == -torch.inf, torch.inf))  # 0 for padding
    return -(share * delta).sum(0).to(sinks.dtype)


causal_attention.impl("cpp", "whorl.ops.cpu.attention:causal_attention")
causal_attention_backward.impl("cpp", takes_fp64=False)(causal_attention_backward.reference)
causal_attention.impl("triton", "causal_triton:forward", accepts=head_reason)
causal_attention_backward.impl("triton", "causal_triton:backward", accepts=head_reason)
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
    {"lengths": (12, 9), "idle": 2, "window": 4, "sinks": True, **_HEADS},
    {"lengths": (30,), "sinks": True, "heads": 6, "kv_heads": 2, "dim": 40},
]
_QWEN = {"heads": 32, "kv_heads": 4, "dim": 128}
_BENCH: list[Values] = [{"lengths": (8192,), **_QWEN}, {"lengths": (4000, 1192, 3000), **_QWEN}]


_WORDS = {"kv_heads": "HK", "heads": "G*HK", "dim": "D"}


@causal_attention.inputs(cases=_CASES, bench=_BENCH, words=_WORDS)
def _(draw: Draw, lengths: tuple[int, ...], dim: int, idle: int = 0, heads: int = 0, sinks: bool = False) -> Values:
    return special_inputs(draw, lengths, dim, idle) | ({"sinks": draw.scaled(heads)} if sinks else {})


@causal_attention_backward.inputs(cases=[*_CASES, {**_CASES[1], "dlse": True}], bench=_BENCH, words=_WORDS)
def _(draw: Draw, dlse: bool = False, **case: Any) -> Values:
    args = causal_attention.draw(draw, **case)
    out, lse = causal_attention(**args)
    args.pop("sinks", None)
    return {**args, "out": out, "lse": lse}
