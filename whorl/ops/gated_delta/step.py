"""A gated delta layer between its projections, for decoding sequences: one operator, and on CUDA two kernels."""

from typing import Annotated, Any

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, operator
from .conv_lanes import causal_conv_lanes
from .gates import delta_gates
from .l2_norm import l2_norm
from .lanes import NAMES, draw_stored, gated_delta_lanes, lanes_reason
from .layout import MOST_ROWS, delta_tensors
from .norm import gated_rms_norm
from .sequences import check_pieces

WITHOUT = {"torch_npu": "its recurrence keeps the state in bf16 and promises no bits that prompts share"}


def _check(
    qkv: Tensor, keys: Tensor, deltas: Tensor, lanes: Tensor, query_starts: Tensor, context_lens: Tensor, **_rest: Any
) -> None:
    check_pieces("gated_delta_step", len(qkv), lanes, query_starts, context_lens)
    (_, key_heads, _, dim), (_, heads, _, value_dim) = keys.shape, deltas.shape
    if (channels := 2 * key_heads * dim + heads * value_dim) != qkv.shape[1]:
        raise ValueError(
            f"gated_delta_step: qkv has {qkv.shape[1]} channels, expected {channels}: those of {key_heads} query heads "
            f"and as many key heads of {dim}, and of {heads} value heads of {value_dim}"
        )


@operator(check=_check, mutates=("out", "tail", "inputs", *NAMES), without=WITHOUT)
def gated_delta_step(
    qkv: Annotated[Tensor, "[T, N] float"],
    ba: Annotated[Tensor, "[T, 2*HV] qkv"],
    gate: Annotated[Tensor, "[T, HV, DV] qkv"],
    weight: Annotated[Tensor, "[N, W] qkv or fp32"],
    a_log: Annotated[Tensor, "[HV] qkv or fp32"],
    dt_bias: Annotated[Tensor, "[HV] qkv or fp32"],
    norm: Annotated[Tensor, "[DV] qkv or fp32"],
    out: Annotated[Tensor, "[T, HV, DV] qkv"],
    tail: Annotated[Tensor, "[M, W - 1, N] qkv"],
    inputs: Annotated[Tensor, "[M, ring, N] qkv"],
    state: Annotated[Tensor, "[M, HV, D, DV] fp32"],
    rounded: Annotated[Tensor, "[M, HV, D, DV] qkv"],
    keys: Annotated[Tensor, "[M, HK>0, 64, D] qkv"],
    deltas: Annotated[Tensor, "[M, HV, 64, DV] qkv"],
    decays: Annotated[Tensor, "[M, HV, 64] fp32"],
    errors: Annotated[Tensor, "[M, HV, 32, DV] qkv"],
    inverses: Annotated[Tensor, "[M, HV, 32, 16] fp32"],
    lanes: Annotated[Tensor, "[B] int, from 0 to M - 1"],
    query_starts: Annotated[Tensor, "[B + 1] int32"],
    context_lens: Annotated[Tensor, "[B] int32"],
    *,
    scale: Annotated[float, "> 0"],
    eps: Annotated[float, "> 0"] = 1e-6,
    most: Annotated[int, "> 0"] = MOST_ROWS,
) -> None:
    """A decode step of a gated delta layer, from its projections to its normalized result: `causal_conv_lanes`,
    `l2_norm`, `delta_gates`, `gated_delta_lanes` and `gated_rms_norm`, one after the other. The bits are theirs.

    qkv has all query heads, all key heads and all value heads, ba what beta is computed from and then what the decay
    is, gate that of the result. weight is the convolution's, norm that of `gated_rms_norm`, eps its eps. Lanes, lengths
    and `most` are as in `gated_delta_lanes`, but every call has at most 16 new tokens of a sequence. out is written,
    zero for padding, and the lanes are kept up to date. Returns nothing.

        ops.gated_delta_step(qkv, ba, z, weight, A_log, dt_bias, norm, out, **cache, **lengths, scale=128**-0.5, most=1)
    """
    tables = lanes, query_starts, context_lens
    (_, key_heads, _, dim), heads = keys.shape, deltas.shape[1]
    y = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    causal_conv_lanes.reference(qkv, weight, y, tail, inputs, *tables)
    qk = l2_norm.reference(y[:, : 2 * key_heads * dim].unflatten(1, (2 * key_heads, dim)))
    v = y[:, 2 * key_heads * dim :].unflatten(1, (heads, -1))
    g, beta = delta_gates.reference(ba[:, heads:], ba[:, :heads], a_log, dt_bias)
    result, states = torch.empty_like(v), (state, rounded, keys, deltas, decays, errors, inverses)
    inner = (qk[:, :key_heads], qk[:, key_heads:], v, g, beta, result)
    gated_delta_lanes.reference(*inner, *states, *tables, scale=scale, most=most)
    last = int(query_starts[-1])
    out.copy_(gated_rms_norm.reference(result, gate, norm, eps))
    out[last:] = 0


def _triton_reason(tail: Tensor, inputs: Tensor, out: Tensor, qkv: Tensor, most: int, **rest: Any) -> str | None:
    if most > MOST_ROWS:
        return f"most is {most}, expected {MOST_ROWS} at most"
    stored = {"tail": tail, "inputs": inputs} | {name: rest[name] for name in NAMES}
    return lanes_reason(stored, out, rest["keys"][:, 0])


gated_delta_step.impl("triton", "step_triton:compute", accepts=_triton_reason)

_SMALL = {"HK": 1, "G": 1, "D": 16, "DV": 16}
_CASES: list[Values] = [
    {"queries": (1,), "contexts": (40,), "most": 1, **_SMALL},
    {"queries": (3, 1, 2), "contexts": (5, 64, 130), "HK": 2, "G": 2, "D": 32, "DV": 16},
    {"queries": (16, 5), "contexts": (30, 69), "HK": 1, "G": 3, "D": 16, "DV": 24, "scale": 0.01},
    {"queries": (1, 0, 1), "contexts": (64, 9, 190), "most": 1, "idle": 3, "HK": 2, "G": 1, "D": 24, "DV": 40},
    {"queries": (0,), "contexts": (4,), **_SMALL},
    {"queries": (1, 4), "contexts": (63, 64), "HK": 1, "G": 2, "D": 32, "DV": 32, "sliced": True},
]
_QWEN = {"HK": 16, "G": 2, "D": 128, "DV": 128, "a_log": torch.float32, "dt_bias": torch.float32, "norm": torch.float32}
_BENCH: list[Values] = [
    {"queries": (1,), "contexts": (4130,), "most": 1, **_QWEN},
    {"queries": (1,) * 64, "contexts": (4130,) * 64, "most": 1, **_QWEN},
    {"queries": (4,) * 8, "contexts": (4130,) * 8, "most": 4, **_QWEN},
]


@gated_delta_step.inputs(cases=_CASES, bench=_BENCH)
def _(
    draw: Draw, queries: tuple[int, ...], contexts: tuple[int, ...], HK: int, G: int, D: int, DV: int, idle: int = 0
) -> Values:
    stored = draw_stored(draw, queries, contexts, HK, G, D, DV, idle)
    kept, rows = delta_tensors(HK, G * HK, D, DV, 4, draw.dtype)
    conv = {name: (kept | rows)[name][0] for name in ("tail", "inputs")}
    drawn = Draw(draw.dtype, draw.device)
    of_conv = {name: drawn.normal(stored["M"], *shape) for name, shape in conv.items()}
    sizes = {"N": 2 * HK * D + G * HK * DV, "HV": G * HK, "W": 4, "ring": conv["inputs"][0]}
    a_log = torch.linspace(-6, 0, G * HK, device=draw.device)
    return {**stored, **of_conv, **sizes, "a_log": a_log, "out": draw.normal}
