"""A linear layer with int8 weights and int8 activations: its integer sums are exact on every device."""

import torch
from torch import Tensor

from .._check import check_bias
from .._draw import Draw, Sizes
from .._op import Values, narrow, operator
from ..quant import dynamic_quant
from . import int8_torch_npu
from .layout import CHUNK
from .packed_linear import check_weight, draw_weight, triton_reason


def check_int8(op: str, argument: str, codes: Tensor, scales: Tensor, columns: int) -> None:
    """Raise ValueError unless codes are int8 [.., N, columns] and scales one number per row, [.., N]."""
    if codes.dtype != torch.int8:
        raise ValueError(f"{op}: {argument} is {codes.dtype}, expected int8")
    if scales.shape != codes.shape[:-1]:
        raise ValueError(f"{op}: scales of {argument} are {list(scales.shape)}, expected {list(codes.shape[:-1])}")
    size = {"dims": codes.dim(), "columns": columns, "rows": 1, "group": 0}
    check_weight(op, argument, codes, scales.unsqueeze(-1), None, "bytes", **size)


def _check(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    name = "int8_linear"
    if x.dim() != 2 or not x.is_floating_point() or not x.shape[1] or codes.dim() != 2:
        raise ValueError(
            f"{name}: x is {list(x.shape)} {x.dtype}, codes {list(codes.shape)}, expected [T, K] floating point and "
            "[N, K]"
        )
    check_int8(name, "codes", codes, scales, x.shape[1])
    check_bias(name, bias, codes.shape[0], x.dtype)


def _fake(x: Tensor, codes: Tensor, **_: object) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


def _flops(values: Values) -> int:
    return 2 * values["x"].numel() * values["codes"].shape[0]


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product x @ weight.T, [T, N] int32, of int8 x [T, K] and weight [N, K].

    Chunks of 1024 columns are multiplied in fp32, where their sums are exact in any order: 1024 * 128 * 127 < 2^24.
    """
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for a, b in zip(x.split(CHUNK, 1), weight.split(CHUNK, 1), strict=True):
        total += (a.float() @ b.float().t()).to(torch.int32)
    return total


def int8_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `int8_linear` in plain torch: the reference of that operator, which `int8_experts` uses too."""
    q, token_scales = dynamic_quant.reference(x)
    wide = token_scales.dtype
    y = exact_product(q, codes).to(wide) * scales.to(wide) * token_scales.unsqueeze(-1)
    return narrow(y if bias is None else y + bias.to(wide), x.dtype)


@operator(check=_check, fake=_fake, flops=_flops, forward_only=True)
def int8_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear layer in int8: y[t, n] = (sum over k of q[t, k] * codes[n, k]) * scales[n] * s[t] + bias[n].

    q and s are the codes and scales of `dynamic_quant` of x. x: [T, K] bf16, fp16 or fp32; codes: [N, K] int8; scales:
    [N] floating point; bias: [N] in x's dtype or fp32; y: [T, N] like x, contiguous. The sum is the exact integer; the
    scales and the bias are applied in fp32, in the order above, and y is rounded once. So the bits are the same on
    every device and in every batch. No gradient. Raises ValueError when shapes or dtypes do not fit.

        y = ops.int8_linear(x, codes, scales)
    """
    return int8_product(x, codes, scales, bias)


int8_linear.impl("triton", "int8_triton:linear", accepts=triton_reason)
int8_linear.impl("torch_npu", "int8_torch_npu:linear", accepts=int8_torch_npu.reason)


_CASES: list[Values] = [
    {"tokens": (1,), "size": (5, 8)},
    {"tokens": (3,), "size": (48, 96), "bias": True},
    {"tokens": (3,), "size": (33, 70), "scale": 0.01},
    {"tokens": (2,), "size": (40, 1280), "bias": True},
    {"tokens": (0,), "size": (16, 32)},
    {"tokens": (19,), "size": (40, 72), "sliced": True, "bias": True},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "size": size} for tokens in (1, 64, 8192) for size in ((5120, 2048), (2048, 4096))
]


def _make(draw: Draw, tokens: Sizes, size: tuple[int, int], bias: bool = False) -> Values:
    codes, scales, _ = draw_weight(draw, *size, kind="int8")
    added = torch.randn(size[0], **draw.kind) if bias else None
    return {"x": draw.scaled(*tokens, size[1]), "codes": codes, "scales": scales.squeeze(-1), "bias": added}


int8_linear.inputs(cases=_CASES, bench=_BENCH)(_make)
