"""Permute tokens to their experts and back, around the grouped matmuls of a mixture of experts in training.

A pair is one (token, choice), numbered token * K + choice. `permute` sorts the pairs by expert; the place of a pair is
its row in that order.
"""

from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, all_bytes, narrow, operator, widen
from . import permute_torch_npu


def _check_permute_backward(x: Tensor | None, probs: Tensor | None, **_: object) -> None:
    if probs is not None and x is None:
        raise ValueError("permute_backward: probs is given without x; pass x too, the gradient of probs needs it")


def _invert(order: Tensor) -> Tensor:
    """Return the inverse of a permutation: from the pair in each row to the row of each pair, or back."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def _gather_rows(x: Tensor, order: Tensor, top_k: int, probs: Tensor | None) -> Tensor:
    """Return rows [T * K, C]: row r is token order[r] // top_k, times the prob of pair order[r] if there are probs.

    x: [T, C]; order: [T * K], the pair in each row; top_k: K; probs: [T, K] or None.
    """
    rows = widen(x)[order // top_k]
    if probs is not None:
        rows = rows * probs.to(rows.dtype).flatten()[order].unsqueeze(-1)
    return narrow(rows, x.dtype).contiguous()


def _sum_rows(rows: Tensor, places: Tensor, probs: Tensor | None) -> Tensor:
    """Return y[t] = sum over j, in order, of probs[t, j] * rows[places[t, j]]."""
    wide = widen(rows)
    total: Tensor | None = None
    for choice in range(places.shape[1]):
        part = wide[places[:, choice]]
        if probs is not None:
            part = part * probs[:, choice, None].to(wide.dtype)
        total = part if total is None else total + part
    assert total is not None
    return narrow(total, rows.dtype).contiguous()


def _dots(x: Tensor, rows: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dot products of x[t] and rows[places[t, j]], which are the gradient of probs."""
    return narrow((widen(x).unsqueeze(1) * widen(rows)[places]).sum(-1), dtype)


_ROWS = Annotated[Tensor, "[T*K, C] float"]
_PLACES = Annotated[Tensor, "[T, K>0] int, from 0 to T*K - 1"]
_PROBS = Annotated[Tensor | None, "[T, K] float"]
_PROBS_GRAD = Annotated[Tensor | None, "[T, K] probs"]


@operator()
def permute(
    x: Annotated[Tensor, "[T, C] float"],
    ids: Annotated[Tensor, "[T, K>0] int, from 0 to num_experts - 1"],
    num_experts: Annotated[int, "> 0"],
    probs: _PROBS = None,
) -> tuple[
    Annotated[Tensor, "[T*K, C] x"], Annotated[Tensor, "[T, K] int32"], Annotated[Tensor, "[num_experts] int32"]
]:
    """Copy each token once per chosen expert and sort the copies by expert, in token order within an expert.

    ids: the experts that `route` chose; probs: by which the copies are multiplied in fp32 and rounded once. Returns
    rows, contiguous; places, the row of each (token, choice); counts, the rows of each expert, 0 for one without
    tokens. Differentiable in x and probs.

        rows, places, counts = ops.permute(x, ids, num_experts=64)
    """
    flat = ids.flatten().long()
    order = flat.sort(stable=True).indices
    counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return _gather_rows(x, order, ids.shape[1], probs), _invert(order).view(ids.shape).int().contiguous(), counts


@operator(check=_check_permute_backward, absent={1: "probs"})
def permute_backward(
    drows: _ROWS, places: _PLACES, x: Annotated[Tensor | None, "[T, C] drows"] = None, probs: _PROBS = None
) -> tuple[Annotated[Tensor, "[T, C] drows"], _PROBS_GRAD]:
    """Gradients of `permute`: dx and, with probs, dprobs, else None.

    drows: the gradient of rows; places: as the forward returned them; x is needed only with probs. Computed in fp32;
    the choices of a token are added in order and rounded once.
    """
    index = places.long()
    dx = _sum_rows(drows, index, probs)
    if probs is None or x is None:
        return dx, None
    return dx, _dots(x, drows, index, probs.dtype)


@operator()
def unpermute(rows: _ROWS, places: _PLACES, probs: _PROBS = None) -> Annotated[Tensor, "[T, C] rows"]:
    """Sum the rows of each token: y[t] = sum over j of probs[t, j] * rows[places[t, j]].

    places: as `permute` returns them; probs: 1 when None. Returns y contiguous. Computed in fp32; the choices of a
    token are added in order and rounded once. Differentiable in rows and probs.

        y = ops.unpermute(rows, places, weights)
    """
    return _sum_rows(rows, places.long(), probs)


def _unpermute_backward_bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of all tensors, without rows where there are no probs: they are not read then."""
    return all_bytes(values if values.get("probs") is not None else values | {"rows": None}, outputs)


@operator(absent={1: "probs"}, bytes=_unpermute_backward_bytes)
def unpermute_backward(
    dy: Annotated[Tensor, "[T, C] rows"], rows: _ROWS, places: _PLACES, probs: _PROBS = None
) -> tuple[Annotated[Tensor, "[T*K, C] rows"], _PROBS_GRAD]:
    """Gradients of `unpermute`: drows and, with probs, dprobs, else None. Computed in fp32, rounded once."""
    index = places.long()
    drows = _gather_rows(dy, _invert(index.flatten()), index.shape[1], probs)
    return drows, None if probs is None else _dots(dy, rows, index, probs.dtype)


@permute.gradient(save=("x", "probs"), save_outputs=(1,))
def _(grads: tuple[Tensor | None, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor | None]:
    dx, dprobs = permute_backward(grads[0], outputs[1], args["x"], args.get("probs"), backend=args["backend"])
    return {"x": dx, "probs": dprobs}


@unpermute.gradient(save=("rows", "places", "probs"))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor | None]:
    drows, dprobs = unpermute_backward(
        grads[0], args["rows"], args["places"], args.get("probs"), backend=args["backend"]
    )
    return {"rows": drows, "probs": dprobs}


# A CPU moves rows as torch does: these are here for gradients of what runs on its kernels.
permute.impl("cpp", takes_fp64=False)(permute.reference)
permute_backward.impl("cpp", takes_fp64=False)(permute_backward.reference)
unpermute.impl("cpp", takes_fp64=False)(unpermute.reference)
unpermute_backward.impl("cpp", takes_fp64=False)(unpermute_backward.reference)
permute.impl("triton", "permute_triton:permute")
permute_backward.impl("triton", "permute_triton:permute_backward")
unpermute.impl("triton", "permute_triton:sum_rows")
unpermute_backward.impl("triton", "permute_triton:unpermute_backward")
permute.impl("torch_npu", "permute_torch_npu:permute", accepts=permute_torch_npu.permute_reason)
permute_backward.impl(
    "torch_npu", "permute_torch_npu:permute_backward", accepts=permute_torch_npu.permute_backward_reason
)
for _op in (unpermute, unpermute_backward):
    _op.impl("torch_npu", f"permute_torch_npu:{_op.name}", accepts=permute_torch_npu.unpermute_reason, takes_fp64=False)


_CASES: list[Values] = [
    {"tokens": (1,), "hidden": 8, "experts": 1, "k": 1},
    {"tokens": (5,), "hidden": 24, "experts": 4, "k": 2, "probs": torch.float32},
    {"tokens": (9,), "hidden": 70, "experts": 8, "k": 3, "probs": torch.float32, "scale": 0.01},
    {"tokens": (7,), "hidden": 40, "experts": 16, "k": 2},  # most experts empty
    {"tokens": (0,), "hidden": 16, "experts": 3, "k": 2},
    {"tokens": (0,), "hidden": 16, "experts": 3, "k": 2, "probs": torch.float32},
    {"tokens": (11,), "hidden": 33, "experts": 5, "k": 5, "sliced": True},
    {"tokens": (3,), "hidden": 2050, "experts": 4, "k": 4, "probs": torch.float32, "sliced": True},
]
_DEEPSEEK = {"tokens": (4096,), "hidden": 7168, "experts": 64, "k": 8}
_BENCH: list[Values] = [_DEEPSEEK, _DEEPSEEK | {"probs": torch.float32}, {**_DEEPSEEK, "experts": 8, "k": 2}]


_WORDS = {"hidden": "C", "experts": "num_experts", "k": "K"}


def _make(draw: Draw, tokens: tuple[int], experts: int, k: int) -> Values:
    return {"ids": torch.rand(*tokens, experts, device=draw.device).argsort(-1)[:, :k].int()}


def _make_rows(draw: Draw, tokens: tuple[int], k: int) -> Values:
    return {"places": torch.randperm(tokens[0] * k, device=draw.device).view(*tokens, k).int()}


def _make_permute_backward(draw: Draw, tokens: tuple[int], k: int, probs: torch.dtype | None = None) -> Values:
    return {"x": probs is not None, **_make_rows(draw, tokens, k)}


permute.inputs(cases=_CASES, bench=_BENCH, words=_WORDS)(_make)
permute_backward.inputs(cases=_CASES, bench=_BENCH, words=_WORDS)(_make_permute_backward)
unpermute.inputs(cases=_CASES, bench=_BENCH, words=_WORDS)(_make_rows)
unpermute_backward.inputs(cases=_CASES, bench=_BENCH, words=_WORDS)(_make_rows)
