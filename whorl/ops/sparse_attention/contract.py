"""Attention over the keys that an indexer selected, forward and backward: the contracts and their references."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from .._op import Op, Values, operator, widen
from .._tracing import is_readable
from . import attention_torch_npu

OutputGradients = tuple[Tensor | None, ...]  # of out and lse
CHUNK = 2**27  # elements of the largest temporary tensor of a reference
# Limits of the Triton kernels: channels of values, further channels of keys, and heads.
LARGEST_VALUE, LARGEST_REST, MOST_HEADS = 512, 128, 128


_QUERIES = Annotated[Tensor, "[T, HQ, D] float"]
_KEYS = Annotated[Tensor, "[S, 1, D] q"]
_INDICES = Annotated[Tensor, "[T, K] int32, from -1 to S - 1"]
_LSE = Annotated[Tensor, "[T, HQ] fp32"]
_SCALE = Annotated[float, "> 0"]


def check_order(name: str, indices: Tensor, **_: object) -> None:
    """Raise ValueError unless every row of indices ascends to its last key and is -1 after it, if `is_readable`."""
    if not is_readable(indices):
        return
    before, after = indices[:, :-1], indices[:, 1:]
    wrong = (after >= 0) & (after <= before) | (after >= 0) & (before < 0)
    if wrong.any():
        row = int(wrong.any(1).nonzero()[0])
        raise ValueError(
            f"{name}: row {row} of indices does not ascend or has a key after a -1; sort it, each key once, -1 last"
        )


def _chunks(q: Tensor, indices: Tensor) -> Iterator[slice]:
    """Return an iterator over slices of tokens whose gathered keys, or scores, are at most CHUNK elements."""
    elements_per_token = max(1, indices.shape[1] * max(q.shape[1], q.shape[2]))
    step = max(1, CHUNK // elements_per_token)
    return (slice(start, start + step) for start in range(0, max(1, q.shape[0]), step))


def _gather(kv: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the listed keys [T, K, D] in the dtype of accumulation, zero where an index is -1, and the mask [T, K]."""
    exists = indices >= 0
    rows = widen(kv[:, 0])
    if not kv.shape[0]:  # the clamped -1 needs a row to point at
        rows = torch.cat((rows, rows.new_zeros(1, kv.shape[2])))
    keys = rows[indices.clamp_min(0).long()]
    return torch.where(exists[..., None], keys, keys.new_zeros(())), exists


def _scores(q: Tensor, keys: Tensor, exists: Tensor, scale: float) -> Tensor:
    """Return the scores [T, HQ, K], -inf where there is no key."""
    scores = widen(q) @ keys.transpose(1, 2) * scale
    return scores.masked_fill(~exists[:, None], float("-inf"))


def softmax_sums(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(scores - maximum) over the last dim, its sum with 0 replaced by 1, and the log-sum-exp.

    A row that is -inf everywhere or empty gives exponentials of zero, a sum of 1 and a log-sum-exp of -inf, never NaN.
    """
    if not scores.shape[-1]:
        empty = scores.sum(-1)
        return scores, empty + 1, empty - float("inf")
    top = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - top)
    total = weights.sum(-1)
    safe = torch.where(total > 0, total, torch.ones_like(total))
    lse = torch.where(total > 0, top[..., 0] + safe.log(), torch.full_like(total, float("-inf")))
    return weights, safe, lse


def _fake(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, value_dim: int, deterministic: bool
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:2], value_dim or q.shape[2])
    return out, q.new_empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _num_pairs(values: Values) -> int:
    """Return the number of selected (token, key) pairs; on meta tensors the size of `indices`."""
    indices = values["indices"]
    return indices.numel() if indices.is_meta else int((indices >= 0).sum())


def _flops(values: Values) -> int:
    heads, dim = values["q"].shape[1:]
    return 2 * _num_pairs(values) * heads * (dim + (values["value_dim"] or dim))


def _backward_flops(values: Values) -> int:
    heads, dim = values["q"].shape[1:]
    return 2 * _num_pairs(values) * heads * (3 * dim + 2 * values["dout"].shape[2])


def _sharding(backward: bool) -> Any:
    """Return the DTensor rule: tokens or heads may be sharded; kv is replicated, and its gradient is a partial sum."""

    def strategies(values: Values) -> list[object]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        placements: list[object] = []
        names = [n for n in ("q", "dout", "out", "lse", "dlse") if values.get(n) is not None]
        for placement in (Replicate(), Shard(0), Shard(1)):
            inputs = dict.fromkeys(names, placement) | {"kv": Replicate()}
            inputs["indices"] = Shard(0) if placement == Shard(0) else Replicate()
            second = placement if not backward or placement == Replicate() else Partial()
            placements.append(([placement, second], inputs))
        return placements

    return strategies


@operator(check=partial(check_order, "sparse_attention"), fake=_fake, flops=_flops, sharding=_sharding(backward=False))
def sparse_attention(
    q: _QUERIES,
    kv: _KEYS,
    indices: _INDICES,
    scale: _SCALE,
    *,
    value_dim: Annotated[int, "0 to D"] = 0,
    deterministic: bool = False,
) -> tuple[Tensor, _LSE]:
    """Attend from every token to the keys listed in its row of `indices`; one tensor is keys and values of all heads.

    The first `value_dim` channels of kv (0: all) are the values; indices are rows of kv in ascending order, each once,
    and -1 after the last; on the CPU other ones raise ValueError. The indexer handles causality and packed sequences: a
    token attends to every key listed for it. Returns out [T, HQ, DV] like q, and lse, the natural logarithm of the sum
    of exp(scale * q.k). A token without keys gives zeros and -inf. Scores, softmax and sums are in fp32; the weights
    may be rounded to q's dtype before they multiply the values; out is rounded once. Absent keys are not read. For
    absorbed MLA D = 576, value_dim = 512, and scale is that of the original heads, 192^-0.5. Differentiable in q and kv
    through both results; kv's gradient is summed in fp32, in a fixed order with `deterministic` or
    torch.use_deterministic_algorithms.

        out, lse = ops.sparse_attention(q, kv, indices, 192**-0.5, value_dim=512)
    """
    value_dim = value_dim or q.shape[2]
    out, lse = [], []
    for part in _chunks(q, indices):
        keys, exists = _gather(kv, indices[part])
        weights, total, part_lse = softmax_sums(_scores(q[part], keys, exists, scale))
        out.append((weights @ keys[..., :value_dim] / total[..., None]).to(q.dtype))
        lse.append(part_lse)
    return torch.cat(out).contiguous(), torch.cat(lse).contiguous()


@operator(
    check=partial(check_order, "sparse_attention_backward"), flops=_backward_flops, sharding=_sharding(backward=True)
)
def sparse_attention_backward(
    dout: Annotated[Tensor, "[T, HQ, DV] q"],
    q: Annotated[Tensor, "[T, HQ, DV + R] float"],
    kv: Annotated[Tensor, "[S, 1, DV + R] q"],
    indices: _INDICES,
    out: Annotated[Tensor, "[T, HQ, DV] q"],
    lse: _LSE,
    dlse: Annotated[Tensor | None, "[T, HQ] fp32"] = None,
    *,
    scale: _SCALE,
    deterministic: bool = False,
) -> tuple[Annotated[Tensor, "[T, HQ, DV + R] q"], Annotated[Tensor, "[S, 1, DV + R] q"]]:
    """Gradients of `sparse_attention` with respect to q and kv; dlse is the gradient that reaches lse.

    The other arguments are those of `sparse_attention`. Returns dq and dkv, contiguous, summed in fp32, rounded once;
    weights and score gradients may be rounded to q's dtype before they are multiplied. The first DV channels of dkv
    include the gradient of the values. Tokens without keys and keys that no token selected have zero gradients.
    `deterministic`: the same bits in every run; otherwise the contributions of the tokens to dkv may be added in any
    order.
    """
    dq, dkv = [], widen(kv[:, 0]) * 0
    for part in _chunks(q, indices):
        keys, exists = _gather(kv, indices[part])
        logs = torch.where(lse[part] > float("-inf"), lse[part], torch.zeros_like(lse[part]))
        weights = torch.exp(_scores(q[part], keys, exists, scale) - logs[..., None])
        grad, values = widen(dout[part]), keys[..., : dout.shape[2]]
        delta = (grad * widen(out[part])).sum(-1)
        if dlse is not None:
            delta = delta - dlse[part]
        dscores = weights * (grad @ values.transpose(1, 2) - delta[..., None]) * scale
        dq.append((dscores @ keys).to(q.dtype))
        share = dscores.transpose(1, 2) @ widen(q[part])
        padding = kv.shape[2] - dout.shape[2]
        share = share + torch.nn.functional.pad(weights.transpose(1, 2) @ grad, (0, padding))
        dkv = dkv.index_add(0, indices[part][exists].long(), share[exists])
    return torch.cat(dq).contiguous(), dkv.to(kv.dtype)[:, None].contiguous()


def attention_gradients(
    backward: Op,
    tensors: Sequence[str],
    grads: OutputGradients,
    args: Values,
    outputs: dict[int, Tensor],
    **options: Any,
) -> Any:
    """Return what `backward`, that of an attention, returns. tensors: the forward's arguments that it takes, in order.

    grads: those of out and lse, either of which may be None. torch_npu returns lse but accepts no gradient of it:
    where it was forced, the reference computes the backward.
    """
    (dout, dlse), out = grads, outputs[0]
    dout = torch.zeros_like(out) if dout is None else dout
    backend = "torch" if dlse is not None and args["backend"] == "torch_npu" else args["backend"]
    saved = [args[name] for name in tensors]
    return backward(dout, *saved, out, outputs[1], dlse, scale=args["scale"], backend=backend, **options)


@sparse_attention.gradient(save=("q", "kv", "indices"), save_outputs=(0, 1))
def _(grads: OutputGradients, args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor | None]:
    deterministic = args["deterministic"] or torch.are_deterministic_algorithms_enabled()
    tensors = ("q", "kv", "indices")
    options = {"deterministic": deterministic}
    dq, dkv = attention_gradients(sparse_attention_backward, tensors, grads, args, outputs, **options)
    return {"q": dq, "kv": dkv}


def _triton_reason(q: Tensor, value_dim: int, **_: object) -> str | None:
    return _kernel_reason(q, value_dim or q.shape[2])


def _kernel_reason(q: Tensor, value_dim: int) -> str | None:
    """Return None, or the reason that the Triton kernels cannot take these queries."""
    if q.shape[1] > MOST_HEADS:
        return f"takes up to {MOST_HEADS} heads, got {q.shape[1]}"
    if value_dim > LARGEST_VALUE or q.shape[2] - value_dim > LARGEST_REST:
        return f"takes up to {LARGEST_VALUE} value and {LARGEST_REST} other channels, got {value_dim} of {q.shape[2]}"
    return None


def _triton_backward_reason(dout: Tensor, q: Tensor, **_: object) -> str | None:
    return _kernel_reason(q, dout.shape[2])


sparse_attention.impl("triton", "launch:forward", accepts=_triton_reason)
sparse_attention_backward.impl("triton", "launch:backward", accepts=_triton_backward_reason)
sparse_attention.impl("torch_npu", "attention_torch_npu:forward", accepts=attention_torch_npu.reason)
sparse_attention_backward.impl("torch_npu", "attention_torch_npu:backward", accepts=attention_torch_npu.backward_reason)
