"""Fused experts whose weights are stored in 4 or 8 bits."""

from typing import Any

import torch
from torch import Tensor

from .._draw import Draw, Sizes
from .._op import Values, narrow, operator, widen
from . import packed_torch_npu
from .layout import find, values
from .packed_linear import check_weight, draw_weight, multiply_in_chunks, packed_triton_reason, weight_options
from .routed import activate, check_routing, run_routed_experts


def _check(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    rows: int,
    columns: int,
    layout: str,
) -> None:
    name, num_rows = "packed_experts", find(layout).num_rows
    check_routing(name, x, gate_up, down, weights, ids, num_rows)
    size = {"dims": 3, "rows": rows, "group": columns}
    check_weight(name, "gate_up", gate_up, gate_up_scales, gate_up_zeros, layout, columns=x.shape[1], **size)
    check_weight(name, "down", down, down_scales, down_zeros, layout, columns=num_rows(gate_up) // 2, **size)


def _fake(x: Tensor, **_: object) -> Tensor:
    return x.new_empty(x.shape)


def num_used_experts(inputs: Values) -> int:
    """Return how many experts the ids name; on meta tensors the most that they can."""
    ids, count = inputs["ids"], inputs["gate_up"].shape[0]
    return int(ids.unique().numel()) if ids.device.type != "meta" else min(ids.numel(), count)


def _bytes(inputs: Values, outputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of the weights of the experts that were chosen, and of the tokens in and out."""
    names = ("gate_up", "gate_up_scales", "gate_up_zeros", "down", "down_scales", "down_zeros")
    bytes_per_expert = sum(inputs[n][0].nbytes for n in names if inputs.get(n) is not None)
    return 2 * inputs["x"].nbytes + num_used_experts(inputs) * int(bytes_per_expert)


def expert_flops(inputs: Values) -> int:
    """Return the floating point operations of both matmuls, for x [T, C] and gate_up [E, 2F, ..]."""
    rows = find(inputs.get("layout", "bytes")).num_rows(inputs["gate_up"])
    return 6 * inputs["ids"].numel() * inputs["x"].shape[1] * (rows // 2)


@operator(check=_check, fake=_fake, bytes=_bytes, flops=expert_flops, forward_only=True)
def packed_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    *,
    rows: int = 1,
    columns: int = 0,
    layout: str = "bytes",
) -> Tensor:
    """Compute `experts` with weights packed as in `packed_linear`.

    x: [T, C] bf16, fp16 or fp32; gate_up: codes of [E, 2F, C], F rows of gate and then F of up, and down: codes of [E,
    C, F], in one dtype and layout, each with scales and with zeros or None; there is one scale per `rows` rows and
    `columns` columns (0: all columns) of every expert, [E, ..] in all.
    weights and ids: [T, K], as `route` returns them. y: like x, contiguous. Every matmul is that of `packed_linear`:
    rounded values, K in chunks of 1024 from zero, added in order. gate, up, silu(gate) * up and each expert's result
    are rounded to x's dtype; the choices are added in order, in fp32, and y is rounded once. A token's bits do not
    depend on the other tokens. No gradient. Raises ValueError when shapes or dtypes do not fit, and on the CPU when an
    id is outside [0, E); other devices do not check ids.

        y = ops.packed_experts(x, gate_up, s1, None, down, s2, None, *ops.route(logits, k=8), columns=128)
    """

    order = find(layout)

    def run_expert(e: int, rows_of_expert: Tensor) -> Tensor:
        def product(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
            numbers, zero_points = order.unpack(codes[e], x.shape[1]), None if zeros is None else zeros[e]
            weight = values(numbers, scales[e], zero_points, x.dtype, block=(rows, columns), middle=order.middle)
            return narrow(multiply_in_chunks(widen(x), widen(weight)), x.dtype)

        hidden = activate(product(rows_of_expert, gate_up, gate_up_scales, gate_up_zeros))
        return product(hidden, down, down_scales, down_zeros)

    return run_routed_experts(x, weights, ids, run_expert)


packed_experts.impl("triton", "packed_experts_triton:forward", accepts=packed_triton_reason)
packed_experts.impl("torch_npu", "packed_torch_npu:experts", accepts=packed_torch_npu.experts_reason)


_PAIRED = {"layout": "int4_paired"}
_CASES: list[Values] = [
    {"tokens": (1,), "hidden": 16, "width": 12, "experts": 2, "k": 2, "kind": "int4"},
    {"tokens": (3,), "hidden": 64, "width": 32, "experts": 4, "k": 2, "kind": "int4", "columns": 32, "zeros": True},
    {"tokens": (3,), "hidden": 32, "width": 16, "experts": 4, "k": 3, "kind": "int8", "scale": 0.01},
    {"tokens": (2,), "hidden": 24, "width": 1152, "experts": 3, "k": 2, "kind": "int4", "columns": 8},
    {"tokens": (0,), "hidden": 16, "width": 8, "experts": 2, "k": 2, "kind": "int4"},
    {"tokens": (19,), "hidden": 40, "width": 24, "experts": 5, "k": 2, "kind": "int8", "sliced": True},
    {
        "tokens": (5,),
        "hidden": 136,
        "width": 72,
        "experts": 3,
        "k": 1,
        "kind": "fp8",
        "rows": 128,
        "columns": 128,
        "layout": "bytes_tiled",
    },
    {"tokens": (6,), "hidden": 40, "width": 24, "experts": 5, "k": 2, "kind": "fp8", "sliced": True},
    {"tokens": (7,), "hidden": 32, "width": 24, "experts": 3, "k": 2, "kind": "int4", "zeros": True, **_PAIRED},
    {"tokens": (9,), "hidden": 64, "width": 32, "experts": 4, "k": 2, "kind": "int4", "columns": 16, **_PAIRED},
]
_QWEN = {"hidden": 2048, "width": 768, "experts": 128, "k": 8}
_BENCH: list[Values] = [
    {"tokens": (tokens,), **_QWEN, **kind}
    for kind in (
        {"kind": "int4", "columns": 128},
        {"kind": "int8", "layout": "bytes_tiled"},
        {"kind": "fp8", "rows": 128, "columns": 128, "layout": "bytes_tiled"},
    )
    for tokens in (1, 64, 8192)
]


def draw_routing(draw: Draw, count: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    """Draw weights and ids, [count, k] each, as `route` returns them."""
    weights = torch.rand(count, k, device=draw.device).to(draw.wide) + 0.1
    return weights, torch.rand(count, experts, device=draw.device).argsort(-1)[:, :k].int()


def _make(draw: Draw, tokens: Sizes, hidden: int, width: int, experts: int, k: int, **weight: Any) -> Values:
    weights, ids = draw_routing(draw, tokens[0], experts, k)
    names = ("gate_up", "gate_up_scales", "gate_up_zeros", "down", "down_scales", "down_zeros")
    tensors = (
        *draw_weight(draw, experts, 2 * width, hidden, **weight),
        *draw_weight(draw, experts, hidden, width, **weight),
    )
    inputs = dict(zip(names, tensors, strict=True))
    return {"x": draw.scaled(tokens[0], hidden), **inputs, "weights": weights, "ids": ids, **weight_options(weight)}


packed_experts.inputs(cases=_CASES, bench=_BENCH)(_make)
