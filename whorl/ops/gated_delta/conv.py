"""The causal depthwise convolution of gated delta layers, with its SiLU."""

from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, narrow, operator, widen
from ..attention.packed import Starts, check_starts, read, sequences

_X = Annotated[Tensor, "[T, N] float"]
_LIKE_X = Annotated[Tensor, "[T, N] x"]
_WEIGHT = Annotated[Tensor, "[N, W>0] x or fp32"]
WITHOUT = {"torch_npu": "npu_fused_causal_conv1d has three taps, without an activation, on Atlas 350 alone"}


def convolve(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the sums of a convolution over inputs [W - 1 + n, N], [n, N], both in the dtype of accumulation."""
    width = weight.shape[1]
    count = len(inputs) - width + 1
    total = weight[:, 0] * inputs[:count]
    for j in range(1, width):
        total = total + weight[:, j] * inputs[j : j + count]
    return total


def silu(x: Tensor) -> Tensor:
    """Return x sigmoid(x). Not torch.sigmoid: on a CPU its bits depend on where an element lies in memory."""
    return x / (1 + torch.exp(-x))


def _padded(x: Tensor, width: int) -> Tensor:
    """Return x [n, N] in the dtype of accumulation with the zeros before the first token."""
    return torch.nn.functional.pad(widen(x), (0, 0, width - 1, 0))


@operator(check=lambda x, starts, **_: check_starts("causal_conv", x, starts), without=WITHOUT)
def causal_conv(x: _X, weight: _WEIGHT, starts: Starts) -> _LIKE_X:
    """y_t = silu(sum over j of weight[:, j] x_(t - W + 1 + j)), each channel by itself, within packed sequences.

    Sequence b is tokens starts[b] to starts[b + 1] (exclusive); before its first token x is zero. Tokens past the last
    start are padding and zero. fp32, j upwards, products rounded before they are added; rounded once, after the SiLU.
    Returns y contiguous. The bits are those of `causal_conv_lanes` for the same tokens. Differentiable in x and weight.
    The backward reads starts once, so it waits for the device.

        y = ops.causal_conv(qkv, conv.weight.squeeze(1), starts)
    """
    taps, parts, end = widen(weight), [], 0
    for part in sequences("causal_conv", read(starts, len(x)), len(x)):
        parts.append(silu(convolve(_padded(x[part], weight.shape[1]), taps)))
        end = part.stop
    padding = widen(x[end:]) * taps[:, 0]  # zeros, but computed, so that autograd returns zeros and not None
    padding = padding.masked_fill(torch.ones_like(padding, dtype=torch.bool), 0)
    return narrow(torch.cat([*parts, padding]), x.dtype).contiguous()


@operator(check=lambda x, starts, **_: check_starts("causal_conv_backward", x, starts), without=WITHOUT)
def causal_conv_backward(
    dy: _LIKE_X, x: _X, weight: _WEIGHT, starts: Starts
) -> tuple[_LIKE_X, Annotated[Tensor, "[N, W>0] weight"]]:
    """Gradients of `causal_conv` with respect to x and weight, in fp32 and rounded once."""
    taps, width = widen(weight), weight.shape[1]
    dx, dweight = torch.zeros_like(x, memory_format=torch.contiguous_format), torch.zeros_like(taps)
    for part in sequences("causal_conv_backward", read(starts, len(x)), len(x)):
        inputs, count = _padded(x[part], width), part.stop - part.start
        total = convolve(inputs, taps)
        share = torch.sigmoid(total)
        dtotal = widen(dy[part]) * share * (1 + total * (1 - share))
        dweight += torch.stack([(dtotal * inputs[j : j + count]).sum(0) for j in range(width)], 1)
        after = torch.nn.functional.pad(dtotal, (0, 0, 0, width - 1))
        dx[part] = narrow(convolve(after, taps.flip(1)), x.dtype)
    return dx, narrow(dweight, weight.dtype).contiguous()


@causal_conv.gradient(save=("x", "weight", "starts"))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    tensors = (args[name] for name in ("x", "weight", "starts"))
    dx, dweight = causal_conv_backward(grads[0], *tensors, backend=args["backend"])
    return {"x": dx, "weight": dweight}


causal_conv.impl("triton", "conv_triton:forward")
causal_conv_backward.impl("triton", "conv_triton:backward")


_CASES: list[Values] = [
    {"lengths": (1,), "N": 8, "W": 4},
    {"lengths": (7, 5, 2), "N": 24, "W": 4},
    {"lengths": (12, 1), "N": 40, "W": 3, "scale": 0.01, "weight": torch.float32},
    {"lengths": (6, 0, 8), "idle": 3, "N": 17, "W": 4},
    {"lengths": (0,), "N": 16, "W": 4},
    {"lengths": (), "idle": 2, "N": 16, "W": 4},
    {"lengths": (20, 11), "sliced": True, "N": 64, "W": 2},
    {"lengths": (70, 2), "N": 130, "W": 4},
]
_BENCH: list[Values] = [{"lengths": (8192,), "N": 8192, "W": 4}, {"lengths": (4000, 1192, 3000), "N": 8192, "W": 4}]


def special_inputs(draw: Draw, lengths: tuple[int, ...], idle: int = 0) -> Values:
    """Return what is special of a case of packed sequences; idle: tokens past the last one."""
    return {"T": sum(lengths) + idle, "starts": draw.offsets(lengths)}


causal_conv.inputs(cases=_CASES, bench=_BENCH)(special_inputs)
causal_conv_backward.inputs(cases=_CASES, bench=_BENCH)(special_inputs)
