"""Fused experts with int8 weights and int8 activations."""

from torch import Tensor

from .._draw import Draw, Sizes
from .._op import Values, operator
from . import int8_torch_npu
from .int8_linear import check_int8, int8_product
from .packed_experts import draw_routing, expert_flops, num_used_experts
from .packed_linear import draw_weight, triton_reason
from .routed import activate, check_routing, run_routed_experts

NAMES = ("gate_up", "gate_up_scales", "down", "down_scales")


def _check(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    weights: Tensor,
    ids: Tensor,
) -> None:
    name = "int8_experts"
    check_routing(name, x, gate_up, down, weights, ids)
    check_int8(name, "gate_up", gate_up, gate_up_scales, x.shape[1])
    check_int8(name, "down", down, down_scales, gate_up.shape[1] // 2)


def _fake(x: Tensor, **_: object) -> Tensor:
    return x.new_empty(x.shape)


def _bytes(inputs: Values, outputs: tuple[Tensor, ...]) -> int:
    bytes_per_expert = sum(inputs[n][0].nbytes for n in NAMES)
    return 2 * inputs["x"].nbytes + num_used_experts(inputs) * int(bytes_per_expert)


@operator(check=_check, fake=_fake, bytes=_bytes, flops=expert_flops, forward_only=True)
def int8_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    weights: Tensor,
    ids: Tensor,
) -> Tensor:
    """Compute `experts` with the matmuls of `int8_linear`; the input of the second matmul is quantised as well.

    x: [T, C] bf16, fp16 or fp32; gate_up: [E, 2F, C], F rows of gate and then F of up, and down: [E, C, F], int8, each
    with one scale per row, [E, 2F] and [E, C]; weights and ids: [T, K] as `route` returns them; y: like x, contiguous.
    Rounding is that of `experts`: gate, up, silu(gate) * up and each expert's result to x's dtype; y once, after the
    choices are added in order in fp32. No gradient. Raises ValueError when shapes or dtypes do not fit, and on the CPU
    when an id is outside [0, E).

        y = ops.int8_experts(x, gate_up, s1, down, s2, *ops.route(logits, k=8))
    """

    def run_expert(e: int, rows: Tensor) -> Tensor:
        hidden = activate(int8_product(rows, gate_up[e], gate_up_scales[e], None))
        return int8_product(hidden, down[e], down_scales[e], None)

    return run_routed_experts(x, weights, ids, run_expert)


int8_experts.impl("triton", "int8_triton:experts", accepts=triton_reason)
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


def _make(draw: Draw, tokens: Sizes, hidden: int, width: int, experts: int, k: int) -> Values:
    weights, ids = draw_routing(draw, tokens[0], experts, k)
    gate_up, gate_up_scales, _ = draw_weight(draw, experts, 2 * width, hidden, kind="int8")
    down, down_scales, _ = draw_weight(draw, experts, hidden, width, kind="int8")
    tensors = dict(zip(NAMES, (gate_up, gate_up_scales.squeeze(-1), down, down_scales.squeeze(-1)), strict=True))
    return {"x": draw.scaled(tokens[0], hidden), **tensors, "weights": weights, "ids": ids}


int8_experts.inputs(cases=_CASES, bench=_BENCH)(_make)
