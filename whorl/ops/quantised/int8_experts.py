"""Fused experts with int8 weights and int8 activations."""

from typing import Annotated

from torch import Tensor

from .._draw import Draw
from .._op import Values, operator
from ..moe.experts import FLOPS, WORDS, draw_routing, expert_bytes
from ..moe.routed import activate, run_routed
from . import int8_torch_npu
from .int8_linear import int8_linear
from .packed_linear import draw_weight


@operator(bytes=expert_bytes, flops=FLOPS, forward_only=True)
def int8_experts(
    x: Annotated[Tensor, "[T, C>0] float"],
    gate_up: Annotated[Tensor, "[E, 2*F, C] int8"],
    gate_up_scales: Annotated[Tensor, "[E, 2*F] float"],
    down: Annotated[Tensor, "[E, C, F>0] int8"],
    down_scales: Annotated[Tensor, "[E, C] float"],
    weights: Annotated[Tensor, "[T, K] float"],
    ids: Annotated[Tensor, "[T, K] int, from 0 to E - 1"],
) -> Annotated[Tensor, "[T, C] x"]:
    """Compute `experts` with the matmuls of `int8_linear`; the input of the second matmul is quantised as well.

    gate_up: F rows of gate and then F of up; gate_up_scales and down_scales: one for each row of the weight; weights
    and ids: as `route` returns them. Returns y contiguous. Rounding is that of `experts`: gate, up, silu(gate) * up and
    each expert's result to x's dtype; y once, after the choices are added in order in fp32. An id outside [0, E) raises
    ValueError on the CPU; other devices do not check ids. No gradient.

        y = ops.int8_experts(x, gate_up, s1, down, s2, *ops.route(logits, k=8))
    """

    def run_expert(e: int, rows: Tensor) -> Tensor:
        hidden = activate(int8_linear.reference(rows, gate_up[e], gate_up_scales[e]))
        return int8_linear.reference(hidden, down[e], down_scales[e])  # type: ignore[no-any-return]

    return run_routed(x, weights, ids, run_expert)


int8_experts.impl("triton", "int8_triton:experts")
int8_experts.impl("torch_npu", "int8_torch_npu:experts", accepts=int8_torch_npu.experts_reason)


_CASES: list[Values] = [
    {"tokens": (1,), "hidden": 16, "width": 12, "experts": 2, "k": 2},
    {"tokens": (3,), "hidden": 64, "width": 32, "experts": 4, "k": 2},
    {"tokens": (3,), "hidden": 32, "width": 16, "experts": 4, "k": 3, "scale": 0.01},
    {"tokens": (0,), "hidden": 16, "width": 8, "experts": 2, "k": 2},
    {"tokens": (19,), "hidden": 40, "width": 24, "experts": 5, "k": 2, "sliced": True},
]
_QWEN = {"hidden": 2048, "width": 768, "experts": 128, "k": 8}
_BENCH: list[Values] = [{"tokens": (tokens,), **_QWEN} for tokens in (1, 64, 8192)]


@int8_experts.inputs(cases=_CASES, bench=_BENCH, words=WORDS)
def _(draw: Draw, tokens: tuple[int], hidden: int, width: int, experts: int, k: int) -> Values:
    gate_up, gate_up_scales, _ = draw_weight(draw, experts, 2 * width, hidden, kind="int8")
    down, down_scales, _ = draw_weight(draw, experts, hidden, width, kind="int8")
    scales = {"gate_up_scales": gate_up_scales.squeeze(-1), "down_scales": down_scales.squeeze(-1)}
    return {"gate_up": gate_up, "down": down, **scales, **draw_routing(draw, tokens, experts, k)}
