"""A linear layer whose weight is stored in 4 or 8 bits; kernels read the codes and unpack them in registers."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, operator
from ..linear import multiply
from . import packed_torch_npu
from .layout import find, packed_int4, paired_int4, tiled_bytes
from .unpacked import unpacked_linear

ZERO_DTYPES = "uint8 or int8 or int16 or int32 or int64"


def check_weight(op: str, values: Values, length: int, names: Sequence[str]) -> None:
    """Raise ValueError unless codes, scales and zeros, named in this order, store a weight with `length` columns.

    values: the operator's arguments.
    """
    order, codes = find(values["layout"]), values[names[0]]
    width, dtypes = order.width(length), " or ".join(map(str, order.dtypes))
    # Tests that compute the ground truth in fp64 pass fp8 codes as float64.
    if codes.dtype not in (*order.dtypes, torch.float64) or codes.shape[-1] != width:
        raise ValueError(
            f"{op}: {names[0]} is {list(codes.shape)} {codes.dtype}, expected [.., {width}] {dtypes}: {length} columns "
            f"in layout {values['layout']}"
        )
    rows, columns = values["rows"], values["columns"] or length
    expected = [*codes.shape[:-2], -(-order.num_rows(codes) // rows), -(-length // columns)]
    for name in names[1:]:
        x = values[name]
        if x is not None and list(x.shape) != expected:
            raise ValueError(f"{op}: {name} is {list(x.shape)} {x.dtype}, expected {expected}")


def _check(**values: Any) -> None:
    check_weight("packed_linear", values, values["x"].shape[1], ("codes", "scales", "zeros"))
    bias, count = values["bias"], find(values["layout"]).num_rows(values["codes"])
    if bias is not None and len(bias) != count:
        raise ValueError(f"packed_linear: bias is {list(bias.shape)} {bias.dtype}, expected [{count}]")


def _fake(x: Tensor, codes: Tensor, layout: str, **_: object) -> Tensor:
    return x.new_empty(x.shape[0], find(layout).num_rows(codes))


def _flops(values: Values) -> int:
    return 2 * values["x"].numel() * find(values["layout"]).num_rows(values["codes"])


@operator(check=_check, fake=_fake, flops=_flops, forward_only=True)
def packed_linear(
    x: Annotated[Tensor, "[T, K>0] float"],
    codes: Annotated[Tensor, "[CN, CK] any"],
    scales: Annotated[Tensor, "[SN, SK] float"],
    zeros: Annotated[Tensor | None, f"[ZN, ZK] {ZERO_DTYPES}"] = None,
    bias: Annotated[Tensor | None, "[N] x or fp32"] = None,
    *,
    rows: Annotated[int, "> 0"] = 1,
    columns: Annotated[int, ">= 0"] = 0,
    layout: str = "bytes",
) -> Tensor:
    """Linear layer with a packed weight: y = x @ value.T + bias.

    value = (number - zero) * scale in fp32, rounded to x's dtype. codes: the numbers [N, K] as `layout` holds them, see
    `quantised/layout.py`. "bytes": int8 or float8_e4m3fn [N, K]. "bytes_tiled": the same, [N, 64 * ceil(K / 64)].
    "int4_tiled": int32 [N, 16 * ceil(K / 128)]. "int4_paired", torch_npu's: uint8 [N / 2, K]. scales: [ceil(N / rows),
    ceil(K / columns)], one per `rows` rows and `columns` columns (0: all columns); the last block may be partial.
    zeros: of the same shape; None means 0, or 8 in layout int4_tiled. y: [T, N] like x, contiguous. y equals `linear`
    of the rounded values except that K is summed in chunks of 1024 columns: each chunk from zero, upwards, in fp32,
    then the chunks in order; up to K = 1024 that is the sum of `linear`. The bias is added last and y is rounded once.
    A token's bits depend on the token and the weight alone, as in `linear`. On Ascend torch_npu documents neither where
    values are rounded nor the order of sums, and promises no bits. No gradient.

        y = ops.packed_linear(x, codes, scales, columns=128)
    """
    return unpacked_linear(multiply, x, codes, scales, zeros, bias, rows=rows, columns=columns, layout=layout)


TRITON_LAYOUTS = ("bytes", "bytes_tiled", "int4_tiled")


def triton_reason(layout: str, **_: object) -> str | None:
    """Return None, or the reason that the Triton kernels of packed weights cannot read codes in this layout."""
    return None if layout in TRITON_LAYOUTS else f"reads the layouts {', '.join(TRITON_LAYOUTS)}, got {layout}"


packed_linear.impl("cpp", "whorl.ops.cpu.quantised:packed_linear")
packed_linear.impl("triton", "packed_linear_triton:forward", accepts=triton_reason)
packed_linear.impl("torch_npu", "packed_torch_npu:linear", accepts=packed_torch_npu.reason)


_BLOCKS = {"kind": "fp8", "rows": 128, "columns": 128}
_PAIRED = {"kind": "int4", "layout": "int4_paired"}
_CASES: list[Values] = [
    {"tokens": (1,), "size": (5, 8), "kind": "int4"},
    {"tokens": (3,), "size": (48, 96), "kind": "int4", "columns": 32, "zeros": True, "bias": True},
    {"tokens": (3,), "size": (33, 64), "kind": "int8", "scale": 0.01},
    {"tokens": (2,), "size": (40, 1280), "kind": "int4", "columns": 128, "bias": True},
    {"tokens": (0,), "size": (16, 32), "kind": "int4", "columns": 16},
    {"tokens": (19,), "size": (40, 72), "kind": "int8", "columns": 24, "zeros": True, "sliced": True, "bias": True},
    {"tokens": (5,), "size": (130, 200), **_BLOCKS},
    {"tokens": (17,), "size": (24, 136), "kind": "fp8", "sliced": True, "bias": True},
    {"tokens": (5,), "size": (70, 200), "layout": "bytes_tiled", **_BLOCKS},
    {"tokens": (18,), "size": (40, 1100), "kind": "int8", "zeros": True, "layout": "bytes_tiled"},
    {"tokens": (3,), "size": (24, 70), "bias": True, **_PAIRED},
    {"tokens": (5,), "size": (16, 160), "columns": 64, "zeros": True, "sliced": True, **_PAIRED},
]
_SIZES = ((5120, 2048), (2048, 4096))
_BENCH: list[Values] = [
    {"tokens": (tokens,), "size": size, **kind}
    for kind in (
        {"kind": "int4", "columns": 128},
        {"kind": "int4", "columns": 32, "zeros": True},
        {"kind": "int8"},
        {"kind": "int8", "layout": "bytes_tiled"},
        {"layout": "bytes_tiled", **_BLOCKS},
        {"kind": "fp8", "layout": "bytes_tiled"},
    )
    for tokens in (1, 8, 64, 8192)
    for size in _SIZES
]


def draw_weight(
    draw: Draw,
    *shape: int,
    kind: str,
    rows: int = 1,
    columns: int = 0,
    zeros: bool = False,
    layout: str = "",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw codes, scales and zeros of a random weight [.., N, K], scaled so that x @ weight.T is about as large as x.

    kind: "int4", "int8" or "fp8"; zeros: whether there are zero points; the others are those of `packed_linear`.
    """
    layout = layout_name(kind, layout)
    *lead, high, wide = shape
    groups = *lead, -(-high // rows), -(-wide // (columns or wide))
    code_norm = {"int4": 4.6, "int8": 74.0, "fp8": 8.0}[kind] * wide**0.5
    scales = (torch.rand(groups, device=draw.device) + 0.5) / code_norm
    scales = scales.to(torch.float32 if kind == "fp8" or draw.dtype == torch.float64 else draw.dtype)
    on_device: Any = {"device": draw.device}
    middle = find(layout).middle
    zero_points = torch.randint(middle - 3, middle + 4, groups, **on_device).to(torch.int16) if zeros else None
    gap = 16 * draw.sliced if layout == "bytes" else 0
    if kind == "fp8":
        codes = (8 * torch.randn(*shape[:-1], wide + gap, **on_device)).to(torch.float8_e4m3fn)
    else:
        low, high = (0, 16) if kind == "int4" else (-127, 128)
        codes = torch.randint(low, high, (*shape[:-1], wide + gap), **on_device).to(torch.int8)
    pack = {"int4_tiled": packed_int4, "int4_paired": paired_int4, "bytes_tiled": tiled_bytes}.get(layout)
    return (codes[..., :wide] if pack is None else pack(codes)), scales, zero_points


def layout_name(kind: str, layout: str) -> str:
    """Return the layout of a case, by default that of its kind."""
    return layout or ("int4_tiled" if kind == "int4" else "bytes")


@packed_linear.inputs(cases=_CASES, bench=_BENCH, words={"size": "N, K"})
def _(draw: Draw, size: tuple[int, int], kind: str, layout: str = "", **case: Any) -> Values:
    options = {name: case[name] for name in ("rows", "columns", "zeros") if name in case}
    codes, scales, zeros = draw_weight(draw, *size, kind=kind, layout=layout, **options)
    return {"codes": codes, "scales": scales, "zeros": zeros, "layout": layout_name(kind, layout)}
