"""Kernels on trial: their bits against those in use, then a decode step of a model of 16 layers with each variant.

They compile for Hopper without spills and have not run on a GPU. What is faster goes into whorl/ops, the rest goes.
PYTHONPATH=$PWD python bench/trials/decode_step.py; EARLY_ALL=1 lets every kernel's successor start before it waits.
"""

import importlib
import itertools
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import few_rows as few
import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

import whorl.ops.attention.decode_triton
import whorl.ops.attention.qk_norm_rope_triton
import whorl.ops.moe.route_triton
import whorl.ops.rms_norm_triton
import whorl.ops.sample_triton  # noqa: F401 (all that may follow)

L = importlib.import_module("whorl.ops.linear_triton")
X = importlib.import_module("whorl.ops.moe.experts_triton")
O = importlib.import_module("whorl.ops._overlap_triton")
KNOBS = dict(AHEAD=True, EARLY=True, linear=None, gate_up=None, down=None)
ours, by_token = L._ours, X._by_token
PLANS = {5120: (256, 4), 2048: (512, 4), 128: (256, 4)}  # N: BLOCK_K, warps


@triton.jit
def follow_early(OVERLAP: tl.constexpr):
    if OVERLAP:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


if os.environ.get("EARLY_ALL") == "1":  # every kernel lets the next one start before it waits itself
    for name, module in list(sys.modules.items()):
        if name.startswith("whorl.ops") and hasattr(module, "follow"):
            module.follow = follow_early


def pdl():
    return {"OVERLAP": True, "launch_pdl": True}


def linear(x, weight, bias=None):
    (T, K), N = x.shape, weight.shape[0]
    if not KNOBS["linear"] or T > 8 or N > 8192 or bias is not None or N not in PLANS:
        return ours(x, weight, bias)
    BK, W = PLANS[N]
    y = torch.empty(T, N, dtype=x.dtype, device=x.device)
    few.linear_kernel[(triton.cdiv(N, 16),)](
        x,
        weight,
        y,
        y,
        x.stride(0),
        weight.stride(0),
        T,
        N,
        K=K,
        HAS_BIAS=False,
        ROWS=8,
        COLUMNS=16,
        BLOCK_K=BK,
        STAGES=min(K // BK, 98304 * 2 // (16 * BK * 2)),
        AHEAD=KNOBS["AHEAD"],
        EARLY=KNOBS["EARLY"],
        WARPS=W,
        num_warps=W,
        **pdl(),
    )
    return y


def experts(x, gate_up, down, weights, ids, y):
    pairs, (_, C, F) = ids.numel(), down.shape
    hidden = torch.empty(pairs, F, dtype=x.dtype, device=x.device)
    how = {"enable_fp_fusion": False, **pdl()}
    if KNOBS["gate_up"]:
        BC, ST, W = KNOBS["gate_up"]
        few.gate_up_kernel[(pairs, triton.cdiv(F, 16))](
            x,
            gate_up,
            ids,
            hidden,
            x.stride(0),
            *gate_up.stride()[:2],
            ids.shape[1],
            F,
            C=C,
            BLOCK_C=BC,
            STAGES=ST,
            TRIGGER=True,
            WARPS=W,
            num_warps=W,
            **how,
        )
    else:
        inner, _ = X.few_plan(C)
        X._gate_up_few_kernel[(pairs, X.ceil_div(F, inner["COLUMNS"]))](
            x, gate_up, ids, hidden, x.stride(0), *gate_up.stride()[:2], ids.shape[1], C, F, **inner, WIDEN=False, **how
        )
    if KNOBS["down"]:
        BF, ST = KNOBS["down"]
        few.down_kernel[(len(x), triton.cdiv(C, 16))](
            hidden,
            down,
            ids,
            weights,
            y,
            *down.stride()[:2],
            C,
            F=F,
            SLOTS=ids.shape[1],
            BLOCK_F=BF,
            STAGES=ST,
            AHEAD=KNOBS["AHEAD"] and bool(KNOBS["gate_up"]),
            EARLY=KNOBS["EARLY"],
            num_warps=8,
            **how,
        )
    else:
        _, outer = X.few_plan(C)
        parts = torch.empty(pairs, C, dtype=x.dtype, device=x.device)
        X._down_few_kernel[(pairs, X.ceil_div(C, outer["COLUMNS"]))](
            hidden, down, ids, parts, *down.stride()[:2], C, F, **outer, WIDEN=False, **how
        )
        X._combine(parts, weights, y)


def norm_linear(norm, weight, x, residual):
    (T, K), N = x.shape, weight.shape[0]
    BK, W = PLANS[N]
    total, normed, y = torch.empty_like(x), torch.empty_like(x), torch.empty(T, N, dtype=x.dtype, device=x.device)
    few.norm_linear_kernel[(triton.cdiv(N, 16),)](
        x,
        residual,
        norm.weight,
        weight,
        total,
        normed,
        y,
        norm.eps,
        weight.stride(0),
        N,
        K=K,
        T=T,
        BLOCK_K=BK,
        AHEAD=KNOBS["AHEAD"],
        EARLY=KNOBS["EARLY"],
        WARPS=W,
        num_warps=W,
        enable_fp_fusion=False,
        **pdl(),
    )
    return y, normed, total


from whorl.models import llama

plain_layer = llama.Layer.forward


def layer(self, x, residual, mix):
    if not KNOBS.get("norm") or residual is None or len(x) not in (1, 2, 4, 8):
        return plain_layer(self, x, residual, mix)
    from whorl import ops

    qkv, _, residual = norm_linear(self.input_layernorm, self.self_attn.qkv_proj.weight, x, residual)
    x = self.self_attn.o_proj(mix(self.self_attn, qkv))
    logits, normed, residual = norm_linear(self.post_attention_layernorm, self.mlp.gate.weight, x, residual)
    weights, ids = ops.route(logits, self.mlp.k, renormalize=self.mlp.renormalize)
    return self.mlp.experts(normed, weights, ids), residual


import step_attention

plain_mix = llama.Attention.mix
DONE = {}


def mix(self, qkv, rotary, step, cache):
    if not KNOBS.get("attention") or len(qkv) > 8 or len(step.context_lens) != len(qkv) or self.window:
        return plain_mix(self, qkv, rotary, step, cache)
    done = DONE.setdefault(qkv.device, torch.zeros(8 * 8, dtype=torch.int32, device=qkv.device))
    return step_attention.attend(
        qkv,
        self.q_norm.weight,
        self.k_norm.weight,
        rotary,
        cache.k,
        cache.v,
        step.block_tables,
        step.slots,
        step.context_lens,
        done,
        heads=self.num_heads,
        eps=self.eps,
        scale=self.scale,
        folds=64,
        num_warps=KNOBS["attention"],
    ).flatten(1)


def bits():
    torch.manual_seed(0)
    r = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    for (N, K), T in itertools.product(((5120, 2048), (2048, 4096), (128, 2048)), (1, 2, 5, 8)):
        x, w = r(T, K), r(N, K) / K**0.5
        KNOBS["linear"] = True
        a = linear(x, w)
        b = ours(x, w)
        print("linear", N, K, T, "differ", int((a.view(torch.int16) != b.view(torch.int16)).sum()), flush=True)
    from whorl import ops

    class Norm:
        eps = 1e-6
        weight = (1 + 0.1 * torch.randn(2048, device="cuda")).bfloat16()

    for N, T in itertools.product((5120, 128), (1, 2, 4, 8)):
        x, res, w = r(T, 2048), 3 * r(T, 2048), r(N, 2048) / 2048**0.5
        normed, total = ops.add_rms_norm(x, res, Norm.weight, Norm.eps)
        want = (ours(normed, w), normed, total)
        got = norm_linear(Norm, w, x, res)
        print(
            "norm_linear",
            N,
            T,
            "differ",
            [int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in zip(got, want)],
            flush=True,
        )
    E, C, F = 128, 2048, 768
    gu, dn = r(E, 2 * F, C) / C**0.5, r(E, C, F) / F**0.5
    for T in (1, 3):
        x, wts = r(T, C), torch.rand(T, 8, device="cuda")
        ids = torch.stack([torch.randperm(E, device="cuda")[:8] for _ in range(T)]).int()
        want = torch.empty_like(x)
        by_token(x, gu, dn, wts, ids, want)
        for g, d in (
            ((256, 4, 1), None),
            ((256, 4, 2), None),
            (None, (128, 6)),
            (None, (256, 3)),
            ((256, 4, 2), (128, 6)),
        ):
            KNOBS.update(gate_up=g, down=d)
            got = torch.empty_like(x)
            experts(x, gu, dn, wts, ids, got)
            print(
                "experts", T, g, d, "differ", int((got.view(torch.int16) != want.view(torch.int16)).sum()), flush=True
            )


def measure(llm, label, ctx=16, steps=100):
    from whorl.engine.sequence import SamplingParams

    p = SamplingParams(max_tokens=steps + 40, temperature=0, ignore_eos=True)
    llm.add(list(range(100, 100 + ctx)), p)
    for _ in range(25):
        llm.step()
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(steps):
        llm.step()
    torch.cuda.synchronize()
    dt = (time.perf_counter() - t) / steps
    while llm.has_work:
        llm.step()
    print(f"{label}: {dt * 1e3:.3f} ms a step, {dt * 1e6 / LAYERS:.2f} us a layer (with head)", flush=True)


LAYERS = 16
if __name__ == "__main__":
    bits()
    from whorl.bench.random_config import PRESETS
    from whorl.engine.llm import LLM
    from whorl.engine.weights import random_model

    model = random_model(
        PRESETS["Qwen3-30B-A3B"] | {"num_hidden_layers": LAYERS}, device="cuda", dtype=torch.bfloat16, max_length=8192
    )
    L._ours, X._by_token = linear, experts
    llama.Layer.forward = layer
    llama.Attention.mix = mix
    early = os.environ.get("EARLY_ALL") == "1"

    def run(label, **knobs):
        KNOBS.update(
            dict(linear=None, gate_up=None, down=None, norm=None, attention=None, AHEAD=True, EARLY=True), **knobs
        )
        llm = LLM(
            model=model,
            device="cuda",
            max_num_seqs=1,
            num_blocks=2048,
            max_model_len=512,
            max_num_batched_tokens=8192,
            use_prefix_cache=False,
        )
        measure(llm, label)
        del llm

    run("as is")
    run("linear, after the wait", linear=True, AHEAD=False, EARLY=False)
    run("linear, ahead", linear=True, EARLY=False)
    run("linear, ahead and early", linear=True)
    run("down, after", down=(128, 6), AHEAD=False, EARLY=False)
    run("gate_up 256,4,1", gate_up=(256, 4, 1))
    run("gate_up 256,4,2", gate_up=(256, 4, 2))
    run("gate_up 128,8,2", gate_up=(128, 8, 2))
    run("all after", linear=True, gate_up=(256, 4, 2), down=(128, 6), AHEAD=False, EARLY=False)
    run("all ahead early", linear=True, gate_up=(256, 4, 2), down=(128, 6))
    run("norms inside, after", linear=True, down=(128, 6), norm=True, AHEAD=False, EARLY=False)
    run(
        "norms inside, gate_up, after",
        linear=True,
        gate_up=(256, 4, 2),
        down=(128, 6),
        norm=True,
        AHEAD=False,
        EARLY=False,
    )
    run("norms inside, gate_up, ahead", linear=True, gate_up=(256, 4, 2), down=(128, 6), norm=True)
    run("attention in one", attention=8)
    run(
        "everything, after",
        linear=True,
        gate_up=(256, 4, 2),
        down=(128, 6),
        norm=True,
        attention=8,
        AHEAD=False,
        EARLY=False,
    )
    run("everything, ahead", linear=True, gate_up=(256, 4, 2), down=(128, 6), norm=True, attention=8, EARLY=False)
    run("everything, ahead early", linear=True, gate_up=(256, 4, 2), down=(128, 6), norm=True, attention=8)
    run("everything but gate_up, ahead early", linear=True, down=(128, 6), norm=True, attention=8)
    for n, plans in {
        "qkv 1 warp": {5120: (256, 1)},
        "qkv 2": {5120: (256, 2)},
        "qkv 512": {5120: (512, 4)},
        "out 256": {2048: (256, 4)},
        "out 2 warps": {2048: (512, 2)},
        "router 1 warp": {128: (256, 1)},
        "router 512": {128: (512, 4)},
    }.items():
        old = dict(PLANS)
        PLANS.update(plans)
        run("all ahead early, " + n, linear=True, gate_up=(256, 4, 2), down=(128, 6))
        PLANS.clear()
        PLANS.update(old)
