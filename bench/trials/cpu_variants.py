"""The CPU kernels of each instruction set that a machine has: whether their bits are equal, and how fast they are.

The library is built elsewhere and carried along, since that machine may have no compiler:

    python whorl/ops/cpu/build.py && python -m bench.trials.cpu_variants
"""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from whorl.device import arithmetic_of
from whorl.ops.cpu import library
from whorl.ops.cpu.linear import multiply
from whorl.ops.cpu.packed import KINDS, PackedMatrix, columns_per_block, interleave

VARIANTS = ("avx512", "avx2", "neon", "plain")
ROWS, COLUMNS = 4096, 2048
BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
HALF = {kind: (208,) if kind == "Q6_K" else (0, 2) for kind in KINDS}  # bytes that are made small fp16 numbers


def matrix_of(kind: str, bits: int) -> PackedMatrix:
    """Return random blocks with finite scales."""
    generator = torch.Generator().manual_seed(0)
    shape = ROWS, COLUMNS // columns_per_block(kind), BYTES[kind]
    stored = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for first in HALF[kind]:
        stored[..., first : first + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    return PackedMatrix([interleave(kind, stored.flatten(1), COLUMNS)], COLUMNS, bits)  # type: ignore[arg-type]


def best(function: Callable[[], object], repeats: int = 7) -> float:
    """Return the least seconds of a call."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].split("\n")[0].split()
    print((arithmetic_of("cpu") or {}).get("device"), [flag for flag in flags if "avx512" in flag or "amx" in flag])
    here = [name for name in VARIANTS if library.library().whorl_cpu_choose(name.encode())]
    weight, x = torch.randn(ROWS, COLUMNS), torch.randn(128, COLUMNS)
    products = {f"{kind}, {bits} bits": matrix_of(kind, bits).linear for kind in KINDS for bits in (8, 16)}
    products["fp32"] = lambda part: multiply(part, weight)
    for name, product in products.items():
        outputs, rates = {}, {}
        for variant in here:
            library.library().whorl_cpu_choose(variant.encode())
            outputs[variant] = product(x[:9])
            alone = torch.cat([product(row) for row in x[:3].split(1)])
            assert torch.equal(alone, outputs[variant][:3]), (name, variant)
            if variant != "plain":
                seconds = {count: best(partial(product, x[:count])) for count in (1, 8, 128)}
                rates[variant] = {count: round(count * ROWS * COLUMNS / s / 1e9, 1) for count, s in seconds.items()}
        is_equal = all(torch.equal(out, outputs[here[0]]) for out in outputs.values())
        print(json.dumps({"product": name, "equal": is_equal, "GMAC/s by rows": rates}))
        assert is_equal, name


if __name__ == "__main__":
    main()
