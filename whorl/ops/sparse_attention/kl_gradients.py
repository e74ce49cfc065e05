"""The indexer's loss and gradients straight from the main attention: `kl.py`'s two halves as one operator.

No [T, K] or [T, S] target is asked for, so a device that computes target, loss and gradients in one kernel may. Where
ranks add their targets up in between, the halves are called one after the other.
"""

from typing import Any

import torch
from torch import Tensor

from .._op import Values, operator
from .._tracing import is_readable
from . import kl_torch_npu
from .indexer import check_bounds, check_indexer, chunks, full_bounds, wide_dtype
from .kl import (
    check_attention,
    check_kl_indices,
    dense_indexer_kl,
    dense_indexer_target,
    indexer_kl,
    indexer_target,
    make_dense_kl,
    make_dense_target,
    make_kl,
    make_target,
    triton_reason,
    triton_target_reason,
)

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def check_sizes(name: str, q: Tensor, k: Tensor, main_q: Tensor, main_k: Tensor) -> None:
    if q.shape[:1] + k.shape[:1] != main_q.shape[:1] + main_k.shape[:1]:
        raise ValueError(
            f"{name}: q and k are of {len(q)} queries and {len(k)} keys, main_q and main_k of {len(main_q)} and "
            f"{len(main_k)}, expected the same"
        )


def is_causal_choice(indices: Tensor, num_keys: int) -> Tensor:
    """[1] bool: whether every row has a key and none past the query's own, the last query at the last key."""
    own = torch.arange(num_keys - indices.shape[0], num_keys, device=indices.device)[:, None]
    return ((indices <= own).all() & (indices[:, :1] >= 0).all())[None]


def _check(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    main_q: Tensor,
    main_k: Tensor,
    main_lse: Tensor,
    scale: float,
    grad_scale: float,
    causal: bool,
    deterministic: bool,
) -> None:
    name = "indexer_kl_gradients"
    check_indexer(name, q, k, weights)
    check_sizes(name, q, k, main_q, main_k)
    check_attention(name, main_q, main_lse)
    if main_k.dim() != 3 or main_k.shape[1:] != (1, main_q.shape[2]) or main_k.dtype != main_q.dtype:
        raise ValueError(
            f"{name}: main_k is {list(main_k.shape)} {main_k.dtype}, expected [S, 1, {main_q.shape[2]}] {main_q.dtype}"
        )
    check_kl_indices(name, indices, q.shape[0], k.shape[0])
    if causal and is_readable(indices) and indices.numel() and not bool(is_causal_choice(indices, k.shape[0])):
        raise ValueError(f"{name}: causal is True, but a row of indices is empty or has a key past the query's own")


def _fake(q: Tensor, k: Tensor, weights: Tensor, **_: object) -> Results:
    wide = wide_dtype(q)
    return (
        q.new_empty(1, dtype=wide),
        q.new_empty(q.shape),
        k.new_empty(k.shape, dtype=wide),
        weights.new_empty(weights.shape),
    )


def _flops(values: Values) -> int:
    pairs, (_, heads, dim) = values["indices"].numel(), values["q"].shape
    return pairs * (6 * heads * dim + 2 * values["main_q"].shape[1] * values["main_q"].shape[2])


@operator(check=_check, forward_only=True, totals=(0,), fake=_fake, flops=_flops)
def indexer_kl_gradients(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    main_q: Tensor,
    main_k: Tensor,
    main_lse: Tensor,
    *,
    scale: float,
    grad_scale: float = 1.0,
    causal: bool = False,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`indexer_kl` of `indexer_target`: the loss, summed over queries, and its gradients, in one call.

    q [T, HI, D], k [S, D], weights [T, HI], indices [T, K]: the indexer's; main_q [T, H, D'], main_k [S, 1, D'],
    main_lse [T, H], scale: the attention's. Returns loss [1] fp32 and the derivatives of grad_scale * loss: dq and
    dweights like q and weights, dk [S, D] fp32. causal: the caller's word that every row lists a key and none past its
    own, the last query at the last key; believed without a look off the CPU, where looking would wait for the device.
    Ascend's fused kernel, which drops later keys and does not say what an empty row gives, runs on that word only.
    """
    target = indexer_target.reference(main_q, main_k, indices, main_lse, scale)
    loss, dq, dk, dweights = indexer_kl.reference(
        q, k, weights, indices, target, grad_scale=grad_scale, deterministic=deterministic
    )
    return loss.sum()[None], dq, dk, dweights


def _check_dense(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    main_q: Tensor,
    main_k: Tensor,
    main_lse: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    key_positions: Tensor | None,
    scale: float,
    grad_scale: float,
) -> None:
    name = "dense_indexer_kl_gradients"
    check_indexer(name, q, k, weights)
    check_sizes(name, q, k, main_q, main_k)
    check_attention(name, main_q, main_lse)
    heads, dim = main_q.shape[1:]
    if main_k.dim() != 3 or main_k.shape[2] != dim or heads % max(1, main_k.shape[1]) or main_k.dtype != main_q.dtype:
        raise ValueError(
            f"{name}: main_k is {list(main_k.shape)} {main_k.dtype}, expected [S, HK, {dim}] {main_q.dtype} with HK "
            f"dividing {heads}"
        )
    check_bounds(name, q.shape[0], k.shape[0], starts, ends, key_positions)


def _dense_flops(values: Values) -> int:
    (tokens, heads, dim), main = values["q"].shape, values["main_q"]
    return tokens * values["k"].shape[0] * (6 * heads * dim + 2 * main.shape[1] * main.shape[2])


@operator(check=_check_dense, forward_only=True, totals=(0,), fake=_fake, flops=_dense_flops)
def dense_indexer_kl_gradients(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    main_q: Tensor,
    main_k: Tensor,
    main_lse: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    *,
    scale: float,
    grad_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`dense_indexer_kl` of `dense_indexer_target`: `indexer_kl_gradients` over every key a query sees.

    main_k: [S, HK, D'], HK key heads; bounds as in `index_scores`; the rest as in `indexer_kl_gradients`. Queries go
    through in chunks: no [T, S] matrix is whole in memory. dk is added in a fixed order, on Ascend in the device's.
    """
    return _in_chunks(
        dense_indexer_target.reference,
        dense_indexer_kl.reference,
        (q, k, weights, main_q, main_k, main_lse, starts, ends, key_positions),
        scale,
        grad_scale,
    )


def _in_chunks(target_of: Any, kl_of: Any, given: tuple[Any, ...], scale: float, grad_scale: float) -> Results:
    q, k, weights, main_q, main_k, main_lse, starts, ends, key_positions = given
    starts, ends = full_bounds(q.shape[0], k.shape[0], starts, ends, q.device)
    wide = wide_dtype(q)
    total, dk = (torch.zeros(shape, dtype=wide, device=q.device) for shape in ((1,), k.shape))
    dq, dweights = q.new_empty(q.shape), weights.new_empty(weights.shape)
    for rows in chunks(q.shape[0], k.shape[0]):
        bounds = (starts[rows], ends[rows], key_positions)
        target = target_of(main_q[rows], main_k, main_lse[rows], scale, *bounds)
        loss, dq[rows], more, dweights[rows] = kl_of(q[rows], k, weights[rows], target, *bounds, grad_scale=grad_scale)
        total = total + loss.sum()
        dk = dk + more
    return total, dq, dk, dweights


# ---- backends


def _triton_reason(q: Tensor, main_q: Tensor, **_: object) -> str | None:
    return triton_reason(q) or triton_target_reason(main_q)


@indexer_kl_gradients.impl("triton", accepts=_triton_reason)
def _(q, k, weights, indices, main_q, main_k, main_lse, scale, grad_scale, causal, deterministic):  # type: ignore[no-untyped-def]
    from . import kl_triton

    target = kl_triton.target(main_q, main_k[:, 0], indices, main_lse, scale)
    loss, *gradients = kl_triton.kl(q, k, weights, indices, target, grad_scale, deterministic)
    return loss.sum()[None], *gradients


@dense_indexer_kl_gradients.impl("triton", accepts=_triton_reason)
def _(q, k, weights, main_q, main_k, main_lse, starts, ends, key_positions, scale, grad_scale):  # type: ignore[no-untyped-def]
    from . import dense_kl_triton

    given = (q, k, weights, main_q, main_k, main_lse, starts, ends, key_positions)
    return _in_chunks(dense_kl_triton.target, dense_kl_triton.kl, given, scale, grad_scale)


indexer_kl_gradients.impl("torch_npu", accepts=kl_torch_npu.reason)(kl_torch_npu.gradients)
dense_indexer_kl_gradients.impl("torch_npu", accepts=kl_torch_npu.dense_reason)(kl_torch_npu.dense_gradients)


# ---- cases


def _main_case(case: Values, heads: int, dim: int) -> Values:
    """What the attention's tensors are made by: ordinary numbers, whatever the indexer's are."""
    own = ("grad_scale", "deterministic", "scale")
    return {name: value for name, value in case.items() if name not in own} | {"heads": heads, "dim": dim}


def _beside(values: Values, main: Values) -> Values:
    """The attention is sharp and the indexer is not, so that the loss is no small rest of large terms."""
    del values["target"]
    named = {"main_q": 4 * main["q"], "main_k": main["k"], "main_lse": main["lse"], "scale": main["scale"]}
    return values | named


def _make(main_heads: int = 2, main_dim: int = 24, causal: bool = False, **case: Any) -> Values:
    values = _beside(make_kl(**case), make_target(**_main_case(case, main_heads, main_dim)))
    if causal:
        values["indices"] = _causal_choice(values["indices"], values["k"].shape[0])
    return values | {"causal": causal}


def _causal_choice(indices: Tensor, num_keys: int) -> Tensor:
    """The first keys of each query, as many as there are places and keys that it sees."""
    own = torch.arange(num_keys - indices.shape[0], num_keys, device=indices.device)[:, None]
    first = torch.arange(indices.shape[1], device=indices.device).expand(indices.shape)
    return torch.where(first <= own, first, -1).int()


def _make_dense(main_heads: int = 2, main_dim: int = 24, key_heads: int = 1, **case: Any) -> Values:
    main = make_dense_target(**_main_case(case, main_heads, main_dim), key_heads=key_heads)
    return _beside(make_dense_kl(**case), main)


# The halves have the awkward cases; these have queries and keys enough for errors to be compared.
_CASES: list[Values] = [
    {"tokens": (17,), "keys": 37, "heads": 4, "dim": 16, "k": 20, "grad_scale": 0.25},
    {"tokens": (8,), "keys": 60, "heads": 3, "dim": 24, "k": 33, "sliced": True},
    {"tokens": (0,), "keys": 9, "heads": 2, "dim": 8, "k": 4},
    {"tokens": (16,), "keys": 40, "heads": 5, "dim": 40, "k": 17, "scale": 0.01},
    {"tokens": (16,), "keys": 30, "heads": 20, "dim": 16, "k": 40, "empty": True},
]
indexer_kl_gradients.inputs(
    cases=[
        *_CASES,
        {"tokens": (16,), "keys": 40, "heads": 4, "dim": 16, "k": 20, "causal": True},
        {"tokens": (17,), "keys": 37, "heads": 4, "dim": 16, "k": 20, "deterministic": True},
    ],
    bench=[{"tokens": (4096,), "keys": 8192, "heads": 64, "dim": 128, "k": 2048, "main_heads": 128, "main_dim": 576}],
)(_make)
dense_indexer_kl_gradients.inputs(
    cases=[
        *_CASES,
        {"tokens": (16,), "keys": 30, "heads": 4, "dim": 16, "shuffled": True},
        {"tokens": (16,), "keys": 30, "heads": 4, "dim": 24, "main_heads": 4, "key_heads": 4},
    ],
    bench=[
        {"tokens": (1024,), "keys": 8192, "heads": 64, "dim": 128, "main_heads": 128, "main_dim": 192, "key_heads": 128}
    ],
)(_make_dense)
