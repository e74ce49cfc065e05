"""The fused experts of a mixture of experts: each token through its chosen SwiGLU networks, weighted and summed."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from .._draw import Draw
from .._gradient import Arguments
from .._op import Values, narrow, operator, widen
from ..glu import glu
from ..linear import multiply
from . import experts_torch_npu
from .grouped_matmul import grouped_matmul
from .permute import permute, unpermute
from .routed import activate, run_routed


def expert_bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of the weights of the experts that were chosen, and of the tokens in and out."""
    x, ids = values["x"], values["ids"]
    used = ids.unique().numel() if ids.device.type != "meta" else min(ids.numel(), values["gate_up"].shape[0])
    stacks = [v for name, v in values.items() if name.startswith(("gate_up", "down")) and v is not None]
    return int(2 * x.nbytes + used * sum(stack[0].nbytes for stack in stacks))


FLOPS = "6*T*K*C*F"  # of both matmuls, for weights whose numbers are not packed


@operator(bytes=expert_bytes, flops=FLOPS)
def experts(
    x: Annotated[Tensor, "[T, C] float"],
    gate_up: Annotated[Tensor, "[E, 2*F, C] x"],
    down: Annotated[Tensor, "[E, C, F] x"],
    weights: Annotated[Tensor, "[T, K] float"],
    ids: Annotated[Tensor, "[T, K] int, from 0 to E - 1"],
) -> Annotated[Tensor, "[T, C] x"]:
    """Run the chosen experts of each token and return their weighted sum.

    y[t] = sum over j of weights[t, j] * down[e] @ (silu(gate) * up), gate|up = gate_up[e] @ x[t], e = ids[t, j].
    gate_up: F rows of gate and then F of up; weights and ids: as `route` returns them. Returns y contiguous. An id
    outside [0, E) raises ValueError on the CPU; other devices do not check ids. Sums in fp32. gate, up, silu(gate) * up
    and each expert's result are rounded to x's dtype, as separate matmuls of whole tensors would round them; the
    choices are added in order, in fp32, and y is rounded once. A token's bits do not depend on the other tokens, as in
    `linear`. Differentiable in all but ids; the backward recomputes the matmuls of the forward with `grouped_matmul`.

        y = ops.experts(x, gate_up, down, *ops.route(logits, k=8))
    """

    def run_expert(e: int, rows: Tensor) -> Tensor:
        hidden = activate(narrow(multiply(widen(rows), widen(gate_up[e])), x.dtype))
        return narrow(multiply(widen(hidden), widen(down[e])), x.dtype)

    return run_routed(x, weights, ids, run_expert)


@experts.gradient(save=("x", "gate_up", "down", "weights", "ids"))
def _(grads: tuple[Tensor, ...], args: Arguments, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    names = ("x", "gate_up", "down", "weights")
    return recomputed_gradients(_differentiable_experts, names, grads[0], args, ids=args["ids"])


def recomputed_gradients(
    function: Callable[..., Tensor], names: Sequence[str], grad: Tensor, args: Arguments, **others: Any
) -> dict[str, Tensor]:
    """Return the gradients of those of these arguments that need one, by autograd through `function` of all of them.

    others: its further arguments.
    """
    needed, is_differentiated = args.needs_grad, torch.is_grad_enabled()
    inputs = {n: args[n] for n in names}
    if not is_differentiated:
        inputs = {n: x.detach().requires_grad_(n in needed) for n, x in inputs.items()}
    with torch.enable_grad():
        y = function(**inputs, **others, backend=args["backend"])
        input_grads = torch.autograd.grad(y, [inputs[n] for n in needed], grad, create_graph=is_differentiated)
    return dict(zip(needed, input_grads, strict=True))


def _differentiable_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, backend: str
) -> Tensor:
    """Compute `experts` with operators that have gradients and round where it does."""
    rows, places, counts = permute(x, ids, gate_up.shape[0], backend=backend)
    hidden = glu(grouped_matmul(rows, gate_up, counts, backend=backend), backend=backend)
    parts = grouped_matmul(hidden, down, counts, backend=backend)
    return unpermute(parts, places, weights, backend=backend)  # type: ignore[no-any-return]


experts.impl("cpp", "whorl.ops.cpu.moe:experts")
experts.impl("triton", "experts_triton:experts")
experts.impl("torch_npu", "experts_torch_npu:experts", accepts=experts_torch_npu.reason)


_CASES: list[Values] = [
    {"tokens": (1,), "hidden": 16, "width": 12, "experts": 2, "k": 2},
    {"tokens": (3,), "hidden": 24, "width": 20, "experts": 4, "k": 2},
    {"tokens": (3,), "hidden": 32, "width": 16, "experts": 4, "k": 3, "scale": 0.01},
    {"tokens": (2,), "hidden": 24, "width": 12, "experts": 8, "k": 8, "scale": 0.01},
    {"tokens": (0,), "hidden": 16, "width": 8, "experts": 2, "k": 2},
    {"tokens": (19,), "hidden": 40, "width": 24, "experts": 5, "k": 2, "sliced": True},
    {"tokens": (20,), "hidden": 40, "width": 24, "experts": 3, "k": 1, "sliced": True},
    {"tokens": (5,), "hidden": 40, "width": 24, "experts": 5, "k": 2, "sliced": True},
]
_QWEN = {"hidden": 2048, "width": 768, "experts": 128, "k": 8}
_BENCH: list[Values] = [{"tokens": (tokens,), **_QWEN} for tokens in (1, 4, 64, 8192)]


WORDS = {"hidden": "C", "width": "F", "experts": "E", "k": "K"}


def draw_routing(draw: Draw, tokens: tuple[int], experts: int, k: int) -> Values:
    """Draw weights and ids, [T, K] each, as `route` returns them."""
    weights = torch.rand(*tokens, k, device=draw.device).to(draw.wide) + 0.1
    return {"weights": weights, "ids": torch.rand(*tokens, experts, device=draw.device).argsort(-1)[:, :k].int()}


@experts.inputs(cases=_CASES, bench=_BENCH, words=WORDS)
def _(draw: Draw, tokens: tuple[int], experts: int, k: int) -> Values:
    return {"gate_up": draw.weight, "down": draw.weight, **draw_routing(draw, tokens, experts, k)}
