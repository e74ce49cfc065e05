"""The tests of the kernels, tested: each fault planted in a kernel's source turns the shared check red.

A fault is one substitution. Where a kernel has changed so that its text is not found, plant the fault anew.
"""

from pathlib import Path

import pytest
import torch
from planted import Fault, first_red, one_of_each_quick, plant
from test_ops import arguments, check, few_processors, num_rows

from whorl.ops import OPS

ROPE, NORM = "whorl.ops.rope.triton", "whorl.ops.rms_norm_triton"
GLU, QK = "whorl.ops.glu_triton", "whorl.ops.attention.qk_norm_rope_triton"
QK_BACKWARD = "whorl.ops.attention.qk_norm_rope_backward_triton"
LINEAR, EXPERTS = "whorl.ops.linear_triton", "whorl.ops.moe.experts_triton"
TILES = "whorl.ops.moe.experts_many_tokens_triton"
ROUTE = "whorl.ops.moe.route_triton"
PAGED, SAMPLE = "whorl.ops.attention.paged_triton", "whorl.ops.sample_triton"
K_AT = "k_to = k_cache_ptr + block * k_stride_block + offset * k_stride_offset"
DECODE, PROMPT = "whorl.ops.attention.decode_triton", "whorl.ops.attention.prompt_triton"
CUTS, FOLD = "whorl.ops.attention.cuts_triton", "whorl.ops.attention.fold_triton"
LOG_SOFTMAX = "whorl.ops.log_softmax_triton"
DELTA = "whorl.ops.gated_delta"
CHUNKS, ROWS, BACK = f"{DELTA}.rule_triton", f"{DELTA}.rows_triton", f"{DELTA}.rule_backward_triton"
STEP = f"{DELTA}.step_triton"
CONV, GATES, HEADS = f"{DELTA}.conv_triton", f"{DELTA}.gates_triton", f"{DELTA}.heads_triton"
TABLE = "tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)"


FAULTS = [
    Fault("wrong sign", ROPE, "rope", "cos, -(second * sin)", "cos, second * sin"),
    Fault("wrong sign, other half", ROPE, "rope", "cos, first * sin)", "cos, -first * sin)"),
    Fault("sin offset of the padded width", ROPE, "rope", "at + HALF, mask", "at + channels.shape[0], mask"),
    Fault("rows of the padded width", ROPE, "rope", "row * (2 * HALF)", "row * (2 * channels.shape[0])"),
    Fault("table looked up by token", ROPE, "rope", "if HAS_POSITIONS:", "if HAS_POSITIONS and INVERSE:"),
    Fault("inverse ignored", ROPE, "rope", "sin = -sin", "sin = 1.0 * sin"),
    Fault("pairs written in reverse", ROPE, "rope", "tl.join(first, second)", "tl.join(second, first)"),
    Fault("last channel not written", ROPE, "rope", "REST_START + REST)", "REST_START + REST - 1)"),
    Fault("sequence and batch mixed", ROPE, "rope", "(tokens % S)[:, None]", "(tokens // S)[:, None]"),
    Fault("k of the first head only", ROPE, "rope", "heads * k_stride_h", "0 * heads * k_stride_h"),
    Fault("in place, wrong sign", ROPE, "rope_", "cos, -(second * sin)", "cos, second * sin"),
    Fault("written in the order of reading", ROPE, "rope", "BLOCK_C, WRITE_PAIRS)", "BLOCK_C, READ_PAIRS)"),
    Fault("mean over one too many", NORM, "rms_norm", "total / C + eps", "total / (C + 1) + eps"),
    Fault("ten times eps", NORM, "rms_norm", "total / C + eps", "total / C + 10 * eps"),
    Fault("plus one ignored", NORM, "rms_norm", "weight += 1.0", "weight += 0.0", 2),
    Fault("last element dropped", NORM, "rms_norm", "row_sum(x * x, ROWS", "row_sum(x * x * (columns < C - 1), ROWS"),
    Fault("residual subtracted", NORM, "add_rms_norm", "x += tl.load(residual_ptr", "x -= tl.load(residual_ptr"),
    Fault("new residual not written", NORM, "add_rms_norm", "total, mask=mask,", "total, mask=mask & (columns > 0),"),
    Fault("projection forgotten", NORM, "rms_norm_backward", "scaled - unit * (", "scaled - 0 * unit * ("),
    Fault("first row block lost", NORM, "rms_norm_backward", "+= dy * unit", "+= dy * unit * (block > 0)"),
    Fault("only the last row block", NORM, "rms_norm_backward", "dweight += dy * unit", "dweight = dy * unit", 1, True),
    Fault("first program's share only", NORM, "rms_norm_backward", "(parts < PARTS) &", "(parts < 1) &"),
    Fault("residual's gradient lost", NORM, "rms_norm_backward", "dx += tl.load(", "dx += 0 * tl.load("),
    Fault("gate and up exchanged", GLU, "glu", "gate * _share(gate, GELU", "gate * _share(up, GELU"),
    Fault("up one channel early", GLU, "glu", "tl.load(x_ptr + F + columns", "tl.load(x_ptr + F - 1 + columns"),
    Fault("last channel not written", GLU, "glu", "mask=columns < F)", "mask=columns < F - 1)"),
    Fault("second block lost", GLU, "glu", "2 * start + tl.arange", "start + tl.arange"),
    Fault("sigmoid's gelu", GLU, "glu", "gate + CUBE", "gate + 0 * CUBE"),
    Fault("wrong derivative", GLU, "glu_backward", "rise = gate * (1 - share)", "rise = -gate * (1 - share)"),
    Fault("gradients exchanged", GLU, "glu_backward", "tl.join(dgate, dup)", "tl.join(dup, dgate)"),
    Fault("derivative of the cube", GLU, "glu_backward", "1 + 3 * CUBE", "1 + CUBE"),
    Fault("L without beta", CHUNKS, "gated_delta", "lower = beta[:, None] * (decay", "lower = (decay"),
    Fault(
        "no inverse",
        CHUNKS,
        "gated_delta",
        "tl.where(is_inside, inverse[:, :, None, :]",
        "tl.where(is_inside, by_block",
    ),
    Fault("last block left out of the state", CHUNKS, "gated_delta", "_added(total, d3, k3", "_added(total, d2, k3"),
    Fault("state not decayed", CHUNKS, "gated_delta", "tl.exp(last) * state + total", "state + total"),
    Fault("last key of a block", ROWS, "gated_delta_lanes", "where((rows < base)", "where((rows < base - 1)"),
    Fault(
        "decay from the chunk's start",
        ROWS,
        "gated_delta_lanes",
        "tl.load(decays_ptr + row - 1, mask=row > 0",
        "tl.load(decays_ptr, mask=row > 0",
    ),
    Fault(
        "one row of t", ROWS, "gated_delta_lanes", "tl.store(inverse_at, inverse", "tl.store(inverse_at, 0 * inverse"
    ),
    Fault("inputs kept a row late", CONV, "gated_delta_step", "((row + index) % RING)", "((row + index + 1) % RING)"),
    Fault(
        "values of the first head",
        STEP,
        "gated_delta_step",
        "inputs_ptr, first, count, row, lane, KEYS * D + head * DV",
        "inputs_ptr, first, count, row, lane, KEYS * D",
    ),
    Fault(
        "padding not written", ROWS, "gated_delta_step", "starts_ptr + B) + sequence", "starts_ptr + B) + sequence + 1"
    ),
    Fault("later blocks forgotten", BACK, "gated_delta_backward", "        d -= later", "        d -= 0 * later"),
    Fault(
        "no gradient of the decay",
        BACK,
        "gated_delta_backward",
        "tl.sum(moved, 1) - tl.sum(moved, 0)",
        "tl.sum(moved, 1)",
    ),
    Fault("one tap early", CONV, "causal_conv", "tokens - (W - 1 - j), first, row", "tokens - (W - 2 - j), first, row"),
    Fault(
        "tail one token early",
        CONV,
        "causal_conv_lanes",
        "first + point - start - (W - 1) + index",
        "first + point - start - W + index",
    ),
    Fault(
        "a sequence reads the one before",
        CONV,
        "causal_conv_backward",
        "is_real & (token >= first)",
        "is_real & (token >= 0)",
    ),
    Fault("no bias", GATES, "delta_gates", "_softplus(a + bias)", "_softplus(a)"),
    Fault(
        "derivative of the rate", GATES, "delta_gates_backward", "dg * rate * _softplus(x), 0", "dg * _softplus(x), 0"
    ),
    Fault("mean in place of sum", HEADS, "l2_norm", "    if IS_MEAN:\n        total", "    if C > 0:\n        total"),
    Fault("gate before the norm", HEADS, "gated_rms_norm", "(gate * share if IS_SILU", "(share if IS_SILU"),
    Fault("slope of the gate", HEADS, "output_gate_backward", "slope = share * (1.0 - share)", "slope = share"),
    Fault("columns not rescaled", LOG_SOFTMAX, "log_softmax", "totals * tl.exp(tops - top)", "totals"),
    Fault("old sum not rescaled", LOG_SOFTMAX, "token_logprobs", "totals * part + 1.0", "totals + 1.0"),
    Fault("absent token counted", LOG_SOFTMAX, "log_softmax_backward", ", 0.0, dy), y", ", dy, dy), y"),
    Fault("next token", LOG_SOFTMAX, "token_logprobs_backward", "columns == token,", "columns == token + 1,"),
    Fault("wrong sign", QK, "qk_norm_rope", "rotated(first, second, cos, sin)", "rotated(first, second, cos, -sin)"),
    Fault("mean over one too many", QK, "qk_norm_rope", "total / D + eps", "total / (D + 1) + eps"),
    Fault("norm of the turned channels", QK, "qk_norm_rope", "total += _head_sum(", "total += 0 * _head_sum("),
    Fault("k with q's weight", QK, "qk_norm_rope", "qkv_ptr, k_ptr, k_weight_ptr", "qkv_ptr, k_ptr, q_weight_ptr"),
    Fault("k read as v", QK, "qk_norm_rope", "(HQ + HK + heads) * D, y_token", "(HQ + heads) * D, y_token"),
    Fault("slot without a block", QK, "qk_norm_rope_write", "slots // CACHE_BLOCK * block", "slots * 0 * block"),
    Fault("rotation not turned back", QK_BACKWARD, "qk_norm_rope_backward", "dy_first * cos +", "dy_first * cos -"),
    Fault("projection forgotten", QK_BACKWARD, "qk_norm_rope_backward", "mean = (dot / D)", "mean = (0 * dot / D)"),
    Fault("only the last block", QK_BACKWARD, "qk_norm_rope_backward", "+= more_first", "= more_first", 1, True),
    Fault(
        "gradient of the weight scaled", QK_BACKWARD, "qk_norm_rope_backward", "= d_first * first", "= w_first * first"
    ),
    Fault("last column not written", LINEAR, "linear", "(columns < N)[:, None])", "(columns < N - 1)[:, None])"),
    Fault(
        "every row reads the first",
        LINEAR,
        "linear",
        "rows.to(tl.int64)[None, :] * x_stride",
        "(0 * rows).to(tl.int64)[None, :]",
    ),
    Fault("bias forgotten", LINEAR, "linear", "if HAS_BIAS:", "if not HAS_BIAS:", 2),
    Fault("sum of the last block", LINEAR, "linear", "dot(x, weight, total, WIDEN", "dot(x, weight, total * 0, WIDEN"),
    Fault("gate and up exchanged", TILES, "experts", "    gate, up = gate.to(dtype)", "    up, gate = gate.to(dtype)"),
    Fault("choices not weighted", EXPERTS, "experts", "tl.full(part.shape, weight,", "tl.full(part.shape, 1.0,"),
    Fault("first choice only", EXPERTS, "experts", "pair = token * K + choice", "pair = token * K"),
    Fault("first expert's gate", TILES, "experts", "gate_up_ptr + expert.to(tl.int64) * s", "gate_up_ptr + 0 * s"),
    Fault("first expert's down", TILES, "experts", "down_ptr + expert.to(tl.int64) * s", "down_ptr + 0 * s"),
    Fault(
        "ties to the highest",
        ROUTE,
        "route",
        "tl.min(tl.min(tl.where(keys == best, ids, 0x7FFFFFFF",
        "tl.max(tl.max(tl.where(keys == best, ids, -1",
    ),
    Fault("not renormalised", ROUTE, "route", "weights / tl.maximum(total, 1e-20)", "weights / 1"),
    Fault("bias in the weights", ROUTE, "route", "tl.where(ids == winner, scores,", "tl.where(ids == winner, ranking,"),
    Fault("group by its best alone", ROUTE, "route", "second if SIZE > 1 else 0.0", "0.0"),
    Fault("sees the next key", DECODE, "paged_attention", "length - (stop - 1 - token)", "length - (stop - 2 - token)"),
    Fault("first cut only", DECODE, "paged_attention", "tl.cdiv(end, CUT), tl.num", "first // CUT + 1, tl.num"),
    Fault("cuts in one place", DECODE, "paged_attention", "at = row * cuts + i", "at = row * cuts + 0 * i"),
    Fault("no causal mask", PROMPT, "paged_attention", "keys[None, :] <= position[:, None]", "keys[None, :] < length"),
    Fault("window one short", PROMPT, "paged_attention", "[:, None] - window", "[:, None] - window + 1"),
    Fault("old cuts not rescaled", CUTS, "paged_attention", "(cut_total, add, total * keep", "(cut_total, add, total"),
    Fault("old stored cuts not rescaled", FOLD, "paged_attention", "cut_add, total * cut_keep", "cut_add, total"),
    Fault("blocks in a row", CUTS, "paged_attention", TABLE, "(keys // BLOCK_SIZE)"),
    Fault("lse in powers of two", PROMPT, "causal_attention", "(top + tl.log2(mass)) * LN_2", "(top + tl.log2(mass))"),
    Fault("keys of the first sequence", PROMPT, "causal_attention", "k_cache_ptr + start", "k_cache_ptr + 0 * start"),
    Fault("slot of another block", PAGED, "write_kv", K_AT, K_AT.replace("offset * k", "0 * k")),
    Fault("noise of one step", SAMPLE, "sample", "_mix(_mix(low ^ high) ^ step.to(tl.uint32)", "_mix(_mix(low ^ high)"),
    Fault("greedy takes the last of equals", SAMPLE, "sample", "= tl.min(tl.where(tops =", "= tl.max(tl.where(tops ="),
    Fault("min_p ignored", SAMPLE, "sample", "& (tl.exp(-below) >= least)", "& (tl.exp(-below) >= 0 * least)"),
]


@pytest.mark.parametrize("fault", one_of_each_quick(FAULTS))
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault.module, fault.old, fault.new, fault.count, tmp_path, monkeypatch)
    op = OPS[fault.op]
    cases = sorted(op.cases, key=num_rows)
    if fault.needs_blocks:
        few_processors(monkeypatch)
        cases = cases[-1:]
    assert first_red(op, cases) is not None, f"no case of {op.name} notices: {fault.name}"


@pytest.mark.parametrize("name", ["rope", "rms_norm", "glu", "qk_norm_rope"])
def test_planting_itself_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS[name]
    module = next(f.module for f in FAULTS if f.op == name)
    plant(module, "import triton.language as tl", "import triton.language as tl", 1, tmp_path, monkeypatch)
    check(op, "triton", arguments(op, op.cases[2], torch.bfloat16))
