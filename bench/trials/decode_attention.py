"""Attention of decoding tokens on a GPU with cold caches, by several plans: programs a key head, stages and warps.

    python bench/trials/decode_attention.py            # time; the plan in use comes first and is marked
    python bench/trials/decode_attention.py fp8 int8   # these formats alone
    python bench/trials/decode_attention.py compile    # fill Triton's cache with one process a shape, before that

Prints us and the share of the bandwidth of a copy for Qwen3-30B-A3B's heads, with keys and values in bf16 and in fp8.
Every plan gives the same bits, which is asserted.
"""

import itertools
import subprocess
import sys

import torch

from whorl.ops import OPS
from whorl.ops.attention import decode_triton
from whorl.timing import measure

# Sequences, keys of each, and the format of the cache: "" is bf16.
SHAPES = [(1, 512, ""), (1, 4096, ""), (1, 32768, ""), (8, 4096, ""), (16, 32768, ""), (64, 4096, "")]
SHAPES += [(1, 32768, "fp8"), (16, 32768, "fp8"), (64, 4096, "fp8"), (64, 4096, "int8")]
COPY = 4.2e12  # bytes per second of a copy on an H200
COLD = 2e8  # bytes to cycle through, several times the L2 cache


def plans(heads: int, cuts: int, *, is_coded: bool) -> list[tuple[dict[str, int], int]]:
    """Return (constants, programs a key head): the plan in use first."""
    counts = sorted({min(cuts, max(2, total // heads)) for total in (132, 198, 264, 396, 528)} | {cuts})
    counts = [count for count in counts if count * heads <= 1056] + [1] * (heads >= 64)
    tried = [({"STAGES": s, "num_warps": w}, n) for n, s, w in itertools.product(counts, (1, 2, 3), (4, 8))]
    return [decode_triton._plan(heads, cuts, is_coded=is_coded), *tried]


def num_bytes(sequences: int, keys: int, format: str) -> int:
    """Return the bytes of keys and values that a call reads, with their scales."""
    return sequences * keys * 4 * 2 * (128 + 4 if format else 128 * 2)


def calls(sequences: int, keys: int, format: str) -> list[dict[str, object]]:
    op = OPS["paged_attention"]
    bytes_of_one = num_bytes(sequences, keys, format)
    case = {"queries": (1,) * sequences, "contexts": (keys,) * sequences, "heads": 32, "kv_heads": 4, "dim": 128}
    count = max(1, int(COLD // bytes_of_one))
    return [
        op.make(**case, block=16, format=format, tokens=(sequences,), dtype=torch.bfloat16, device="cuda")
        for _ in range(min(count, 64))
    ]


def run(sequences: int, keys: int, format: str, *, is_timed: bool) -> None:
    op, values = OPS["paged_attention"], calls(sequences, keys, format)
    heads, name = 4 * sequences, f"{sequences} x {keys} {format}"
    expected, real = None, decode_triton._plan
    for i, plan in enumerate(plans(heads, -(-(keys + 16) // 128), is_coded=bool(format))):
        decode_triton._plan = lambda *_, plan=plan, **__: plan  # type: ignore[assignment]
        try:
            y = op(**values[0], backend="triton")
        except Exception as error:  # a plan that does not fit the chip
            print(f"{name}: {plan} {type(error).__name__}", flush=True)
            continue
        expected = y if expected is None else expected
        assert torch.equal(y, expected), plan
        if is_timed:
            us = measure([lambda v=v: op(**v, backend="triton") for v in values], "cuda").us
            share = num_bytes(sequences, keys, format) / us / 1e-6 / COPY
            print(f"{name}: {us:7.1f} us {share:6.1%} {plan}{' in use' * (not i)}", flush=True)
    decode_triton._plan = real


def main() -> None:
    if sys.argv[1:2] == ["shape"]:
        run(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], is_timed=False)
    elif sys.argv[1:2] == ["compile"]:
        processes = [
            subprocess.Popen([sys.executable, __file__, "shape", *map(str, shape)], stdout=subprocess.DEVNULL)
            for shape in SHAPES
        ]
        assert not any(process.wait() for process in processes)
    else:
        for shape in SHAPES:
            if shape[2] in (sys.argv[1:] or ("", "fp8", "int8")):
                run(*shape, is_timed=True)


if __name__ == "__main__":
    main()
