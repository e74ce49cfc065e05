"""Choosing the experts of each token."""

from typing import Any, Literal

import torch
from torch import Tensor

from .._check import INTEGERS, check_range
from .._draw import Draw, Sizes
from .._op import Values, operator, widen
from . import route_torch_npu


def _check_route(logits: Tensor, k: int, bias: Tensor | None, num_groups: int, top_groups: int, **_: object) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"route: logits is {list(logits.shape)} {logits.dtype}, expected [T, E] floating point")
    count = logits.shape[1]
    if bias is not None and (bias.shape != (count,) or not bias.is_floating_point()):
        raise ValueError(f"route: bias is {list(bias.shape)} {bias.dtype}, expected [{count}] floating point")
    if num_groups < 1 or count % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"route: {count} experts in {num_groups} groups of which {top_groups} are kept: "
            "groups must be of one size, and at least one and at most all of them kept"
        )
    if bias is not None and bias.requires_grad:
        raise ValueError("route: bias only chooses and gets no gradient, pass bias.detach()")
    if not 1 <= k <= count // num_groups * top_groups:
        raise ValueError(f"route: k is {k}, expected 1 to {count // num_groups * top_groups}, the experts to choose of")


def _highest(x: Tensor, k: int) -> Tensor:
    """Ids of the k highest along the last dim, ties to the lowest id; topk promises no order."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k]


def _in_top_groups(choice: Tensor, num_groups: int, top_groups: int, pairs: bool) -> Tensor:
    """`choice` with everything outside the best groups at minus infinity."""
    grouped = choice.unflatten(-1, (num_groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1) if pairs else grouped.amax(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _highest(best, top_groups), True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)


def _fake_route(logits: Tensor, k: int, **_: object) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=wide), logits.new_empty(shape, dtype=torch.int32)


def _scores(wide: Tensor, scoring: str) -> Tensor:
    # exp, not sigmoid: torch's vectorised sigmoid and its scalar one, used for the rest of a row, differ in bits.
    return torch.softmax(wide, -1) if scoring == "softmax" else 1 / (1 + torch.exp(-wide))


@operator(check=_check_route, fake=_fake_route)
def route(
    logits: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = True,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token and their weights.

    logits: [T, E] bf16, fp16 or fp32; bias: [E], added to the scores for choosing only; returns weights [T, k] fp32 and
    ids [T, k] int32, the highest score first, ties to the lowest id. Scores are softmax or sigmoid of the logits in
    fp32. With `num_groups` > 1 experts are chosen from the `top_groups` best groups; a group is as good as its best
    expert, with a bias as its best two together (DeepSeek-V2, -V3). `renormalize` divides the weights by their sum;
    `scale` multiplies them last. The weights are differentiable in the logits, the choice held; bias has no gradient.
    """
    scores = _scores(widen(logits), scoring)
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if num_groups > 1:
        choice = _in_top_groups(choice, num_groups, top_groups, pairs=bias is not None)
    ids = _highest(choice, k)
    weights = scores.gather(-1, ids)
    if renormalize:
        total = weights[:, :1]
        for slot in range(1, k):  # in order: a sum's own order may depend on the number of rows
            total = total + weights[:, slot : slot + 1]
        weights = weights / total.clamp_min(1e-20)
    return (weights * scale).contiguous(), ids.int().contiguous()


def _check_route_backward(
    dweights: Tensor, logits: Tensor, ids: Tensor, scoring: str, renormalize: bool, scale: float
) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"route_backward: logits is {list(logits.shape)} {logits.dtype}, expected [T, E] floating point"
        )
    if ids.dim() != 2 or ids.shape[0] != logits.shape[0] or dweights.shape != ids.shape:
        raise ValueError(
            f"route_backward: dweights is {list(dweights.shape)}, ids {list(ids.shape)}, expected two of "
            f"[{logits.shape[0]}, k]"
        )
    if not dweights.is_floating_point() or ids.dtype not in INTEGERS:
        raise ValueError(
            f"route_backward: dweights is {dweights.dtype}, ids {ids.dtype}, expected floating point and int32 or int64"
        )
    check_range("route_backward", "ids", ids, logits.shape[1])


@operator(check=_check_route_backward)
def route_backward(
    dweights: Tensor,
    logits: Tensor,
    ids: Tensor,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """Gradient of the weights of `route` with respect to the logits, in their dtype: [T, E], contiguous.

    dweights: [T, k] floating point; ids: [T, k], as `route` chose them, none twice in a row. In fp32, rounded once.
    """
    scores = _scores(widen(logits), scoring)
    at = ids.long()
    chosen = scores.gather(-1, at)
    grads = dweights.to(scores.dtype) * scale
    if renormalize:
        total = chosen.sum(-1, keepdim=True)
        least = total.clamp_min(1e-20)
        # Differences first: where all are alike, or there is one expert, the gradient is exactly 0.
        apart = ((grads.unsqueeze(-1) - grads.unsqueeze(-2)) * (chosen / least).unsqueeze(-2)).sum(-1)
        grads = torch.where(total >= 1e-20, apart, grads) / least
    dscores = torch.zeros_like(scores).scatter(-1, at, grads)
    inner = (grads * chosen).sum(-1, keepdim=True) if scoring == "softmax" else dscores * scores
    return (scores * (dscores - inner)).to(logits.dtype).contiguous()


@route.gradient(save=("logits",), save_outputs=(1,))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    how = {name: args[name] for name in ("scoring", "renormalize", "scale", "backend")}
    return {"logits": route_backward(grads[0], args["logits"], outputs[1], **how)}


def _triton_reason(logits: Tensor, **_: object) -> str | None:
    if logits.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    return None if logits.shape[1] <= 4096 else f"{logits.shape[1]} experts do not fit one program (4096)"


route.impl("triton", "route_triton:forward", accepts=_triton_reason)
route_backward.impl("triton", "route_triton:backward", accepts=_triton_reason)
route.impl("torch_npu", "route_torch_npu:route", accepts=route_torch_npu.reason)
# torch_npu's gradient came in 2.11 and does not say its formula: on NPU tensors this is a few small operators of torch.
route_backward.impl("torch_npu", accepts=route_torch_npu.backward_reason)(route_backward.reference)


_CASES: list[Values] = [
    {"tokens": (1,), "experts": 4, "k": 1},
    {"tokens": (5,), "experts": 16, "k": 4},
    {"tokens": (3,), "experts": 8, "k": 8, "scale": 0.01, "renormalize": False},
    {"tokens": (0,), "experts": 8, "k": 2},
    {"tokens": (6,), "experts": 60, "k": 4, "sliced": True, "weight_scale": 2.5},
    {"tokens": (9,), "experts": 32, "k": 6, "num_groups": 8, "top_groups": 3, "bias": True, "scoring": "sigmoid"},
    {"tokens": (4,), "experts": 24, "k": 3, "num_groups": 4, "top_groups": 2},
    {"tokens": (4,), "experts": 12, "k": 3, "scoring": "sigmoid", "weight_scale": 2.5, "renormalize": False},
]
_BENCH: list[Values] = [{"tokens": (tokens,), "experts": 128, "k": 8} for tokens in (1, 64, 8192)]


def _make(
    draw: Draw, tokens: Sizes, experts: int, k: int, bias: bool = False, weight_scale: float = 1.0, **options: Any
) -> Values:
    # Logits a multiple of 1/64 apart are exact in every dtype, so all of them choose the same experts.
    steps = torch.stack([torch.randperm(experts + 4 * draw.sliced) for _ in range(tokens[0] or 1)])[: tokens[0]]
    logits = (draw.scale * (steps - experts / 2) / 16).to(draw.dtype).to(draw.device)[:, :experts]
    offsets = torch.arange(experts, device=draw.device).to(draw.dtype) / 64 if bias else None
    return {"logits": logits, "k": k, "bias": offsets, "scale": weight_scale, **options}


def _make_backward(draw: Draw, **case: Any) -> Values:
    values = _make(draw, **case)
    logits, k = values["logits"], values["k"]
    how: Values = {name: values[name] for name in ("scoring", "renormalize", "scale") if name in values}
    dweights = torch.randn(logits.shape[0], k, device=logits.device).to(draw.wide)
    ids = torch.rand(logits.shape, device=logits.device).argsort(-1)[:, :k].int()
    return {"dweights": dweights, "logits": logits, "ids": ids, **how}


route.inputs(cases=_CASES, bench=_BENCH)(_make)
route_backward.inputs(cases=_CASES, bench=_BENCH[1:])(_make_backward)
