"""Per-token quantisation to 8 bits and its inverse, for quantised layers, caches and all-gathers of fewer bytes."""

from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from whorl.contracts import dynamic_quant_limit

from . import _torch_npu
from ._draw import Draw
from ._formats import FORMATS
from ._op import Values, operator, widen
from ._torch_npu import dtype_name

LONGEST_ROW = 32768  # largest C of which the Triton kernel can hold a row in registers


def _check_dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"dequantize: dtype is {dtype}, expected bf16, fp16 or fp32")


@operator(forward_only=True, sharding="rows")
def dynamic_quant(
    x: Annotated[Tensor, "[..., C>0] float"], *, format: Literal["int8", "fp8"] = "int8"
) -> tuple[Annotated[Tensor, "[..., C] int8 or fp8"], Annotated[Tensor, "[...] fp32"]]:
    """Quantise symmetrically with one scale per row (token), so that x is about q * scale.

    Returns q, int8 (format "fp8": float8_e4m3fn), contiguous, and scale, the row's largest magnitude divided by 127
    (fp8: 448). q = x / scale in fp32, rounded to nearest even and clamped to +-127 (fp8: +-448); -128 is not used. A
    row of zeros, or so small that its scale rounds to zero, has scale 0 and codes 0, so it dequantises to exact zeros.
    A row with an infinity or NaN has that as its scale and codes 0, so it dequantises to NaN. A row's result depends on
    that row alone. No gradient.

        q, scale = ops.dynamic_quant(x)
        x = ops.dequantize(q, scale, x.dtype)
    """
    kind, largest = FORMATS[format]
    wide = widen(x)
    # Divided by a tensor: on a GPU torch would multiply by the reciprocal of a Python number, which rounds differently.
    scale = wide.abs().amax(-1, keepdim=True) / wide.new_full((1,), largest)
    is_usable = (scale > 0) & (scale < torch.inf)
    codes = torch.where(is_usable, wide / scale, 0.0)
    if format == "int8":
        codes = codes.round()
    return codes.clamp(-largest, largest).to(kind).contiguous(), scale.squeeze(-1)


@operator(
    check=_check_dequantize,
    forward_only=True,
    sharding="rows",
    without={"torch_npu": "npu_anti_quant has a scale for each channel, not for each token"},
)
def dequantize(
    q: Annotated[Tensor, "[..., C] int8 or fp8"], scale: Annotated[Tensor, "[...] fp32 or fp64"], dtype: torch.dtype
) -> Annotated[Tensor, "[..., C] dtype"]:
    """Return x = q * scale, the inverse of `dynamic_quant` up to its rounding.

    dtype: bf16, fp16 or fp32. x is contiguous. One product in fp32, rounded once. No gradient.
    """
    wide = scale.unsqueeze(-1)
    return (q.to(wide.dtype) * wide).to(dtype).contiguous()


def _triton_reason(x: Tensor, **_: object) -> str | None:
    return None if x.shape[-1] <= LONGEST_ROW else f"takes rows of up to {LONGEST_ROW} channels, got {x.shape[-1]}"


dynamic_quant.impl("triton", "quant_triton:quantize", accepts=_triton_reason)
dequantize.impl("triton", "quant_triton:dequantize")


def _npu_reason(x: Tensor, format: str) -> str | None:
    return dynamic_quant_limit(shape=x.shape, dtype=dtype_name(x), format=format)


@dynamic_quant.impl("torch_npu", accepts=_npu_reason)
def _(x, format):  # type: ignore[no-untyped-def]
    return _torch_npu.call("npu_dynamic_quant", input=x.contiguous(), dst_type=torch.int8)


_CASES: list[Values] = [
    {"shape": (1, 2)},
    {"shape": (17, 129), "scale": 0.01},
    {"shape": (3, 5, 194)},
    {"shape": (5, 4098)},
    {"shape": (0, 64)},
    {"shape": (6, 7, 64), "sliced": 6},
    {"shape": (9, 70), "format": "fp8", "sliced": 6, "scale": 0.3},
    {"shape": (4, 2048), "format": "fp8"},
]
_BENCH: list[Values] = [
    {"shape": (16384, 4096)},
    {"shape": (4096, 7168)},
    {"shape": (16384, 4096), "format": "fp8"},
    {"shape": (1, 7168)},
]


def _make(draw: Draw, shape: tuple[int, ...]) -> Values:
    x = draw.scaled(*shape)
    if shape[0] > 2 and not x.is_meta:
        x[1] = 0
    return {"x": x}


def _make_dequantize(draw: Draw, shape: tuple[int, ...], format: str = "int8") -> Values:
    x = _make(replace(draw, dtype=torch.float32, sliced=False), shape)["x"]
    q, scale = dynamic_quant.reference(x, format=format)
    return {
        "q": torch.cat((q, q[..., : draw.gap]), -1)[..., : shape[-1]],
        "scale": scale.to(draw.wide),
        "dtype": draw.dtype,
    }


dynamic_quant.inputs(cases=_CASES, bench=_BENCH)(_make)
dequantize.inputs(cases=_CASES, bench=_BENCH)(_make_dequantize)
