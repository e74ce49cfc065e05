"""Running the experts of each token in int8: weights and activations."""

from torch import Tensor

from .._draw import Draw, Sizes
from .._op import Values, operator
from . import int8_torch_npu
from .int8_linear import check_int8, product
from .packed_experts import draw_routing, expert_flops, used_experts
from .packed_linear import draw_weight, triton_reason
from .routed import activated, check_routing, routed

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


def _bytes(given: Values, outputs: tuple[Tensor, ...]) -> int:
    expert = sum(given[n][0].nbytes for n in NAMES)
    return 2 * given["x"].nbytes + used_experts(given) * int(expert)


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
    """As `experts`, every product being that of `int8_linear`: what the second one reads is quantised, too.

    x: [T, C] bf16, fp16 or fp32; gate_up: [E, 2F, C], gate above up, and down: [E, C, F], of int8, each with scales for
    its rows, [E, 2F] and [E, C]; weights and ids: [T, K] as `route` gives them; y: like x, contiguous. Rounded where
    `experts` rounds: gate, up, silu(gate) * up and each expert's result to x's dtype; y once, after a sum over slots in
    their order in fp32. No gradient.
    """

    def expert(e: int, mine: Tensor) -> Tensor:
        hidden = activated(product(mine, gate_up[e], gate_up_scales[e], None))
        return product(hidden, down[e], down_scales[e], None)

    return routed(x, weights, ids, expert)


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
    gate_up, inner, _ = draw_weight(draw, experts, 2 * width, hidden, kind="int8")
    down, outer, _ = draw_weight(draw, experts, hidden, width, kind="int8")
    held = dict(zip(NAMES, (gate_up, inner.squeeze(-1), down, outer.squeeze(-1)), strict=True))
    return {"x": draw.scaled(tokens[0], hidden), **held, "weights": weights, "ids": ids}


int8_experts.inputs(cases=_CASES, bench=_BENCH)(_make)
