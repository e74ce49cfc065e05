"""The fused experts of gpt-oss: with biases, a clipped activation, and weights that may be MXFP4."""

from typing import Annotated, Any

import torch
from torch import Tensor

from .._draw import Draw
from .._gradient import Arguments
from .._op import Values, narrow, operator, widen
from ..linear import multiply
from ..quantised import mx
from . import clipped_experts_torch_npu
from .experts import WORDS, draw_routing, expert_bytes, recomputed_gradients
from .grouped_matmul import grouped_matmul
from .permute import permute, unpermute
from .routed import run_routed


def _check(**values: Any) -> None:
    x, gate_up_bias = values["x"], values["gate_up_bias"]
    width, inner = x.shape[1], gate_up_bias.shape[1] // 2
    for name, columns in (("gate_up", width), ("down", inner)):
        codes, scales = values[name], values[f"{name}_scales"]
        if (scales is None) != (values["gate_up_scales"] is None):
            raise ValueError("clipped_experts: one of gate_up_scales and down_scales is missing; give both or neither")
        if scales is None:
            is_right = codes.dtype == x.dtype and codes.shape[2] == columns
            expected = f"[.., {columns}] {str(x.dtype).removeprefix('torch.')}"
        else:
            forms = mx.widths(columns)
            sizes = codes.shape[2], scales.shape[2]
            is_right = scales.dtype == torch.uint8 and forms.get(codes.dtype) == sizes and columns % mx.BLOCK == 0
            expected = " or ".join(
                f"[.., {n}] {str(dtype).removeprefix('torch.')} with scales [.., {groups}] uint8"
                for dtype, (n, groups) in forms.items()
            )
        if not is_right:
            raise ValueError(
                f"clipped_experts: {name} is {list(codes.shape)} {str(codes.dtype).removeprefix('torch.')}"
                f"{'' if scales is None else f' with scales {list(scales.shape)}'}, expected {expected}"
            )


def _flops(values: Values) -> int:
    return 3 * values["ids"].numel() * values["x"].shape[1] * values["gate_up_bias"].shape[1]


def clip(both: Tensor, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) of both [.., 2 F], gate in even and up in odd columns.

    gate is at most `limit`, up within `limit` of 0. Computed in fp32, rounded to both's dtype.
    """
    wide = widen(both)
    gate, up = wide[..., ::2].clamp(max=limit), wide[..., 1::2].clamp(-limit, limit)
    # Not torch.sigmoid: on a CPU its bits depend on where an element lies in memory, and a row's bits must not.
    return narrow((up + 1) * (gate / (1 + torch.exp(-alpha * gate))), both.dtype)


@operator(check=_check, bytes=expert_bytes, flops=_flops)
def clipped_experts(
    x: Annotated[Tensor, "[T, C>0] float"],
    gate_up: Annotated[Tensor, "[E, 2*F, GK] any"],
    gate_up_scales: Annotated[Tensor | None, "[E, 2*F, GS] any"],
    gate_up_bias: Annotated[Tensor, "[E, 2*F] x or fp32"],
    down: Annotated[Tensor, "[E, C, DK] gate_up"],
    down_scales: Annotated[Tensor | None, "[E, C, DS] any"],
    down_bias: Annotated[Tensor, "[E, C] x or fp32"],
    weights: Annotated[Tensor, "[T, K] float"],
    ids: Annotated[Tensor, "[T, K] int, from 0 to E - 1"],
    *,
    alpha: Annotated[float, "> 0"] = 1.702,
    limit: Annotated[float, "> 0"] = 7.0,
) -> Annotated[Tensor, "[T, C] x"]:
    """Run the chosen experts of each token, as gpt-oss has them, and return their weighted sum.

    y[t] = sum over j of weights[t, j] * (down[e] @ h + down_bias[e]), h = (up + 1) * gate * sigmoid(alpha * gate), and
    row 2 f of gate_up[e] @ x[t] + gate_up_bias[e] is gate, row 2 f + 1 is up, e = ids[t, j]; gate is at most `limit`,
    up within `limit` of 0. Without scales gate_up and down are [E, 2F, C] and [E, C, F] in x's dtype. With scales they
    are MXFP4 codes [E, 2F, C / 2] and [E, C, F / 2] uint8, or in tiles [E, 2F, 16 * ceil(C / 128)] and
    [E, C, 16 * ceil(F / 128)] int32, with uint8 scales, one for 32 columns or four for a tile, as mx.py describes; the
    bits of y are those of their values in x's dtype, which are exact in bf16. weights and ids: as `route` returns them.
    Returns y contiguous. Sums in fp32. gate, up, h and each expert's result are rounded to x's dtype, after the bias
    was added in fp32; the choices are added in order, in fp32, and y is rounded once. A token's bits do not depend on
    the other tokens. An id outside [0, E) raises ValueError on the CPU; other devices do not
    check ids. Differentiable in x, weights, biases and plain gate_up and down; the backward recomputes the matmuls of
    the forward with `grouped_matmul`.

        y = ops.clipped_experts(x, codes, s1, b1, codes2, s2, b2, *ops.route(logits, k=4))
    """

    def product(rows: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor) -> Tensor:
        plain = weight if scales is None else mx.values(weight, scales, x.dtype, rows.shape[1])
        return narrow(multiply(widen(rows), widen(plain)) + bias.to(widen(rows).dtype), x.dtype)

    def run_expert(e: int, rows: Tensor) -> Tensor:
        up, out = (None if scales is None else scales[e] for scales in (gate_up_scales, down_scales))
        hidden = clip(product(rows, gate_up[e], up, gate_up_bias[e]), alpha, limit)
        return product(hidden, down[e], out, down_bias[e])

    return run_routed(x, weights, ids, run_expert)


@clipped_experts.gradient(
    save=(*("x", "gate_up", "gate_up_scales", "gate_up_bias", "down", "down_scales", "down_bias", "weights", "ids"),)
)
def _(grads: tuple[Tensor, ...], args: Arguments, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    names = ["x", "gate_up_bias", "down_bias", "weights"]
    others = {"ids": args["ids"], "alpha": args["alpha"], "limit": args["limit"]}
    if args["gate_up_scales"] is None:
        names += ["gate_up", "down"]
    else:
        for name in ("gate_up", "down"):
            columns = args["x"].shape[1] if name == "gate_up" else args["gate_up_bias"].shape[1] // 2
            others[name] = mx.values(args[name], args[f"{name}_scales"], args["x"].dtype, columns)
    return recomputed_gradients(_differentiable, names, grads[0], args, **others)


def _differentiable(
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    weights: Tensor,
    ids: Tensor,
    alpha: float,
    limit: float,
    backend: str,
) -> Tensor:
    """Compute `clipped_experts` with operators that have gradients."""
    rows, places, counts = permute(x, ids, len(gate_up), backend=backend)
    index = torch.arange(len(gate_up), device=x.device)
    experts = index.repeat_interleave(counts, output_size=len(rows))

    def product(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        wide = widen(grouped_matmul(rows, weight, counts, backend=backend))
        return narrow(wide + bias.to(wide.dtype)[experts], x.dtype)

    wide = widen(product(rows, gate_up, gate_up_bias))
    gate, up = wide[:, ::2].clamp(max=limit), wide[:, 1::2].clamp(-limit, limit)
    # torch.sigmoid has a gradient where exp(-alpha * gate) is infinite.
    hidden = narrow((up + 1) * gate * torch.sigmoid(alpha * gate), x.dtype)
    return unpermute(product(hidden, down, down_bias), places, weights, backend=backend)  # type: ignore[no-any-return]


def _triton_reason(gate_up: Tensor, **_: object) -> str | None:
    return "reads MXFP4 in tiles, `mx.tiled`" if gate_up.dtype == torch.uint8 else None


clipped_experts.impl("triton", "clipped_experts_triton:experts", accepts=_triton_reason)
clipped_experts.impl("torch_npu", "clipped_experts_torch_npu:experts", accepts=clipped_experts_torch_npu.reason)


_CASES: list[Values] = [
    {"tokens": (1,), "hidden": 32, "width": 32, "experts": 2, "k": 2},
    {"tokens": (3,), "hidden": 24, "width": 20, "experts": 4, "k": 2, "weight_scale": 4.0},
    {"tokens": (3,), "hidden": 32, "width": 16, "experts": 4, "k": 3, "scale": 0.01},
    {"tokens": (0,), "hidden": 16, "width": 8, "experts": 2, "k": 2},
    {"tokens": (19,), "hidden": 40, "width": 24, "experts": 5, "k": 2, "sliced": True},
    {"tokens": (5,), "hidden": 96, "width": 32, "experts": 3, "k": 1, "is_packed": True},
    {"tokens": (18,), "hidden": 64, "width": 96, "experts": 4, "k": 3, "is_packed": True, "weight_scale": 4.0},
    {"tokens": (2,), "hidden": 32, "width": 160, "experts": 4, "k": 2, "is_packed": True, "scale": 0.01},
]
_OSS = {"hidden": 2880, "width": 2880, "experts": 32, "k": 4}
_BENCH: list[Values] = [
    {"tokens": (tokens,), **_OSS, "is_packed": is_packed} for is_packed in (True, False) for tokens in (1, 64, 4096)
]


@clipped_experts.inputs(cases=_CASES, bench=_BENCH, words=WORDS)
def _(
    draw: Draw,
    tokens: tuple[int],
    hidden: int,
    width: int,
    experts: int,
    k: int,
    is_packed: bool = False,
    weight_scale: float = 1.0,
) -> Values:
    values: Values = draw_routing(draw, tokens, experts, k)
    for name, *shape in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
        weight = draw.scaled(experts, *shape) * (weight_scale * shape[1] ** -0.5)
        codes, scales = mx.tiled(*mx.rounded(weight)) if is_packed else (weight, None)
        bias = draw.scaled(experts, shape[0]) * weight_scale
        values |= {name: codes, f"{name}_scales": scales, f"{name}_bias": bias}
    return values
