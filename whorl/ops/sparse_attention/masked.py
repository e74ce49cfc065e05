"""Attention over selected keys for short sequences: ordinary heads, under a mask of one bit per query and key."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from whorl.device import REFERENCE, default_device

from .._op import Values, operator, widen
from .._tracing import is_readable
from . import masked_torch_npu
from .bits import WORD, causal_bits, num_words, unpack
from .contract import CHUNK, OutputGradients, attention_gradients, check_order, softmax_sums

LARGEST_HEAD = 256  # channels of a head that the Triton kernels take
# Number of keys above which gathering the selected keys is faster than masking all of them, by the backend of
# `masked_attention`. The number of Triton is measured: forward and backward of DeepSeek-V3.2 with 2048 selected keys on
# an H200 take 10.6 ms masked at 4096 keys; at 8192 keys they take 39.8 ms masked and 34.4 ms sparse. (A count of
# operations would suggest 12500 keys.) The reference and unlisted backends use the same number. torch_npu has 0, since
# it has no fused attention with a bit mask.
CROSSOVER = {"triton": 6_800, "torch": 6_800, "torch_npu": 0}


def choose_attention(
    num_keys: int, topk: int = 2048, device: torch.device | str | None = None
) -> Literal["masked", "sparse"]:
    """Return which of `masked_attention` and `sparse_attention` to use for causal sequences of `num_keys` keys.

    topk: how many keys each query selects; device: where they run, None for the best device of this machine. On a
    device with a fused kernel for bit masks the answer is the one that measured faster, and up to `topk` keys, where
    all are selected, "masked". Where only sparse attention is fused it is "sparse" at every length: on Ascend
    npu_sparse_flash_attention is fused, attention with a bit mask is not.

        ops.choose_attention(4096, topk=2048, device="cuda")
    """
    device = default_device() if device is None else device
    limit = _crossover(device.split(":")[0] if isinstance(device, str) else device.type)
    return "masked" if limit and num_keys <= max(topk, limit * topk // 2048) else "sparse"


def _crossover(kind: str) -> int:
    """Return the entry of CROSSOVER for the backend that runs `masked_attention` on a device type."""
    available = [name for name, reason in masked_attention.availability(kind).items() if reason is None]
    return CROSSOVER.get(next((name for name in available if name != REFERENCE), REFERENCE), CROSSOVER[REFERENCE])


# torch.compiler.assume_constant_result sets this attribute; calling it would import the compiler and with it Triton.
_crossover._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fake_selection(indices: Tensor, num_keys: int) -> Tensor:
    return indices.new_empty(indices.shape[0], num_words(num_keys))


@operator(
    check=partial(check_order, "selection_mask"),
    forward_only=True,
    without={"torch_npu": "bit masks are for masked_attention alone, and torch_npu's attention takes none"},
    fake=_fake_selection,
)
def selection_mask(
    indices: Annotated[Tensor, "[T, K] int32, from -1 to num_keys - 1"], num_keys: Annotated[int, ">= 0"]
) -> Tensor:
    """Return the bit mask of a selection: [T, ceil(num_keys / 32)] int32, bit j % 32 of word j // 32 is key j.

    indices ascend, each key once, -1 after the last, as `sparse_attention` takes them.

        bits = ops.selection_mask(indices, num_keys=k.shape[0])
    """
    words = torch.zeros(indices.shape[0], num_words(num_keys) + 1, dtype=torch.int64, device=indices.device)
    keys = torch.where(indices >= 0, indices, num_words(num_keys) * WORD).long()
    words.scatter_add_(1, keys // WORD, torch.ones_like(keys) << (keys % WORD))
    return words[:, :-1].to(torch.int32).contiguous()  # keeps the lowest 32 bits


selection_mask.impl("triton", "masked_triton:selection")


_Q = Annotated[Tensor, "[T, G*HK, D] float"]
_K = Annotated[Tensor, "[S, HK>0, D] q"]
_V = Annotated[Tensor, "[S, HK>0, DV] q"]
_BITS = Annotated[Tensor | None, "[T, W] int32"]  # W is S / 32, rounded up
_OUT = Annotated[Tensor, "[T, G*HK, DV] q"]
_LSE = Annotated[Tensor, "[T, G*HK] fp32"]
_SCALE = Annotated[float, "> 0"]


def _check_bits(name: str, *, k: Tensor, bits: Tensor | None, **_: object) -> None:
    """Raise ValueError unless bits has a bit for every key and zeros past the last; the latter if `is_readable`."""
    if bits is None:
        return
    num_keys = k.shape[0]
    words = num_words(num_keys)
    if bits.shape[1] != words:
        raise ValueError(
            f"{name}: bits is {list(bits.shape)} {bits.dtype}, expected [{bits.shape[0]}, {words}] torch.int32; "
            "build it with selection_mask"
        )
    spare = words * WORD - num_keys
    if (
        spare
        and is_readable(bits)
        and bits.numel()
        and bool(((bits[:, -1].long() & 0xFFFFFFFF) >> (WORD - spare)).any())
    ):
        raise ValueError(f"{name}: bits has bits set past the last of {num_keys} keys, expected zeros there")


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Return an iterator over slices of tokens whose scores are at most CHUNK elements."""
    step = max(1, CHUNK // max(1, q.shape[1] * k.shape[0]))
    return (slice(start, start + step) for start in range(0, max(1, q.shape[0]), step))


def _split_groups(x: Tensor, groups: int) -> Tensor:
    """Reorder [T, HQ, C] to [HK, T * HQ / HK, C]: the query heads of one KV head together."""
    return widen(x).unflatten(1, (groups, x.shape[1] // groups)).permute(1, 0, 2, 3).flatten(1, 2)


def _merge_groups(x: Tensor, like: Tensor) -> Tensor:
    """Reorder [HK, T * HQ / HK, C] to [T, HQ, C], with T and HQ of `like`."""
    count, heads = like.shape[:2]
    return x.unflatten(1, (count, heads // x.shape[0])).permute(1, 0, 2, 3).flatten(1, 2)


def _scores(q: Tensor, k: Tensor, bits: Tensor, scale: float) -> Tensor:
    """Return the scores [HK, T * HQ / HK, S], -inf where a key is not selected."""
    groups = k.shape[1]
    selected = unpack(bits, k.shape[0]).repeat_interleave(q.shape[1] // groups, 0)
    scores = _split_groups(q, groups) @ widen(k).permute(1, 2, 0) * scale
    return scores.masked_fill(~selected, float("-inf"))


def _num_pairs(values: Values) -> int:
    """Return the number of selected (query, key) pairs; on meta tensors half of all pairs, as under a causal mask."""
    bits, num_queries, num_keys = values["bits"], values["q"].shape[0], values["k"].shape[0]
    if bits is None:
        return sum(max(0, num_keys - t) for t in range(num_queries))
    if bits.is_meta:
        return num_queries * num_keys // 2
    return sum(int(unpack(part, num_keys).sum()) for part in bits.split(256))


def _flops(values: Values) -> int:
    """Count the operations of selected pairs only, not those that a kernel spends on masked ones."""
    q, v = values["q"], values["v"]
    return 2 * _num_pairs(values) * q.shape[1] * (q.shape[2] + v.shape[2])


def _backward_flops(values: Values) -> int:
    q, v = values["q"], values["v"]
    return 2 * _num_pairs(values) * q.shape[1] * (3 * q.shape[2] + 2 * v.shape[2])


@operator(check=partial(_check_bits, "masked_attention"), flops=_flops)
def masked_attention(q: _Q, k: _K, v: _V, bits: _BITS, scale: _SCALE) -> tuple[_OUT, _LSE]:
    """Attend from every token to the keys whose bit is set in its row of `bits`.

    bits: from `selection_mask`, [T, ceil(S / 32)], zero past S; they also express causality and packed sequences. bits
    None means one dense causal sequence with the last query at the last key. scale multiplies the scores. Returns out
    and lse, the natural log-sum-exp of the scores. A token without keys gives zeros and -inf. Computed in fp32; the
    weights may be rounded to q's dtype before they multiply the values; out is rounded once. Apart from the bits no
    tensor of size T x S is allocated by the fused kernels. The result equals `sparse_attention` of absorbed queries and
    keys. Differentiable in q, k and v; both directions are deterministic, on Ascend only under
    torch.use_deterministic_algorithms.

        out, lse = ops.masked_attention(q, k, v, ops.selection_mask(indices, len(k)), 192**-0.5)
    """
    out, lse = [], []
    bits = causal_bits(q.shape[0], k.shape[0], q.device) if bits is None else bits
    for part in _chunks(q, k):
        weights, total, part_lse = softmax_sums(_scores(q[part], k, bits[part], scale))
        mean = weights @ widen(v).transpose(0, 1) / total[..., None]
        out.append(_merge_groups(mean, q[part]).to(q.dtype))
        lse.append(_merge_groups(part_lse[..., None], q[part])[..., 0])
    return torch.cat(out).contiguous(), torch.cat(lse).contiguous()


@operator(check=partial(_check_bits, "masked_attention_backward"), flops=_backward_flops)
def masked_attention_backward(
    dout: _OUT,
    q: _Q,
    k: _K,
    v: _V,
    bits: _BITS,
    out: _OUT,
    lse: _LSE,
    dlse: Annotated[Tensor | None, "[T, G*HK] fp32"] = None,
    *,
    scale: _SCALE,
) -> tuple[Annotated[Tensor, "[T, G*HK, D] q"], Annotated[Tensor, "[S, HK, D] q"], Annotated[Tensor, "[S, HK, DV] q"]]:
    """Gradients of `masked_attention` with respect to q, k and v; dlse is the gradient that reaches lse.

    The other arguments are those of `masked_attention`. Returns dq, dk and dv, contiguous, summed in fp32, rounded
    once. Tokens without keys and keys without tokens have zero gradients. The bits are the same in every run, on Ascend
    only under torch.use_deterministic_algorithms.
    """
    bits = causal_bits(q.shape[0], k.shape[0], q.device) if bits is None else bits
    groups, dq = k.shape[1], []
    dk, dv = (widen(x).transpose(0, 1) * 0 for x in (k, v))
    for part in _chunks(q, k):
        logs = torch.where(lse[part] > float("-inf"), lse[part], torch.zeros_like(lse[part]))
        weights = torch.exp(_scores(q[part], k, bits[part], scale) - _split_groups(logs[..., None], groups))
        grad = _split_groups(dout[part], groups)
        delta = (grad * _split_groups(out[part], groups)).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - _split_groups(dlse[part][..., None], groups)
        dscores = weights * (grad @ widen(v).permute(1, 2, 0) - delta) * scale
        dq.append(_merge_groups(dscores @ widen(k).transpose(0, 1), q[part]).to(q.dtype))
        dk = dk + dscores.transpose(1, 2) @ _split_groups(q[part], groups)
        dv = dv + weights.transpose(1, 2) @ grad
    first, second = (x.transpose(0, 1).to(k.dtype).contiguous() for x in (dk, dv))
    return torch.cat(dq).contiguous(), first, second


@masked_attention.gradient(save=("q", "k", "v", "bits"), save_outputs=(0, 1))
def _(grads: OutputGradients, args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor | None]:
    tensors = ("q", "k", "v", "bits")
    dq, dk, dv = attention_gradients(masked_attention_backward, tensors, grads, args, outputs)
    return {"q": dq, "k": dk, "v": dv}


def _triton_reason(q: Tensor, v: Tensor, **_: object) -> str | None:
    if max(q.shape[2], v.shape[2]) > LARGEST_HEAD:
        return f"takes heads of up to {LARGEST_HEAD} channels, got {q.shape[2]} and {v.shape[2]}"
    return None


masked_attention.impl("triton", "masked_triton:forward", accepts=_triton_reason)
masked_attention_backward.impl("triton", "masked_triton:backward", accepts=_triton_reason)
masked_attention.impl("torch_npu", "masked_torch_npu:forward", accepts=masked_torch_npu.reason)
masked_attention_backward.impl("torch_npu", "masked_torch_npu:backward", accepts=masked_torch_npu.backward_reason)
