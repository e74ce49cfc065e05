"""The fused experts of a mixture of experts: each token through its chosen SwiGLU networks, weighted and summed."""

from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw, Sizes
from .._gradient import Arguments
from .._op import Values, operator, widen
from ..glu import glu
from ..linear import multiply
from . import experts_torch_npu
from .grouped_matmul import grouped_matmul
from .permute import permute, unpermute


def _activate(both: Tensor, dtype: torch.dtype) -> Tensor:
    """Return silu(gate) * up of both [T, 2F] as [T, F], rounded to `dtype` and widened again for the second matmul.

    It uses exp instead of torch.sigmoid for the reason that `route.py` gives.
    """
    gate, up = both.chunk(2, -1)
    return _round_to(gate / (1 + torch.exp(-gate)) * up, dtype)


def _round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to `dtype`, and return it in the dtype of accumulation."""
    return widen(x.to(dtype))


def _expert_outputs(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the output of each token's experts, [T, K, C]; an expert computes all its tokens at once.

    x: [T, C] in the dtype of accumulation; dtype: what the matmuls round their results to.
    """
    flat = ids.flatten()
    order = torch.sort(flat, stable=True).indices
    counts = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
    outputs = []
    for e, pairs in enumerate(order.split(counts)):
        if len(pairs) or not len(flat):
            both = _round_to(multiply(x[pairs // ids.shape[1]], widen(gate_up[e])), dtype)
            outputs.append(_round_to(multiply(_activate(both, dtype), widen(down[e])), dtype))
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return torch.cat(outputs)[inverse].view(*ids.shape, x.shape[1])


def _bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of the weights of the experts that were chosen, and of the tokens in and out."""
    x, ids, gate_up, down = values["x"], values["ids"], values["gate_up"], values["down"]
    used = ids.unique().numel() if ids.device.type != "meta" else min(ids.numel(), gate_up.shape[0])
    return x.element_size() * (2 * x.numel() + used * (gate_up[0].numel() + down[0].numel()))


def _flops(values: Values) -> int:
    expert = values["gate_up"][0].numel() + values["down"][0].numel()
    return 2 * values["ids"].numel() * expert


@operator(bytes=_bytes, flops=_flops)
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
    if not ids.shape[1]:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    parts = _expert_outputs(widen(x).contiguous(), gate_up, down, ids.long(), x.dtype)
    scaled = parts * weights.to(parts.dtype).unsqueeze(-1)
    y = scaled[:, 0]
    for choice in range(1, ids.shape[1]):
        y = y + scaled[:, choice]
    return y.to(x.dtype).contiguous()


@experts.gradient(save=("x", "gate_up", "down", "weights", "ids"))
def _(grads: tuple[Tensor, ...], args: Arguments, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    names, is_differentiated = args.needs_grad, torch.is_grad_enabled()
    inputs = {n: args[n] for n in ("x", "gate_up", "down", "weights")}
    if not is_differentiated:
        inputs = {n: x.detach().requires_grad_(n in names) for n, x in inputs.items()}
    with torch.enable_grad():
        y = _differentiable_experts(**inputs, ids=args["ids"], backend=args["backend"])
        input_grads = torch.autograd.grad(y, [inputs[n] for n in names], grads[0], create_graph=is_differentiated)
    return dict(zip(names, input_grads, strict=True))


def _differentiable_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, backend: str
) -> Tensor:
    """Compute `experts` with operators that have gradients and round where it does."""
    rows, places, counts = permute(x, ids, gate_up.shape[0], backend=backend)
    hidden = glu(grouped_matmul(rows, gate_up, counts, backend=backend), backend=backend)
    parts = grouped_matmul(hidden, down, counts, backend=backend)
    return unpermute(parts, places, weights, backend=backend)  # type: ignore[no-any-return]


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


def _make(draw: Draw, tokens: Sizes, hidden: int, width: int, experts: int, k: int) -> Values:
    count = tokens[0]
    x, gate_up = draw.scaled(count, hidden), draw.weight(experts, 2 * width, hidden)
    down = torch.randn(experts, hidden, width, **draw.kind) / width**0.5
    weights = torch.rand(count, k, device=draw.device).to(draw.wide) + 0.1
    ids = torch.rand(count, experts, device=draw.device).argsort(-1)[:, :k].int()
    return {"x": x, "gate_up": gate_up, "down": down, "weights": weights, "ids": ids}


experts.inputs(cases=_CASES, bench=_BENCH)(_make)
