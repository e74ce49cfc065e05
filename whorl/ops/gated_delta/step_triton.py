# mypy: allow-untyped-defs
"""A decode step of a gated delta layer in Triton: one kernel for what the rule takes, then the rule's with the gate.

The first is short and has a program for every head of q, k and v. In the rule's own kernel the convolution would keep
what the rule has loaded waiting, and take its registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_triton import launched
from .._overlap_triton import begin, follow, overlap
from .._rows import power_of_2, unit_stride
from . import rows_triton
from .chunks_triton import CHUNK
from .conv_triton import convolved
from .gates_triton import gates_of
from .heads_triton import inverse_norm
from .layout import MOST_ROWS

EPS = tl.constexpr(1e-6)  # of `l2_norm`


@launched
@triton.jit
def _delta_inputs_kernel(
    x_ptr,
    ba_ptr,
    weight_ptr,
    a_log_ptr,
    bias_ptr,
    y_ptr,
    g_ptr,
    beta_ptr,
    tail_ptr,
    inputs_ptr,
    lanes_ptr,
    starts_ptr,
    lengths_ptr,
    x_stride,
    ba_stride,
    tail_stride,
    inputs_stride,
    N,
    KEYS: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    RING: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one head of q, k or v of one sequence's new tokens, and with v the head's g and beta.

    KEYS: heads of q and k together. y: [T, N] contiguous.
    """
    begin(OVERLAP)
    follow(OVERLAP)
    head, sequence = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    count = stop - first
    if count > 0:
        row = tl.maximum(tl.load(lengths_ptr + sequence) - count, 0) % CHUNK
        lane = tl.load(lanes_ptr + sequence).to(tl.int64)
        index = tl.arange(0, ROWS)
        token, is_real = (first + index).to(tl.int64), index < count
        if head < KEYS:
            channels = tl.arange(0, BLOCK_D)
            y = convolved(
                x_ptr, weight_ptr, tail_ptr, inputs_ptr, first, count, row, lane, head * D + channels, channels < D,
                x_stride, tail_stride, inputs_stride, N, ROWS, BLOCK_D, W, RING,
            )  # fmt: skip
            wide = y.to(tl.float32)
            wide *= inverse_norm(wide, EPS, D, False, ROWS, BLOCK_D)
            to = y_ptr + token[:, None] * N + head * D + channels[None, :]
            tl.store(to, wide.to(y_ptr.dtype.element_ty), mask=is_real[:, None] & (channels < D)[None, :])
        else:
            head -= KEYS
            values = tl.arange(0, BV)
            y = convolved(
                x_ptr, weight_ptr, tail_ptr, inputs_ptr, first, count, row, lane, KEYS * D + head * DV + values,
                values < DV, x_stride, tail_stride, inputs_stride, N, ROWS, BV, W, RING,
            )  # fmt: skip
            to = y_ptr + token[:, None] * N + KEYS * D + head * DV + values[None, :]
            tl.store(to, y, mask=is_real[:, None] & (values < DV)[None, :])
            of_beta = tl.load(ba_ptr + token * ba_stride + head, mask=is_real, other=0.0).to(tl.float32)
            of_decay = tl.load(ba_ptr + token * ba_stride + HV + head, mask=is_real, other=0.0).to(tl.float32)
            a_log, bias = tl.load(a_log_ptr + head).to(tl.float32), tl.load(bias_ptr + head).to(tl.float32)
            g, beta = gates_of(of_decay, of_beta, a_log, bias)
            tl.store(g_ptr + token * HV + head, g, mask=is_real)
            tl.store(beta_ptr + token * HV + head, beta, mask=is_real)


def compute(
    qkv: Tensor,
    ba: Tensor,
    gate: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    out: Tensor,
    lanes: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    eps: float,
    most: int,
    **states: Tensor,
) -> None:
    if not len(qkv) or not len(lanes):
        out.zero_()
        return
    qkv, ba, gate = (unit_stride(x) for x in (qkv, ba, gate))
    (_, key_heads, _, dim), (_, heads, _, value_dim) = states["keys"].shape, states["deltas"].shape
    tail, inputs = states.pop("tail"), states.pop("inputs")
    starts, lengths, states["lanes"] = query_starts.contiguous(), context_lens.contiguous(), lanes.contiguous()
    y = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    g, beta = (torch.empty(len(qkv), heads, dtype=torch.float32, device=qkv.device) for _ in range(2))
    _delta_inputs_kernel[(2 * key_heads + heads, len(lanes))](
        qkv,
        ba,
        weight.contiguous(),
        a_log.contiguous(),
        dt_bias.contiguous(),
        y,
        g,
        beta,
        tail,
        inputs,
        states["lanes"],
        starts,
        lengths,
        qkv.stride(0),
        ba.stride(0),
        tail.stride(0),
        inputs.stride(0),
        qkv.shape[1],
        KEYS=2 * key_heads,
        HV=heads,
        D=dim,
        DV=value_dim,
        BLOCK_D=power_of_2(dim),
        BV=power_of_2(value_dim),
        W=weight.shape[1],
        RING=inputs.shape[1],
        ROWS=1 if most == 1 else MOST_ROWS,
        enable_fp_fusion=False,
        num_warps=1 if most == 1 else 4,
        **overlap(qkv),
    )
    q, k, v = (x.unflatten(1, (-1, size)) for x, size in zip(
        y.split((key_heads * dim, key_heads * dim, heads * value_dim), 1), (dim, dim, value_dim), strict=True
    ))  # fmt: skip
    of_rule = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    gated_by = gate, norm.contiguous(), eps
    rows_triton.launch(of_rule, out, states, starts, lengths, scale, most, gated_by=gated_by, **overlap(qkv))
