"""Experts' two products on a GPU by several tiles, for numbers of tokens from a decode step to a long prompt.

    python bench/trials/experts.py            # time; the tiles in use come first and are marked
    python bench/trials/experts.py 1024 8192  # these numbers of tokens alone
    python bench/trials/experts.py compile    # fill Triton's cache with one process for each product, before that

Prints us of the whole operator for Qwen3-30B-A3B's experts with the tiles of one product changed, fastest first. All
tiles give the same bits, which is asserted.
"""

import itertools
import subprocess
import sys
from typing import Any

import torch

from whorl.ops import OPS
from whorl.ops.moe import experts_triton
from whorl.timing import measure

TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
EXPERTS, CHOICES = 128, 8
SHARED = 225_000  # bytes of shared memory that a program may use
SHOWN = 6
BLOCKS = {"gate_up": "BLOCK_C", "down": "BLOCK_F"}
Plan = dict[str, int]


def plans(product: str, rows_of_expert: float) -> list[Plan]:
    """Return tiles to try for an average number of rows of an expert: the one in use first."""
    index, name = list(BLOCKS).index(product), BLOCKS[product]
    tried = []
    sizes = itertools.product((16, 32, 64, 128), (32, 64, 128, 256), (64, 128), (4, 8), (2, 3, 4, 5))
    for rows, columns, block, num_warps, num_stages in sizes:
        width = columns * (2 if product == "gate_up" else 1)  # of the weights' tile
        fits = 60_000 <= (rows + width) * block * 2 * num_stages <= SHARED and width <= 256
        is_small, is_large = rows <= 32, rows == 128
        suits = num_warps == 4 and width <= 128 if is_small else block == 64 and width >= 128
        if fits and suits and not (is_large and num_warps == 4) and rows / 8 <= rows_of_expert <= 8 * rows:
            tried.append(experts_triton._plan(rows, columns, block, num_warps, num_stages, name))
    return [experts_triton.tile_plan(rows_of_expert, 2)[index], *tried]


def arguments(num_tokens: int) -> dict[str, Any]:
    case = {"tokens": (num_tokens,), "hidden": 2048, "width": 768, "experts": EXPERTS, "k": CHOICES}
    return OPS["experts"].make(**case, dtype=torch.bfloat16, device="cuda")


def run(product: str, num_tokens: int, *, is_timed: bool) -> None:
    """Run the operator with each plan of one product, and print the fastest."""
    op, values, rows = OPS["experts"], arguments(num_tokens), num_tokens * CHOICES / EXPERTS
    in_use, real, lines = experts_triton.tile_plan(rows, 2), experts_triton.tile_plan, []
    expected = op(**values, backend="triton")
    for i, plan in enumerate(plans(product, rows)):
        both = (plan, in_use[1]) if product == "gate_up" else (in_use[0], plan)
        experts_triton.tile_plan = lambda *_, both=both: both  # type: ignore[assignment]
        try:
            y = op(**values, backend="triton")
        except Exception as error:  # a plan that does not fit the chip
            print(f"{num_tokens} {product}: {plan} {type(error).__name__}", flush=True)
            continue
        assert torch.equal(y, expected), plan
        if is_timed:
            us = measure([lambda: op(**values, backend="triton")], "cuda").us
            lines.append((us, f"{num_tokens} {product}: {us:7.1f} us {plan}{' in use' * (not i)}"))
    experts_triton.tile_plan = real
    in_use_line = lines[:1]
    print(*(line for _, line in [*in_use_line, *sorted(lines[1:])[:SHOWN]]), sep="\n", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["product"]:
        for num_tokens in (64, 256, 1024, 2048):
            run(sys.argv[2], num_tokens, is_timed=False)
    elif sys.argv[1:2] == ["compile"]:
        processes = [subprocess.Popen([sys.executable, __file__, "product", product]) for product in BLOCKS]
        assert not any(process.wait() for process in processes)
    else:
        for num_tokens in map(int, sys.argv[1:] or TOKENS):
            for product in BLOCKS:
                run(product, num_tokens, is_timed=True)


if __name__ == "__main__":
    main()
