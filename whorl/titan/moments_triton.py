# mypy: allow-untyped-defs
"""AdamW with moments of 8 bits as one kernel: it decodes, updates and encodes in registers.

It reads and writes each code, scale and weight once: 10.06 bytes for a parameter in 16 bits. The same in torch's
operators, `swap_update.py`, is the reference and moves 80 times as much.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from whorl.device import HOST
from whorl.ops._launch_triton import launched
from whorl.ops._rows import ceil_div
from whorl.titan.moments import BLOCK, FORMATS, Int8
from whorl.titan.swap_update import Piece

ROWS = 4  # blocks of 256 values that are updated at once: one for each warp
TILE = 4 * ROWS * BLOCK  # values of a program: a call of the random generator gives four numbers


@triton.jit
def _value(level, LEVELS: tl.constexpr, OCTAVES: tl.constexpr):
    """Return the value of a level relative to the largest of its block, as `Int8._value` does."""
    return tl.where(level == 0, 0.0, tl.exp2((level - LEVELS) * (OCTAVES / (LEVELS - 1))))


@triton.jit
def _decode(codes_ptr, scales_ptr, at, rows, size, LEVELS: tl.constexpr, OCTAVES: tl.constexpr, BLOCK: tl.constexpr):
    code = tl.load(codes_ptr + at, mask=at < size, other=0).to(tl.float32)
    scale = tl.load(scales_ptr + rows, mask=rows * BLOCK < size, other=0.0)
    value = _value(tl.abs(code), LEVELS, OCTAVES) * scale
    return tl.where(code < 0, -value, value)


@triton.jit
def _encode(
    x,
    uniform,
    codes_ptr,
    scales_ptr,
    at,
    rows,
    size,
    SIGNED: tl.constexpr,
    LEVELS: tl.constexpr,
    OCTAVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store x as codes and scales, rounded up where `uniform` is below the distance from the level below."""
    STEP: tl.constexpr = OCTAVES / (LEVELS - 1)  # octaves from one level to the next
    # The maximum skips a NaN. An infinite scale makes the whole block NaN when it is decoded, as a NaN scale would.
    magnitude = tl.where(x == x, tl.abs(x), float("inf"))
    scale = tl.max(magnitude, 1)[:, None]
    is_usable = (scale > 0) & (scale < float("inf"))
    relative = tl.where(is_usable, magnitude / tl.where(is_usable, scale, 1.0), 0.0)
    place = tl.where(relative > 0, LEVELS + tl.log2(tl.where(relative > 0, relative, 1.0)) * (1 / STEP), 0.0)
    below = tl.minimum(tl.maximum(tl.floor(place), 0.0), LEVELS - 1)
    # The distance from the level below, from 0 to 1. The level below the lowest is zero.
    distance = (tl.exp2((place - below) * STEP) - 1) * (1 / (2**STEP - 1))
    distance = tl.where(below == 0, relative * 2**OCTAVES, distance)
    level = below + tl.where(distance > uniform, 1.0, 0.0)
    if SIGNED:
        code = tl.where(x < 0, -level, level).to(tl.int32)
    else:
        code = tl.where(relative > 0, tl.maximum(level, 1.0), level).to(tl.int32)
    tl.store(codes_ptr + at, code.to(codes_ptr.dtype.element_ty), mask=at < size)
    tl.store(scales_ptr + rows, scale, mask=rows * BLOCK < size)


@launched
@triton.jit(
    do_not_specialize=["update", "bucket"],
    do_not_specialize_on_alignment=["offset", "first_scales_ptr", "second_scales_ptr", "lr_ptr", "step_ptr"],
)
def _adamw_int8_kernel(
    param_ptr,
    grad_ptr,
    first_ptr,
    first_scales_ptr,
    second_ptr,
    second_scales_ptr,
    lr_ptr,
    step_ptr,
    size,
    offset,
    update,
    bucket,
    log_beta1,
    log_beta2,
    rest1,
    rest2,
    eps,
    weight_decay,
    MAXIMIZE: tl.constexpr,
    LEVELS1: tl.constexpr,
    OCTAVES1: tl.constexpr,
    LEVELS2: tl.constexpr,
    OCTAVES2: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Update TILE values of a span. offset: where the span starts in its bucket; rest1 is 1 - beta1."""
    lr, step = tl.load(lr_ptr), tl.load(step_ptr).to(tl.float64)
    # In fp64, because 1 - beta2**step loses most of its digits in fp32 when the step count is small.
    step_size = lr / (1 - tl.exp(step * log_beta1)).to(tl.float32)
    root = tl.sqrt((1 - tl.exp(step * log_beta2)).to(tl.float32))
    first_row = tl.program_id(0).to(tl.int64) * (4 * ROWS)
    rows_of_part = tl.arange(0, ROWS)[:, None]
    inside = rows_of_part * BLOCK + tl.arange(0, BLOCK)[None, :]
    counter = (offset + first_row * BLOCK).to(tl.int32) + inside
    words = tl.randint4x((update.to(tl.int64) << 20) + bucket, counter)
    for part in tl.static_range(4):
        rows = first_row + part * ROWS + rows_of_part
        at = (first_row + part * ROWS) * BLOCK + inside
        mask = at < size
        param = tl.load(param_ptr + at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if MAXIMIZE:
            grad = -grad
        first = _decode(first_ptr, first_scales_ptr, at, rows, size, LEVELS1, OCTAVES1, BLOCK)
        second = _decode(second_ptr, second_scales_ptr, at, rows, size, LEVELS2, OCTAVES2, BLOCK)
        first += (grad - first) * rest1
        second += (grad * grad - second) * rest2
        param -= lr * weight_decay * param
        param -= step_size * first / (tl.sqrt(second) / root + eps)
        tl.store(param_ptr + at, param.to(param_ptr.dtype.element_ty), mask=mask)
        # Half a word for each moment. The middle of its interval keeps the rounding unbiased.
        low = ((words[part] & 0xFFFF).to(tl.float32) + 0.5) * (1 / 65536)
        high = ((words[part] >> 16).to(tl.float32) + 0.5) * (1 / 65536)
        _encode(first, low, first_ptr, first_scales_ptr, at, rows, size, True, LEVELS1, OCTAVES1, BLOCK)
        _encode(second, high, second_ptr, second_scales_ptr, at, rows, size, False, LEVELS2, OCTAVES2, BLOCK)


_CONSTANTS: dict[str, Any] = {}
for _number, _format in enumerate(FORMATS["int8"], 1):
    assert isinstance(_format, Int8)
    _CONSTANTS |= {f"LEVELS{_number}": _format.levels, f"OCTAVES{_number}": _format.octaves}
_CONSTANTS |= {"BLOCK": BLOCK, "ROWS": ROWS, "num_warps": 4}


def update(group: Mapping[str, Any], pieces: list[Piece], update_number: int, bucket: int) -> None:
    """Update the parameters and the int8 moments of a bucket in place.

    group: the options of the parameter group, as torch.optim.AdamW has them. The random numbers of the rounding depend
    on the number of the update, on that of the bucket and on the place in it.
    """
    device = pieces[0].param.device
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.device.type != HOST:
        lr_on_device = lr.to(device=device, dtype=torch.float32)
    else:  # filled by a kernel: a copy from the host would wait for the device
        lr_on_device = torch.full((), float(lr), dtype=torch.float32, device=device)
    beta1, beta2 = map(float, group["betas"])
    numbers = (_log(beta1), _log(beta2), 1 - beta1, 1 - beta2, float(group["eps"]), float(group["weight_decay"]))
    is_maximized = bool(group["maximize"])
    for piece in pieces:
        size = piece.param.numel()
        _adamw_int8_kernel[(ceil_div(size, TILE),)](
            piece.param,
            piece.grad,
            *piece.moments[0],
            *piece.moments[1],
            lr_on_device,
            piece.step,
            size,
            piece.offset,
            update_number,
            bucket,
            *numbers,
            MAXIMIZE=is_maximized,
            **_CONSTANTS,
        )


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
