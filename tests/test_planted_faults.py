"""The tests of the kernels, tested: each fault planted in a kernel's source turns the shared check red.

A fault is one substitution. Where a kernel has changed so that its text is not found, plant the fault anew.
"""

from pathlib import Path

import pytest
import torch
from planted import Fault, faults, first_red, plant
from test_ops import arguments, check, few_processors, num_rows

from whorl.ops import OPS

ROPE, NORM = "whorl.ops.rope.triton", "whorl.ops.rms_norm_triton"
SWIGLU, QK = "whorl.ops.swiglu_triton", "whorl.ops.attention.qk_norm_rope_triton"
QK_BACKWARD = "whorl.ops.attention.qk_norm_rope_backward_triton"
LINEAR, EXPERTS = "whorl.ops.linear_triton", "whorl.ops.moe.experts_triton"
ROUTE = "whorl.ops.moe.route_triton"
PAGED, SAMPLE = "whorl.ops.attention.paged_triton", "whorl.ops.sample_triton"
DECODE, PROMPT = "whorl.ops.attention.decode_triton", "whorl.ops.attention.prompt_triton"
CUTS = "whorl.ops.attention.cuts_triton"


FAULTS = [
    *faults(
        ROPE,
        "rope",
        ("wrong sign", "first * cos - second * sin", "first * cos + second * sin"),
        ("wrong sign, other half", "second * cos + first * sin", "second * cos - first * sin"),
        ("sin offset of the padded width", "at + HALF, mask", "at + channels.shape[0], mask"),
        ("rows of the padded width", "row * (2 * HALF)", "row * (2 * channels.shape[0])"),
        ("table looked up by token", "if AXES > 0:", "if AXES > 1:"),
        ("inverse ignored", "sin = -sin", "sin = 1.0 * sin"),
        ("pairs written in reverse", "tl.join(first, second)", "tl.join(second, first)"),
        ("last channel not written", "REST_START + REST)", "REST_START + REST - 1)"),
        ("sequence and batch mixed", "(tokens % S)[:, None]", "(tokens // S)[:, None]"),
        ("k of the first head only", "heads * k_stride_h", "0 * heads * k_stride_h"),
    ),
    *faults(
        ROPE,
        "mrope",
        ("H and W read at each other's stride", "+ axis * T + tokens", "+ (3 - axis) * T + tokens"),
        ("every axis read at T's stride", "+ axis * T + tokens", "+ 0 * T + tokens"),
        ("interleaved H and W exchanged", "channels % 3 == 1", "channels % 3 == 2"),
        ("interleaved W bounded by H", "channels < 3 * S2", "channels < 3 * S1"),
        ("h and w exchanged in hwt", "1 + channels % 2", "2 - channels % 2"),
        ("bands one channel off", "tl.where(channels < S0, 0", "tl.where(channels <= S0, 0"),
        ("fourth axis lost", "S2, axes, 3)", "S2, axes, 2)"),
    ),
    *faults(
        ROPE,
        "rope_",
        ("in place, wrong sign", "first * cos - second * sin", "first * cos + second * sin"),
    ),
    *faults(
        ROPE,
        "mrope_backward",
        ("in the gradient, wrong sign", "second * cos + first", "second * cos - first"),
    ),
    *faults(
        NORM,
        "rms_norm",
        ("mean over one too many", "total / C + eps", "total / (C + 1) + eps"),
        ("ten times eps", "total / C + eps", "total / C + 10 * eps"),
    ),
    Fault("plus one ignored", NORM, "rms_norm", "weight += 1.0", "weight += 0.0", 2),
    Fault("last element dropped", NORM, "rms_norm", "tl.sum(x * x, 1)", "tl.sum(x * x * (columns < C - 1), 1)", 2),
    *faults(
        NORM,
        "add_rms_norm",
        ("residual subtracted", "x += tl.load(residual_ptr", "x -= tl.load(residual_ptr"),
        ("new residual not written", "total, mask=mask,", "total, mask=mask & (columns > 0),"),
    ),
    *faults(
        NORM,
        "rms_norm_backward",
        ("projection forgotten", "scaled - unit * (", "scaled - 0 * unit * ("),
        ("first row block lost", "+= dy * unit", "+= dy * unit * (block > 0)"),
    ),
    Fault("only the last row block", NORM, "rms_norm_backward", "dweight += dy * unit", "dweight = dy * unit", 1, True),
    *faults(
        NORM,
        "rms_norm_backward",
        ("residual's gradient lost", "dx += tl.load(", "dx += 0 * tl.load("),
    ),
    *faults(
        SWIGLU,
        "swiglu",
        ("gate and up exchanged", "gate * tl.sigmoid(gate) * up", "up * tl.sigmoid(up) * gate"),
        ("up one channel early", "tl.load(x_ptr + F + columns", "tl.load(x_ptr + F - 1 + columns"),
        ("last channel not written", "mask=columns < F)", "mask=columns < F - 1)"),
        ("second block lost", "2 * start + tl.arange", "start + tl.arange"),
    ),
    *faults(
        SWIGLU,
        "swiglu_backward",
        ("wrong derivative", "1 + gate * (1 - sigmoid)", "1 - gate * (1 - sigmoid)"),
        ("gradients exchanged", "tl.join(dgate, dup)", "tl.join(dup, dgate)"),
    ),
    *faults(
        QK,
        "qk_norm_rope",
        ("wrong sign", "first * cos - second * sin", "first * cos + second * sin"),
        ("mean over one too many", "total / D + eps", "total / (D + 1) + eps"),
        ("norm of the turned channels", "total += tl.sum(", "total += 0 * tl.sum("),
        ("k with q's weight", "qkv_ptr, k_ptr, k_weight_ptr", "qkv_ptr, k_ptr, q_weight_ptr"),
        ("k read as v", "(HQ + HK + heads) * D, y_token", "(HQ + heads) * D, y_token"),
    ),
    *faults(
        QK,
        "qk_norm_rope_write",
        ("slot without a block", "slots // CACHE_BLOCK * block", "slots * 0 * block"),
    ),
    *faults(
        QK_BACKWARD,
        "qk_norm_rope_backward",
        ("rotation not turned back", "dy_first * cos + dy", "dy_first * cos - dy"),
        ("projection forgotten", "mean = (dot / D)", "mean = (0 * dot / D)"),
    ),
    Fault(
        "only the last block",
        QK_BACKWARD,
        "qk_norm_rope_backward",
        "_first += more_first",
        "_first = more_first",
        1,
        True,
    ),
    *faults(
        QK_BACKWARD,
        "qk_norm_rope_backward",
        ("gradient of the weight scaled", "= d_first * first", "= w_first * first"),
    ),
    *faults(
        LINEAR,
        "linear",
        ("last column not written", "mask=columns < N)", "mask=columns < N - 1)"),
        ("every row reads the first", "x_at, y_at = x_at + x_stride,", "x_at, y_at = x_at,"),
    ),
    Fault("bias forgotten", LINEAR, "linear", "if HAS_BIAS:", "if not HAS_BIAS:", 2),
    *faults(
        LINEAR,
        "linear",
        ("sum of the last block", "dot(x, weight, total, WIDEN)", "dot(x, weight, total * 0, WIDEN)"),
    ),
    *faults(
        EXPERTS,
        "experts",
        (
            "gate and up exchanged",
            "tl.sum(gate * x, 1), tl.sum(up * x, 1))",
            "tl.sum(up * x, 1), tl.sum(gate * x, 1))",
        ),
        ("slots not weighted", "part * tl.load(weights_ptr + pair)", "part"),
        ("first slot only", "pair = token * K + slot\n        expert", "pair = token * K\n        expert"),
        ("first expert's gate", "gate_up_ptr + expert.to(tl.int64) * s", "gate_up_ptr + 0 * s"),
        ("first expert's down", "down_ptr + expert.to(tl.int64) * s", "down_ptr + 0 * s"),
    ),
    *faults(
        ROUTE,
        "route",
        ("ties to the highest", "(0x7FFFFFFF - ids).to(tl.int64)", "ids.to(tl.int64)"),
        ("not renormalised", "weights / tl.maximum(total, 1e-20)", "weights / 1"),
        ("bias in the weights", "tl.where(ids == winner, scores, 0.0)", "tl.where(ids == winner, choice, 0.0)"),
        ("group by its best alone", "second if SIZE > 1 else 0.0", "0.0"),
    ),
    *faults(
        DECODE,
        "paged_attention",
        ("sees the next key", "length - (stop - 1 - token)", "length - (stop - 2 - token)"),
        (
            "first split only",
            "stop = first // SPLIT, tl.cdiv(end, SPLIT)",
            "stop = first // SPLIT, first // SPLIT + 1",
        ),
        (
            "splits not rescaled",
            "tl.exp2(tops - new_top)",
            "tl.exp2(tops - tops)",
        ),
    ),
    *faults(
        PROMPT,
        "paged_attention",
        ("no causal mask", "keys[None, :] <= position[:, None]", "keys[None, :] < length"),
        ("window one short", "> position[:, None] - window", "> position[:, None] - window + 1"),
    ),
    *faults(
        CUTS,
        "paged_attention",
        (
            "old cuts not rescaled",
            "fma(cut_total, add, total * keep)",
            "fma(cut_total, add, total)",
        ),
        (
            "blocks in a row",
            "tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)",
            "(keys // BLOCK_SIZE)",
        ),
    ),
    *faults(
        PAGED,
        "write_kv",
        ("slot of another block", "slot // BLOCK_SIZE, slot % BLOCK_SIZE", "slot // BLOCK_SIZE, slot % BLOCK_SIZE * 0"),
    ),
    *faults(
        SAMPLE,
        "sample",
        ("noise of one step", "_mix(_mix(low ^ high) ^ step.to(tl.uint32))", "_mix(_mix(low ^ high))"),
        (
            "greedy takes the last of equals",
            "chosen = tl.min(tl.where(tops",
            "chosen = tl.max(tl.where(tops",
        ),
        ("min_p ignored", "& (tl.exp(-below) >= least)", "& (tl.exp(-below) >= 0 * least)"),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.op}: {f.name}")
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault.module, fault.old, fault.new, fault.count, tmp_path, monkeypatch)
    op = OPS[fault.op]
    cases = sorted(op.cases, key=num_rows)
    if fault.needs_blocks:
        few_processors(monkeypatch)
        cases = cases[-1:]
    assert first_red(op, cases) is not None, f"no case of {op.name} notices: {fault.name}"


@pytest.mark.parametrize("name", ["rope", "rms_norm", "swiglu", "qk_norm_rope"])
def test_planting_itself_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS[name]
    module = next(f.module for f in FAULTS if f.op == name)
    plant(module, "import triton.language as tl", "import triton.language as tl", 1, tmp_path, monkeypatch)
    check(op, "triton", arguments(op, op.cases[2], torch.bfloat16))
