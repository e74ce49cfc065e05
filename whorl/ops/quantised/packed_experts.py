"""Fused experts whose weights are stored in 4 or 8 bits."""

from typing import Annotated, Any

from torch import Tensor

from .._draw import Draw
from .._op import Values, operator
from ..moe.experts import WORDS, draw_routing, expert_bytes
from ..moe.routed import activate, run_routed
from . import packed_torch_npu
from .layout import find
from .packed_linear import ZERO_DTYPES, check_weight, draw_weight, layout_name, packed_linear, triton_reason


def _check(**values: Any) -> None:
    width, num_rows = values["x"].shape[1], find(values["layout"]).num_rows
    high = num_rows(values["gate_up"])
    if high % 2 or not high or num_rows(values["down"]) != width:
        raise ValueError(
            f"packed_experts: gate_up is {list(values['gate_up'].shape)}, down {list(values['down'].shape)}, expected "
            f"codes of [E, 2F, ..] and [E, {width}, ..]"
        )
    check_weight("packed_experts", values, width, ("gate_up", "gate_up_scales", "gate_up_zeros"))
    check_weight("packed_experts", values, high // 2, ("down", "down_scales", "down_zeros"))


def _flops(values: Values) -> int:
    rows = find(values["layout"]).num_rows(values["gate_up"])
    return 6 * values["ids"].numel() * values["x"].shape[1] * (rows // 2)


@operator(check=_check, bytes=expert_bytes, flops=_flops, forward_only=True)
def packed_experts(
    x: Annotated[Tensor, "[T, C>0] float"],
    gate_up: Annotated[Tensor, "[E, GN, GK] any"],
    gate_up_scales: Annotated[Tensor, "[E, GSN, GSK] float"],
    gate_up_zeros: Annotated[Tensor | None, f"[E, GZN, GZK] {ZERO_DTYPES}"],
    down: Annotated[Tensor, "[E, DN, DK] gate_up"],
    down_scales: Annotated[Tensor, "[E, DSN, DSK] float"],
    down_zeros: Annotated[Tensor | None, f"[E, DZN, DZK] {ZERO_DTYPES}"],
    weights: Annotated[Tensor, "[T, K] float"],
    ids: Annotated[Tensor, "[T, K] int, from 0 to E - 1"],
    *,
    rows: Annotated[int, "> 0"] = 1,
    columns: Annotated[int, ">= 0"] = 0,
    layout: str = "bytes",
) -> Annotated[Tensor, "[T, C] x"]:
    """Compute `experts` with weights packed as in `packed_linear`.

    gate_up: codes of [E, 2F, C], F rows of gate and then F of up, and down: codes of [E, C, F], in one layout, each
    with scales and with zeros or None; there is one scale per `rows` rows and `columns` columns (0: all columns) of
    every expert, [E, ..] in all. weights and ids: as `route` returns them. Returns y contiguous. Every matmul is that
    of `packed_linear`: rounded values, K in chunks of 1024 from zero, added in order. gate, up, silu(gate) * up and
    each expert's result are rounded to x's dtype; the choices are added in order, in fp32, and y is rounded once. A
    token's bits do not depend on the other tokens. An id outside [0, E) raises ValueError on the CPU; other devices do
    not check ids. No gradient.

        y = ops.packed_experts(x, gate_up, s1, None, down, s2, None, *ops.route(logits, k=8), columns=128)
    """

    def product(x: Tensor, e: int, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        weight = codes[e], scales[e], None if zeros is None else zeros[e]
        y: Tensor = packed_linear.reference(x, *weight, rows=rows, columns=columns, layout=layout)
        return y

    def run_expert(e: int, rows_of_expert: Tensor) -> Tensor:
        hidden = activate(product(rows_of_expert, e, gate_up, gate_up_scales, gate_up_zeros))
        return product(hidden, e, down, down_scales, down_zeros)

    return run_routed(x, weights, ids, run_expert)


packed_experts.impl("cpp", "whorl.ops.cpu.quantised:packed_experts")
packed_experts.impl("triton", "packed_experts_triton:forward", accepts=triton_reason)
packed_experts.impl("torch_npu", "packed_torch_npu:experts", accepts=packed_torch_npu.experts_reason)


_BLOCKS = {"kind": "fp8", "rows": 128, "columns": 128, "layout": "bytes_tiled"}
_PAIRED = {"layout": "int4_paired"}
_CASES: list[Values] = [
    {"tokens": (1,), "hidden": 16, "width": 12, "experts": 2, "k": 2, "kind": "int4"},
    {"tokens": (3,), "hidden": 64, "width": 32, "experts": 4, "k": 2, "kind": "int4", "columns": 32, "zeros": True},
    {"tokens": (3,), "hidden": 32, "width": 16, "experts": 4, "k": 3, "kind": "int8", "scale": 0.01},
    {"tokens": (2,), "hidden": 24, "width": 1152, "experts": 3, "k": 2, "kind": "int4", "columns": 8},
    {"tokens": (0,), "hidden": 16, "width": 8, "experts": 2, "k": 2, "kind": "int4"},
    {"tokens": (19,), "hidden": 40, "width": 24, "experts": 5, "k": 2, "kind": "int8", "sliced": True},
    {"tokens": (5,), "hidden": 136, "width": 72, "experts": 3, "k": 1, **_BLOCKS},
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
        _BLOCKS,
    )
    for tokens in (1, 64, 8192)
]


@packed_experts.inputs(cases=_CASES, bench=_BENCH, words=WORDS)
def _(
    draw: Draw,
    tokens: tuple[int],
    hidden: int,
    width: int,
    experts: int,
    k: int,
    kind: str,
    layout: str = "",
    **weight: Any,
) -> Values:
    values: Values = {"layout": layout_name(kind, layout), **draw_routing(draw, tokens, experts, k)}
    for name, *shape in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
        tensors = draw_weight(draw, experts, *shape, kind=kind, layout=layout, **weight)
        values |= zip((name, f"{name}_scales", f"{name}_zeros"), tensors, strict=True)
    return values
