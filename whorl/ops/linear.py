"""The linear layer of inference, in two classes of rows whose bits do not depend on what runs beside them."""

import functools
from typing import Literal

import torch
from torch import Tensor

from whorl.device import HOST

from . import linear_torch_npu
from ._draw import Draw, Sizes
from ._op import Values, narrow, operator, widen

TILE = 32  # rows of every matrix product in the prompt class: always as many, so that a row's bits are its own
MANY = 512  # rows of one product where that is known to give the same bits


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, rows: str) -> None:
    if not x.is_floating_point():
        raise ValueError(f"linear: x is {x.dtype}, expected a floating point dtype")
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"linear: x is {list(x.shape)}, weight {list(weight.shape)}, expected [T, K] and [N, K]")
    if weight.dtype != x.dtype:
        raise ValueError(f"linear: weight is {weight.dtype}, expected x's {x.dtype}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in (x.dtype, torch.float32)):
        raise ValueError(
            f"linear: bias is {list(bias.shape)} {bias.dtype}, expected [{weight.shape[0]}] in {x.dtype} or fp32"
        )


def multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, one product a row: a row's bits depend on that row alone. Both in the dtype of accumulation."""
    if x.shape[0] == 1:
        return torch.nn.functional.linear(x, weight)
    parts = [torch.nn.functional.linear(row, weight) for row in x.split(1)]
    return torch.cat(parts) if x.shape[0] else x.new_zeros(0, weight.shape[0])


def multiply_tiles(x: Tensor, weight: Tensor, tile: int = TILE) -> Tensor:
    """x @ weight.T, `tile` rows at a time, the last padded: how many rows there are changes no bits.

    Several tiles make one product where this machine's library gives a row the same bits there.
    """
    count = x.shape[0]
    if not count:
        return x.new_zeros(0, weight.shape[0])
    padded = torch.nn.functional.pad(x, (0, 0, 0, -count % tile)) if count % tile else x
    if count <= tile:
        return (padded @ weight.t())[:count]
    size = _rows_at_once(weight.shape, weight.dtype, weight.device.type, tile, torch.get_num_threads())
    return torch.cat([part @ weight.t() for part in padded.split(size)])[:count]


@functools.cache
def _rows_at_once(shape: torch.Size, dtype: torch.dtype, device: str, tile: int, num_threads: int) -> int:
    """The most rows of a product in which a row has the bits that it has in a tile, by trial; `tile` off the CPU.

    Libraries for the CPU choose a kernel by size and then sum along K in one order: a trial of one weight tells.
    """
    if device != HOST:
        return tile
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, shape[1], generator=generator).to(dtype) for n in (MANY, shape[0]))
    expected = torch.cat([part @ weight.t() for part in x.split(tile)])
    sizes = range(2 * tile, MANY + 1, tile)
    is_same = all(torch.equal(x[:n] @ weight.t(), expected[:n]) for n in (sizes[0], sizes[1], sizes[-2], sizes[-1]))
    return MANY if is_same else tile


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, rows: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    tensors = (values["x"], values["weight"], *outputs)
    return sum(t.numel() * t.element_size() for t in tensors)


def _flops(values: Values) -> int:
    return 2 * values["x"].shape[0] * values["weight"].numel()


@operator(check=_check, forward_only=True, fake=_fake, bytes=_bytes, flops=_flops)
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rows: Literal["prompt", "decode", "batch"] = "prompt"
) -> Tensor:
    """y = x @ weight.T + bias.

    x: [T, K] bf16, fp16 or fp32; weight: [N, K] in x's dtype; bias: [N] in x's dtype or fp32; y: [T, N] like x,
    contiguous. Sums and bias in fp32, one rounding. A row's bits depend on the row, the weight and `rows` alone, not on
    how many rows there are nor on its place. "decode" is for a few rows, "batch" for the tokens of many sequences and
    "prompt" for those of a prompt; classes may differ in their last bits. No gradient.
    """
    multiply = multiply_tiles if rows == "prompt" else multiply_rows
    y = multiply(widen(x).contiguous(), widen(weight))
    if bias is not None:
        y = y + bias.to(y.dtype)
    return narrow(y, x.dtype)


def _triton_reason(x: Tensor, **_: object) -> str | None:
    return "computes in fp32, got torch.float64" if x.dtype == torch.float64 else None


linear.impl("triton", "linear_triton:forward", accepts=_triton_reason)
linear.impl("torch_npu", "linear_torch_npu:forward", accepts=linear_torch_npu.reason)


_CASES: list[Values] = [
    {"tokens": (1,), "size": (5, 8)},
    {"tokens": (3,), "size": (48, 40), "bias": True},
    {"tokens": (3,), "size": (33, 64), "rows": "decode", "scale": 0.01},
    {"tokens": (2,), "size": (200, 576), "rows": "decode", "bias": True},
    {"tokens": (0,), "size": (16, 32)},
    {"tokens": (0,), "size": (16, 32), "rows": "decode"},
    {"tokens": (35,), "size": (70, 100), "sliced": True, "bias": True},
    {"tokens": (17,), "size": (9, 136), "sliced": True, "rows": "decode"},
    {"tokens": (17,), "size": (40, 136), "sliced": True, "rows": "batch", "bias": True},
    {"tokens": (2,), "size": (33, 64), "rows": "batch", "scale": 0.01},
    {"tokens": (5,), "size": (64, 64), "bias": True, "bias_dtype": torch.float32},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "size": size, "rows": rows}
    for rows, counts in (("decode", (1, 8)), ("batch", (1, 64)), ("prompt", (8192,)))
    for tokens in counts
    for size in ((5120, 2048), (2048, 4096), (151936, 2048))
    if rows != "prompt" or size[0] < 100000
]


def _make(
    draw: Draw,
    tokens: Sizes,
    size: tuple[int, int],
    bias: bool = False,
    bias_dtype: torch.dtype | None = None,
    rows: str = "prompt",
) -> Values:
    x, weight = draw.scaled(*tokens, size[1]), draw.weight(*size)
    wide = torch.float64 if draw.dtype == torch.float64 else bias_dtype or draw.dtype
    added = torch.randn(size[0], dtype=wide, device=draw.device) if bias else None
    return {"x": x, "weight": weight, "bias": added, "rows": rows}


linear.inputs(cases=_CASES, bench=_BENCH)(_make)
