"""Attention of prompts and of training on a GPU, next to torch's scaled_dot_product_attention, in TFLOP/s.

    python bench/trials/prompt_attention.py

Qwen3's heads (32 queries, 4 keys, 128 channels) in bf16, blocks of 16. Every row takes its turn in five rounds of three
times some calls between two events; printed are the best and the median. The bits are compared with the plain kernel's.
"""

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from whorl.ops import OPS
from whorl.ops.attention import prompt_triton

SHAPE = {"heads": 32, "kv_heads": 4, "dim": 128}
ROUNDS, TIMES = 5, 3
Call = Callable[[], Tensor]
Row = tuple[str, float, Call]  # label, operations, and what is timed


def paged(queries: tuple[int, ...], contexts: tuple[int, ...]) -> Row:
    op = OPS["paged_attention"]
    values = op.make(queries=queries, contexts=contexts, block=16, **SHAPE, dtype=torch.bfloat16, device="cuda")
    work = sum(4 * 32 * 128 * (q * c - q * (q - 1) / 2) for q, c in zip(queries, contexts, strict=True))
    return f"prompts {queries} of {contexts}", work, lambda: op(**values, backend="triton")


def packed(lengths: tuple[int, ...]) -> Row:
    op = OPS["causal_attention"]
    values = op.make(lengths=lengths, **SHAPE, dtype=torch.bfloat16, device="cuda")
    work = sum(2 * 32 * 128 * n * n for n in lengths)
    return f"training {lengths}", work, lambda: op(**values, backend="triton")[0]


def peer(tokens: int) -> Row:
    q, k, v = (torch.randn(1, heads, tokens, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 4, 4))
    call = lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
    return f"scaled_dot_product_attention ({tokens},)", 2 * 32 * 128 * tokens**2, call


def plain(call: Call) -> Tensor:
    """What the plain kernel gives."""
    reason = prompt_triton.hopper_reason
    prompt_triton.hopper_reason = lambda *_: "to compare"
    try:
        return call()
    finally:
        prompt_triton.hopper_reason = reason


def milliseconds(call: Call, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def main() -> None:
    ours = [paged((n,), (n,)) for n in (512, 8192, 32768)]
    ours += [paged((512,) * 8, (4096,) * 8), paged((512,) * 16, (512,) * 16), packed((8192,)), packed((2048,) * 4)]
    for label, _, call in ours:
        assert torch.equal(call(), plain(call)), label
    rows = ours + [peer(n) for n in (8192, 32768)]
    times: dict[str, list[float]] = {label: [] for label, *_ in rows}
    for _ in range(ROUNDS):
        for label, work, call in rows:
            call()
            times[label] += [milliseconds(call, 2 if work > 1e13 else 10) for _ in range(TIMES)]
    for label, work, _ in rows:
        best, middle = (work / ms / 1e9 for ms in (min(times[label]), median(times[label])))
        print(f"{best:6.1f} ({middle:.1f})  {label}")


if __name__ == "__main__":
    main()
