"""`step_attention` against the two operators that it joins, bit for bit; TRITON_INTERPRET=1 needs no GPU."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import step_attention as S
import torch

from whorl.ops import OPS

dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
for dtype, HQ, HK, D, lens, MB, BS in (
    (torch.bfloat16, 8, 2, 32, (5, 128, 129, 300), 40, 8),
    (torch.bfloat16, 32, 4, 128, (16, 640), 45, 16),
    (torch.float32, 4, 2, 64, (7, 100), 10, 16),
):
    T = len(lens)
    r = lambda *s: torch.randn(*s, device=dev).to(dtype)
    qkv, qw, kw = r(T, (HQ + 2 * HK) * D), 1 + 0.1 * r(D), 1 + 0.1 * r(D)
    kc, vc = r(T * MB + 2, BS, HK, D), r(T * MB + 2, BS, HK, D)
    tables = torch.randperm(T * MB + 2, device=dev)[: T * MB].int().view(T, MB)
    lengths = torch.tensor(lens, dtype=torch.int32, device=dev)
    last = (lengths - 1).long()
    slots = tables[torch.arange(T, device=dev), last // BS].long() * BS + last % BS
    cs = torch.randn(T, D, device=dev)
    k1, v1, k2, v2 = kc.clone(), vc.clone(), kc.clone(), vc.clone()
    q = torch.empty(T, HQ, D, dtype=dtype, device=dev)
    OPS["qk_norm_rope_write"](
        qkv, qw, kw, cs, q, k1, v1, slots, num_heads=HQ, num_kv_heads=HK, eps=1e-6, style="half", backend="triton"
    )
    want = OPS["paged_attention"](
        q, k1, v1, tables, torch.arange(T + 1, device=dev).int(), lengths, scale=D**-0.5, backend="triton"
    )
    done = torch.zeros(T * HK, dtype=torch.int32, device=dev)
    for _ in range(2):
        got = S.attend(
            qkv, qw, kw, cs, k2, v2, tables, slots, lengths, done, heads=HQ, eps=1e-6, scale=D**-0.5, folds=64
        )
    print(
        dtype,
        lens,
        "differ",
        int((got != want).sum()),
        "of",
        want.numel(),
        "cache",
        int((k1 != k2).sum()),
        int((v1 != v2).sum()),
        "counts",
        int(done.abs().sum()),
        flush=True,
    )
