"""Mixture of experts: choosing experts for each token, and running them at inference."""

from typing import Any, Literal

import torch
from torch import Tensor

from . import moe_torch_npu
from ._check import INTEGERS, check_range
from ._op import Values, operator, widen
from .linear import multiply_rows, multiply_tiles

EXPERT_TILE = 16  # rows of an expert's products in the prompt class


def _check_route(
    logits: Tensor,
    k: int,
    bias: Tensor | None,
    scoring: str,
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> None:
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


def _check_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, rows: str) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"experts: x is {list(x.shape)} {x.dtype}, expected [T, C] floating point")
    count, hidden = x.shape
    if (
        gate_up.dim() != 3
        or gate_up.shape[1] % 2
        or gate_up.shape[2] != hidden
        or down.shape != (gate_up.shape[0], hidden, gate_up.shape[1] // 2)
    ):
        raise ValueError(
            f"experts: gate_up is {list(gate_up.shape)}, down {list(down.shape)}, expected [E, 2F, {hidden}] and "
            f"[E, {hidden}, F]"
        )
    if not gate_up.dtype == down.dtype == x.dtype:
        raise ValueError(f"experts: gate_up is {gate_up.dtype}, down {down.dtype}, expected x's {x.dtype}")
    if weights.dim() != 2 or weights.shape != ids.shape or weights.shape[0] != count:
        raise ValueError(
            f"experts: weights is {list(weights.shape)}, ids {list(ids.shape)}, expected two of [{count}, K]"
        )
    if not weights.is_floating_point() or ids.dtype not in INTEGERS:
        raise ValueError(
            f"experts: weights is {weights.dtype}, ids {ids.dtype}, expected floating point and int32 or int64"
        )
    check_range("experts", "ids", ids, gate_up.shape[0])


def _activate(both: Tensor, dtype: torch.dtype) -> Tensor:
    """silu(gate) * up, rounded to `dtype` as what the second product reads. exp, not sigmoid: see `route`."""
    gate, up = both.chunk(2, -1)
    hidden = gate / (1 + torch.exp(-gate)) * up
    return widen(hidden.to(dtype))


def _decode(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, K, C], every (token, slot) on its own."""
    found = []
    for t, chosen in enumerate(ids.tolist()):
        for e in chosen:
            hidden = _activate(multiply_rows(x[t : t + 1], widen(gate_up[e])), dtype)
            found.append(multiply_rows(hidden, widen(down[e])))
    return torch.cat(found).view(*ids.shape, -1)


def _prompt(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, K, C], the tokens of an expert together, in tiles of fixed size."""
    flat = ids.flatten()
    order = torch.sort(flat, stable=True).indices
    counts = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
    found = []
    for e, mine in enumerate(order.split(counts)):
        if len(mine):
            rows = x[mine // ids.shape[1]]
            hidden = _activate(multiply_tiles(rows, widen(gate_up[e]), EXPERT_TILE), dtype)
            found.append(multiply_tiles(hidden, widen(down[e]), EXPERT_TILE))
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return torch.cat(found)[back].view(*ids.shape, -1)


def _fake_experts(x: Tensor, **_: object) -> Tensor:
    return x.new_empty(x.shape)


def _bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """Weights of the experts that the tokens chose, tokens in and out."""
    x, ids, gate_up, down = values["x"], values["ids"], values["gate_up"], values["down"]
    used = ids.unique().numel() if ids.device.type != "meta" else min(ids.numel(), gate_up.shape[0])
    return x.element_size() * (2 * x.numel() + used * (gate_up[0].numel() + down[0].numel()))


def _flops(values: Values) -> int:
    expert = values["gate_up"][0].numel() + values["down"][0].numel()
    return 2 * values["ids"].numel() * expert


@operator(check=_check_experts, forward_only=True, fake=_fake_experts, bytes=_bytes, flops=_flops)
def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    rows: Literal["prompt", "decode", "batch"] = "prompt",
) -> Tensor:
    """y[t] = sum over j of weights[t, j] * down[e] @ (silu(gate) * up), gate|up = gate_up[e] @ x[t], e = ids[t, j].

    x: [T, C] bf16, fp16 or fp32; gate_up: [E, 2F, C], gate above up, and down: [E, C, F], in x's dtype; weights: [T, K]
    and ids: [T, K] int32 or int64, each in [0, E), as `route` gives them: another is an error on the CPU and is not
    looked for elsewhere; y: like x, contiguous. Sums in fp32;
    silu(gate) * up is rounded to x's dtype, y once, at the end. The slots are added in their order. A row's bits
    depend on the row and `rows` alone, as in `linear`. No gradient.
    """
    if not ids.numel():
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    run = _prompt if rows == "prompt" else _decode
    parts = run(widen(x).contiguous(), gate_up, down, ids.long(), x.dtype)
    scaled = parts * weights.to(parts.dtype).unsqueeze(-1)
    y = scaled[:, 0]
    for slot in range(1, ids.shape[1]):
        y = y + scaled[:, slot]
    return y.to(x.dtype).contiguous()


def _triton_route_reason(logits: Tensor, **_: object) -> str | None:
    if logits.dtype == torch.float64:
        return "computes in fp32, got torch.float64"
    return None if logits.shape[1] <= 4096 else f"{logits.shape[1]} experts do not fit one program (4096)"


@route.impl("triton", accepts=_triton_route_reason)
def _(logits, k, bias, scoring, renormalize, num_groups, top_groups, scale):  # type: ignore[no-untyped-def]
    from .moe_triton import route as run

    return run(logits, k, bias, scoring, renormalize, num_groups, top_groups, scale)


@route_backward.impl("triton", accepts=_triton_route_reason)
def _(dweights, logits, ids, scoring, renormalize, scale):  # type: ignore[no-untyped-def]
    from .route_triton import backward

    return backward(dweights, logits, ids, scoring, renormalize, scale)


def _triton_reason(x: Tensor, **_: object) -> str | None:
    return "computes in fp32, got torch.float64" if x.dtype == torch.float64 else None


@experts.impl("triton", accepts=_triton_reason)
def _(x, gate_up, down, weights, ids, rows):  # type: ignore[no-untyped-def]
    from .moe_triton import experts as run

    return run(x, gate_up, down, weights, ids, rows)


@route.impl("torch_npu", accepts=moe_torch_npu.route_reason)
def _(logits, k, bias, scoring, renormalize, num_groups, top_groups, scale):  # type: ignore[no-untyped-def]
    return moe_torch_npu.route(logits, k, bias, scoring, renormalize, num_groups, top_groups, scale)


# torch_npu's gradient came in 2.11 and does not say its formula: on NPU tensors this is a few small operators of torch.
route_backward.impl("torch_npu", accepts=moe_torch_npu.route_backward_reason)(route_backward.reference)


@experts.impl("torch_npu", accepts=moe_torch_npu.experts_reason)
def _(x, gate_up, down, weights, ids, rows):  # type: ignore[no-untyped-def]
    return moe_torch_npu.experts(x, gate_up, down, weights, ids)


_ROUTES: list[Values] = [
    {"tokens": (1,), "experts": 4, "k": 1},
    {"tokens": (5,), "experts": 16, "k": 4},
    {"tokens": (3,), "experts": 8, "k": 8, "scale": 0.01, "renormalize": False},
    {"tokens": (0,), "experts": 8, "k": 2},
    {"tokens": (6,), "experts": 60, "k": 4, "sliced": True, "weight_scale": 2.5},
    {"tokens": (9,), "experts": 32, "k": 6, "num_groups": 8, "top_groups": 3, "bias": True, "scoring": "sigmoid"},
    {"tokens": (4,), "experts": 24, "k": 3, "num_groups": 4, "top_groups": 2},
    {"tokens": (4,), "experts": 12, "k": 3, "scoring": "sigmoid", "weight_scale": 2.5, "renormalize": False},
]
_ROUTE_BENCH: list[Values] = [{"tokens": (tokens,), "experts": 128, "k": 8} for tokens in (1, 64, 8192)]


def _make_route(
    tokens: tuple[int, ...],
    experts: int,
    k: int,
    bias: bool = False,
    scale: float = 1.0,
    sliced: bool = False,
    weight_scale: float = 1.0,
    *,
    dtype: torch.dtype,
    device: str,
    **options: Any,
) -> Values:
    # Logits a multiple of 1/64 apart are exact in every dtype, so all of them choose the same experts.
    steps = torch.stack([torch.randperm(experts + 4 * sliced) for _ in range(tokens[0] or 1)])[: tokens[0]]
    logits = (scale * (steps - experts / 2) / 16).to(dtype).to(device)[:, :experts]
    offsets = torch.arange(experts, device=device).to(dtype) / 64 if bias else None
    return {"logits": logits, "k": k, "bias": offsets, "scale": weight_scale, **options}


def _make_route_backward(**case: Any) -> Values:
    values = _make_route(**case)
    logits, k = values["logits"], values["k"]
    how: Values = {name: values[name] for name in ("scoring", "renormalize", "scale") if name in values}
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    dweights = torch.randn(logits.shape[0], k, device=logits.device).to(wide)
    ids = torch.rand(logits.shape, device=logits.device).argsort(-1)[:, :k].int()
    return {"dweights": dweights, "logits": logits, "ids": ids, **how}


route.inputs(cases=_ROUTES, bench=_ROUTE_BENCH)(_make_route)
route_backward.inputs(cases=_ROUTES, bench=_ROUTE_BENCH[1:])(_make_route_backward)

_CASES: list[Values] = [
    {"tokens": (1,), "hidden": 8, "width": 4, "experts": 2, "k": 1},
    {"tokens": (3,), "hidden": 24, "width": 20, "experts": 4, "k": 2, "rows": "decode"},
    {"tokens": (3,), "hidden": 32, "width": 16, "experts": 4, "k": 3, "scale": 0.01},
    {"tokens": (2,), "hidden": 64, "width": 40, "experts": 8, "k": 8, "rows": "decode", "scale": 0.01},
    {"tokens": (0,), "hidden": 16, "width": 8, "experts": 2, "k": 2},
    {"tokens": (0,), "hidden": 16, "width": 8, "experts": 2, "k": 2, "rows": "decode"},
    {"tokens": (19,), "hidden": 40, "width": 24, "experts": 5, "k": 2, "sliced": True, "rows": "batch"},
    {"tokens": (20,), "hidden": 40, "width": 24, "experts": 3, "k": 2, "sliced": True},
    {"tokens": (5,), "hidden": 40, "width": 24, "experts": 5, "k": 2, "sliced": True, "rows": "decode"},
]
_QWEN = {"hidden": 2048, "width": 768, "experts": 128, "k": 8}
_BENCH: list[Values] = [
    *({"tokens": (tokens,), "rows": "decode", **_QWEN} for tokens in (1, 4)),
    {"tokens": (64,), "rows": "batch", **_QWEN},
    {"tokens": (8192,), **_QWEN},
]


def _make(
    tokens: tuple[int, ...],
    hidden: int,
    width: int,
    experts: int,
    k: int,
    scale: float = 1.0,
    sliced: bool = False,
    rows: str = "prompt",
    *,
    dtype: torch.dtype,
    device: str,
) -> Values:
    more: dict[str, Any] = {"dtype": dtype, "device": device}
    count = tokens[0]
    x = (scale * torch.randn(count, hidden + 8 * sliced, **more))[:, :hidden]
    gate_up = (torch.randn(experts, 2 * width, hidden + 8 * sliced, **more) / hidden**0.5)[..., :hidden]
    down = torch.randn(experts, hidden, width, **more) / width**0.5
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.rand(count, k, device=device).to(wide) + 0.1
    ids = torch.rand(count, experts, device=device).argsort(-1)[:, :k].int()
    return {"x": x, "gate_up": gate_up, "down": down, "weights": weights, "ids": ids, "rows": rows}


experts.inputs(cases=_CASES, bench=_BENCH)(_make)
