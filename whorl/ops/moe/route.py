"""The router of a mixture of experts: it chooses the k experts of each token and their weights."""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, operator, widen
from . import route_torch_npu


def _check_groups(logits: Tensor, k: int, num_groups: int, top_groups: int, **_: object) -> None:
    count = logits.shape[1]
    if num_groups < 1 or count % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"route: num_groups is {num_groups} and top_groups {top_groups} for {count} experts, "
            f"expected num_groups to divide {count} and top_groups from 1 to num_groups"
        )
    if not 1 <= k <= count // num_groups * top_groups:
        raise ValueError(f"route: k is {k}, expected 1 to {count // num_groups * top_groups}, the number of candidates")


def _top_ids(x: Tensor, k: int) -> Tensor:
    """Return the ids of the k highest values along the last dim, ties to the lowest id (topk promises no order)."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k]


def _mask_to_top_groups(ranking: Tensor, num_groups: int, top_groups: int, sum_best_two: bool) -> Tensor:
    """Return `ranking` with every expert outside the `top_groups` best groups set to minus infinity."""
    grouped = ranking.unflatten(-1, (num_groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1) if sum_best_two else grouped.amax(-1)
    is_kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _top_ids(best, top_groups), True)
    return grouped.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(-2)


def _scores(wide: Tensor, scoring: str) -> Tensor:
    """Return the softmax or sigmoid of logits [T, E] in the dtype of accumulation."""
    # Not torch.sigmoid: on a CPU it computes the tail of a row with a scalar sigmoid, whose bits differ from those of
    # its vectorised one.
    return torch.softmax(wide, -1) if scoring == "softmax" else 1 / (1 + torch.exp(-wide))


@operator(check=_check_groups)
def route(
    logits: Annotated[Tensor, "[T, E] float"],
    k: int,
    bias: Annotated[Tensor | None, "[E] float, constant; it affects only the choice: pass bias.detach()"] = None,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = True,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Annotated[Tensor, "[T, k] fp32"], Annotated[Tensor, "[T, k] int32"]]:
    """Choose the k experts of each token and compute their weights.

    bias: added to the scores for the choice only. Returns weights and ids in order of score + bias, the highest first,
    ties to the lowest id. Scores
    are the softmax or sigmoid of the logits in fp32; the weights are the scores of the chosen experts, without bias.
    With `num_groups` > 1 the E experts are divided into as many groups of neighbours, and only the `top_groups` best
    groups are considered: a group ranks by its best expert or, with a bias, by the sum of its best two
    (DeepSeek-V2, -V3). `renormalize` divides the weights by their sum; `scale` multiplies them last. The weights are
    differentiable in the logits for a fixed choice; bias has no gradient.

        weights, ids = ops.route(logits, k=8)
    """
    scores = _scores(widen(logits), scoring)
    ranking = scores if bias is None else scores + bias.to(scores.dtype)
    if num_groups > 1:
        ranking = _mask_to_top_groups(ranking, num_groups, top_groups, sum_best_two=bias is not None)
    ids = _top_ids(ranking, k)
    weights = scores.gather(-1, ids)
    if renormalize:
        total = weights[:, :1]
        for choice in range(1, k):  # one by one: the order of additions in torch.sum may depend on the number of tokens
            total = total + weights[:, choice : choice + 1]
        weights = weights / total.clamp_min(1e-20)
    return (weights * scale).contiguous(), ids.int().contiguous()


@operator()
def route_backward(
    dweights: Annotated[Tensor, "[T, k] float"],
    logits: Annotated[Tensor, "[T, E] float"],
    ids: Annotated[Tensor, "[T, k] int, from 0 to E - 1"],
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
) -> Annotated[Tensor, "[T, E] logits"]:
    """Gradient of the weights of `route` with respect to the logits, contiguous.

    ids: as `route` returned them, each at most once per token. Computed in fp32, rounded once.
    """
    scores = _scores(widen(logits), scoring)
    index = ids.long()
    chosen = scores.gather(-1, index)
    grads = dweights.to(scores.dtype) * scale
    if renormalize:
        total = chosen.sum(-1, keepdim=True)
        divisor = total.clamp_min(1e-20)
        # Subtract before multiplying: with equal gradients, or with one expert, the result is exactly 0.
        differences = ((grads.unsqueeze(-1) - grads.unsqueeze(-2)) * (chosen / divisor).unsqueeze(-2)).sum(-1)
        grads = torch.where(total >= 1e-20, differences, grads) / divisor
    dscores = torch.zeros_like(scores).scatter(-1, index, grads)
    inner = (grads * chosen).sum(-1, keepdim=True) if scoring == "softmax" else dscores * scores
    return (scores * (dscores - inner)).to(logits.dtype).contiguous()


@route.gradient(save=("logits",), save_outputs=(1,))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    options = {name: args[name] for name in ("scoring", "renormalize", "scale", "backend")}
    return {"logits": route_backward(grads[0], args["logits"], outputs[1], **options)}


def _triton_reason(logits: Tensor, **_: object) -> str | None:
    return None if logits.shape[1] <= 4096 else f"{logits.shape[1]} experts do not fit one program (4096)"


NO_GROUPS = "it does not choose among groups of experts"


def _cpp_reason(num_groups: int, **_: object) -> str | None:
    return None if num_groups == 1 else NO_GROUPS


route.impl("cpp", "whorl.ops.cpu.moe:route", accepts=_cpp_reason)
route_backward.impl("cpp", takes_fp64=False)(route_backward.reference)
route.impl("triton", "route_triton:forward", accepts=_triton_reason)
route_backward.impl("triton", "route_triton:backward", accepts=_triton_reason)
route.impl("torch_npu", "route_torch_npu:route", accepts=route_torch_npu.reason, takes_fp64=False)
# torch_npu has its own gradient since 2.11 but does not document the formula, so on NPU tensors the reference runs as a
# few small torch operators.
route_backward.impl("torch_npu", takes_fp64=False)(route_backward.reference)


_CASES: list[Values] = [
    {"tokens": (1,), "experts": 4, "k": 1},
    {"tokens": (5,), "experts": 16, "k": 4},
    {"tokens": (3,), "experts": 8, "k": 8, "scale": 0.01, "renormalize": False},
    {"tokens": (0,), "experts": 8, "k": 2},
    {"tokens": (6,), "experts": 60, "k": 4, "sliced": True, "weight_scale": 2.5},
    {"tokens": (9,), "experts": 32, "k": 6, "num_groups": 8, "top_groups": 3, "bias": True, "scoring": "sigmoid"},
    {"tokens": (4,), "experts": 24, "k": 3, "num_groups": 4, "top_groups": 2},
    {"tokens": (4,), "experts": 12, "k": 3, "scoring": "sigmoid", "weight_scale": 2.5, "renormalize": False},
    {"tokens": (9,), "experts": 40, "k": 6, "num_equal": 4},
]
_BENCH: list[Values] = [{"tokens": (tokens,), "experts": 128, "k": 8} for tokens in (1, 64, 8192)]


@route.inputs(cases=_CASES, bench=_BENCH)
def _(
    draw: Draw, tokens: tuple[int], experts: int, bias: bool = False, weight_scale: float = 1.0, num_equal: int = 1
) -> Values:
    """num_equal: experts that have the same logit."""
    # Logits that are multiples of 1/64 are exact in every dtype, so that all dtypes choose the same experts.
    width = experts + draw.gap
    levels = width * num_equal // 2 if num_equal > 1 else width  # so many that tokens do not all have the same weights
    steps = torch.stack([torch.randperm(levels)[:width] for _ in range(tokens[0] or 1)])[: tokens[0]]
    logits = (draw.scale * (steps // num_equal - experts / 2) / 16).to(draw.dtype).to(draw.device)[:, :experts]
    offsets = torch.arange(experts, device=draw.device).to(draw.dtype) / 64 if bias else None
    return {"logits": logits, "bias": offsets, "scale": weight_scale}


@route_backward.inputs(cases=_CASES, bench=_BENCH[1:])
def _(draw: Draw, **case: Any) -> Values:
    values = route.draw(draw, **case)
    ids = torch.rand(values["logits"].shape, device=draw.device).argsort(-1)[:, : values["k"]].int()
    return {**values, "dweights": draw.wide, "ids": ids}
