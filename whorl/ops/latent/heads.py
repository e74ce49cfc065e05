"""A linear layer with one weight per head: it maps a head's channels to the channels of latents, or back."""

from typing import Annotated

import torch
from torch import Tensor

from whorl.contracts import transpose_batchmatmul_limit

from .. import _torch_npu
from .._draw import Draw
from .._op import Values, narrow, operator, widen
from .._torch_npu import dtype_name
from ..linear import multiply


@operator(forward_only=True, flops="2*T*H*N*K")
def head_linear(
    x: Annotated[Tensor, "[T, H, K] float"], weight: Annotated[Tensor, "[H, N, K] x"]
) -> Annotated[Tensor, "[T, H, N] x"]:
    """Apply a linear layer to every head: y[t, h] = weight[h] @ x[t, h].

    Returns y contiguous. Sums in fp32, rounded once. A token's bits depend on the token and its head's weight alone, as
    in `linear`. No gradient.

        absorbed = ops.head_linear(q, weight)
    """
    wide, factors = widen(x), widen(weight)
    y = torch.empty(*x.shape[:2], weight.shape[1], dtype=wide.dtype, device=x.device)
    for h in range(x.shape[1]):
        y[:, h] = multiply(wide[:, h].contiguous(), factors[h].contiguous())
    return narrow(y, x.dtype)


head_linear.impl("triton", "heads_triton:forward")
NPU_INNER = 65536  # npu_transpose_batchmatmul takes [tokens, heads, channels] if heads * channels is below this


def _npu_reason(x: Tensor, weight: Tensor) -> str | None:
    if not x.numel():
        return "empty tensors are not taken"
    heads, width, channels = weight.shape
    return transpose_batchmatmul_limit(
        shape=x.shape,
        weight_shape=(heads, channels, width),
        dtype=dtype_name(x),
        weight_dtype=dtype_name(weight),
        is_transposed=heads * channels < NPU_INNER,
    )


@head_linear.impl("torch_npu", accepts=_npu_reason)
def _(x, weight):  # type: ignore[no-untyped-def]
    """Pass x with tokens first or, when heads * channels is too large for that, as a view with heads first."""
    is_first = x.shape[1] * x.shape[2] < NPU_INNER
    return _torch_npu.call(
        "npu_transpose_batchmatmul",
        input=x if is_first else x.transpose(0, 1),
        weight=weight.transpose(1, 2),
        perm_x1=[1, 0, 2] if is_first else [0, 1, 2],
        perm_x2=[0, 1, 2],
        perm_y=[1, 0, 2],
        batch_split_factor=1,
    )


_CASES: list[Values] = [
    {"tokens": (1,), "heads": 1, "size": (5, 8)},
    {"tokens": (7,), "heads": 3, "size": (40, 24)},
    {"tokens": (5,), "heads": 4, "size": (33, 16), "swapped": True, "scale": 0.01},
    {"tokens": (0,), "heads": 2, "size": (16, 8)},
    {"tokens": (19,), "heads": 2, "size": (24, 70), "sliced": True},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "heads": 128, **size}
    for tokens in (1, 64, 4096)
    for size in ({"size": (512, 128), "swapped": True}, {"size": (128, 512)})
]


@head_linear.inputs(cases=_CASES, bench=_BENCH, words={"heads": "H", "size": "N, K"})
def _(draw: Draw, swapped: bool = False) -> Values:
    """swapped: the weight is a view of [H, K, N], as the key weight that absorbs queries is."""
    return {"weight": lambda *shape: draw.weight(shape[0], shape[2], shape[1]).mT} if swapped else {}
