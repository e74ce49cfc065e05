"""RMSNorm with residual followed by a linear layer, as at the start of an attention block and of an MLP."""

import torch
from torch import Tensor

from ._check import or_fp32
from ._draw import Draw, Sizes
from ._op import Values, narrow, operator, widen
from .linear import multiply
from .rms_norm import norm


def _check(x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, eps: float) -> None:
    if not x.is_floating_point():
        raise ValueError(f"norm_linear: x is {x.dtype}, expected a floating point dtype")
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"norm_linear: x is {list(x.shape)}, weight {list(weight.shape)}, expected [T, K] and [N, K]")
    if residual.shape != x.shape or norm_weight.shape != x.shape[1:]:
        raise ValueError(
            f"norm_linear: residual is {list(residual.shape)}, norm_weight {list(norm_weight.shape)}, expected "
            f"{list(x.shape)} and {list(x.shape[1:])}"
        )
    if weight.dtype != x.dtype or residual.dtype != x.dtype or norm_weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"norm_linear: residual is {residual.dtype}, norm_weight {norm_weight.dtype}, weight {weight.dtype}, "
            f"expected x's {x.dtype}, and {or_fp32(x.dtype)} for norm_weight"
        )
    if not eps > 0:
        raise ValueError(f"norm_linear: eps is {eps}, expected a positive number")


def _fake(x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape), x.new_empty(x.shape)


def _bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    tensors = (*(values[name] for name in ("x", "residual", "norm_weight", "weight")), *outputs)
    return sum(t.numel() * t.element_size() for t in tensors)


def _flops(values: Values) -> int:
    return 2 * values["x"].shape[0] * values["weight"].numel()


NO_NPU = "torch_npu has no operator that fuses a norm into a product: the engine calls add_rms_norm and linear there"


@operator(check=_check, forward_only=True, fake=_fake, bytes=_bytes, flops=_flops, without={"torch_npu": NO_NPU})
def norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """h = x + residual; n = rms_norm(h); y = n @ weight.T. Returns y, n and h.

    x, residual: [T, K] bf16, fp16 or fp32; norm_weight: [K] in x's dtype or fp32; weight: [N, K] in x's dtype; returns
    y: [T, N], n and h: [T, K], in x's dtype, contiguous. The bits are equal to those of `add_rms_norm` followed by
    `linear`. Not differentiable: use those two. Raises ValueError when shapes, dtypes or eps do not fit.

        qkv, normed, residual = ops.norm_linear(x, residual, norm.weight, qkv_proj.weight, eps)
    """
    total = narrow(widen(x) + widen(residual), x.dtype).contiguous()
    normed = narrow(norm(total, norm_weight, eps, False), x.dtype).contiguous()
    return narrow(multiply(widen(normed), widen(weight)), x.dtype), normed, total


def _triton_reason(x: Tensor, **_: object) -> str | None:
    return "computes in fp32, got torch.float64" if x.dtype == torch.float64 else None


norm_linear.impl("triton", "norm_linear_triton:forward", accepts=_triton_reason)


_CASES: list[Values] = [
    {"tokens": (1,), "size": (48, 64)},
    {"tokens": (3,), "size": (33, 40), "scale": 0.01},
    {"tokens": (2,), "size": (5, 136), "norm_dtype": torch.float32},
    {"tokens": (0,), "size": (16, 32)},
    {"tokens": (17,), "size": (40, 64), "sliced": True},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "size": size} for tokens in (1, 8, 64) for size in ((5120, 2048), (128, 2048))
]
_BENCH += [{"tokens": (1,), "size": (4096, 1024)}]


@norm_linear.inputs(cases=_CASES, bench=_BENCH)
def _(draw: Draw, tokens: Sizes, size: tuple[int, int], norm_dtype: torch.dtype | None = None) -> Values:
    wide = torch.float64 if draw.dtype == torch.float64 else norm_dtype or draw.dtype
    norm_weight = 1 + 0.1 * torch.randn(size[1], device=draw.device)
    return {
        "x": draw.scaled(*tokens, size[1]),
        "residual": draw.scaled(*tokens, size[1]),
        "norm_weight": norm_weight.to(wide),
        "weight": draw.weight(*size),
    }
