# mypy: allow-untyped-defs
"""The gates of gated delta layers in Triton: a block of tokens a program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_triton import launched
from .._rows import ceil_div, flat_rows, power_of_2

ROWS = 16  # tokens of a program


@triton.jit
def _exp(x):
    """Return e^x within about an ulp, for x from -87 to 88, to which x is cut.

    A GPU's own exponential is that of 2, whose exponent x / log 2 is rounded first: the larger x, the larger the error.
    Here e^x = 2^n e^r with |r| < 0.35, and n log 2 is subtracted in two parts, of which the first is exact.
    """
    x = tl.maximum(x, -87.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 88.0, propagate_nan=tl.PropagateNan.ALL)
    n = tl.floor(tl.fma(x, 1.4426950408889634, 0.5))
    r = tl.fma(n, 2.12194440054690583e-4, tl.fma(n, -0.693359375, x))
    y = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    y = tl.fma(y, r, 8.3334519073e-3)
    y = tl.fma(y, r, 4.1665795894e-2)
    y = tl.fma(y, r, 1.6666665459e-1)
    y = tl.fma(y, r, 5.0000001201e-1)
    y = tl.fma(y, r * r, r) + 1.0
    return y * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _log_of_one_plus(p):
    """Return log(1 + p) for p from 0 to 1, within about an ulp: with s = p / (2 + p) it is 2 (s + s^3 / 3 + ...)."""
    s = tl.div_rn(p, 2.0 + p)
    square = s * s
    y = tl.fma(square, 0.0769230769, 0.0909090909)
    y = tl.fma(y, square, 0.1111111111)
    y = tl.fma(y, square, 0.1428571429)
    y = tl.fma(y, square, 0.2)
    y = tl.fma(y, square, 0.3333333333)
    # p - s p is 2 s exactly, and its rounding is that of p alone where p is small.
    return p - s * (p - 2.0 * square * y)


@triton.jit
def _softplus(x):
    """Return log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)."""
    return tl.maximum(x, 0.0) + _log_of_one_plus(_exp(-tl.abs(x)))


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + _exp(-x))


@triton.jit
def gates_of(a, b, a_log, bias):
    """Return g and beta, from numbers in fp32."""
    return -_exp(a_log) * _softplus(a + bias), _sigmoid(b)


@launched
@triton.jit
def _gates_kernel(
    a_ptr, b_ptr, a_log_ptr, bias_ptr, g_ptr, beta_ptr, a_stride, b_stride, T, H: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows, heads = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (rows < T) & (heads < H)
    a = tl.load(a_ptr + rows.to(tl.int64) * a_stride + heads, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + rows.to(tl.int64) * b_stride + heads, mask=mask, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + heads, mask=heads < H, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + heads, mask=heads < H, other=0.0).to(tl.float32)
    to = rows.to(tl.int64) * H + heads
    g, beta = gates_of(a, b, a_log, bias)
    tl.store(g_ptr + to, g, mask=mask)
    tl.store(beta_ptr + to, beta, mask=mask)


@launched
@triton.jit
def _gates_backward_kernel(
    dg_ptr, dbeta_ptr, a_ptr, b_ptr, a_log_ptr, bias_ptr, da_ptr, db_ptr, partial_ptr, dg_stride, dbeta_stride,
    a_stride, b_stride, T, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute da, db, and this program's shares of the gradients of a_log and dt_bias, [2, H]."""
    rows, heads = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (rows < T) & (heads < H)
    wide = rows.to(tl.int64)
    a = tl.load(a_ptr + wide * a_stride + heads, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + wide * b_stride + heads, mask=mask, other=0.0).to(tl.float32)
    dg = tl.load(dg_ptr + wide * dg_stride + heads, mask=mask, other=0.0)
    dbeta = tl.load(dbeta_ptr + wide * dbeta_stride + heads, mask=mask, other=0.0)
    rate = -_exp(tl.load(a_log_ptr + heads, mask=heads < H, other=0.0).to(tl.float32))
    x = a + tl.load(bias_ptr + heads, mask=heads < H, other=0.0).to(tl.float32)
    dx = dg * rate * _sigmoid(x)
    power = _exp(-tl.abs(b))  # beta (1 - beta) is power / (1 + power)^2, without a difference of close numbers
    share = tl.div_rn(1.0, 1.0 + power)
    tl.store(da_ptr + wide * H + heads, dx.to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(db_ptr + wide * H + heads, (dbeta * (power * share * share)).to(db_ptr.dtype.element_ty), mask=mask)
    to = partial_ptr + tl.program_id(0).to(tl.int64) * 2 * H + heads
    tl.store(to, tl.sum(dg * rate * _softplus(x), 0)[None, :], mask=heads < H)
    tl.store(to + H, tl.sum(dx, 0)[None, :], mask=heads < H)


def forward(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if g.numel():
        rows, other, heads = flat_rows(a), flat_rows(b), a.shape[-1]
        _gates_kernel[(ceil_div(len(rows), ROWS),)](
            rows, other, a_log.contiguous(), dt_bias.contiguous(), g, beta, rows.stride(0), other.stride(0), len(rows),
            H=heads, ROWS=ROWS, BLOCK=power_of_2(heads), enable_fp_fusion=False, num_warps=4,
        )  # fmt: skip
    return g, beta


def backward(
    dg: Tensor, dbeta: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    da, db = (torch.empty(a.shape, dtype=a.dtype, device=a.device) for _ in range(2))
    if not da.numel():
        return da, db, torch.zeros_like(a_log), torch.zeros_like(dt_bias)
    tensors, heads = [flat_rows(x) for x in (dg, dbeta, a, b)], a.shape[-1]
    count = len(tensors[0])
    partial = torch.empty(ceil_div(count, ROWS), 2, heads, dtype=torch.float32, device=a.device)
    _gates_backward_kernel[(len(partial),)](
        *tensors, a_log.contiguous(), dt_bias.contiguous(), da, db, partial, *(x.stride(0) for x in tensors), count,
        H=heads, ROWS=ROWS, BLOCK=power_of_2(heads), enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
    da_log, ddt_bias = partial.sum(0)
    return da, db, da_log.to(a_log.dtype), ddt_bias.to(dt_bias.dtype)
