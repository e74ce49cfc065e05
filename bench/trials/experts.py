"""Experts' two products on a GPU by several tiles, for numbers of tokens from a decode step to a long prompt.

    python bench/trials/experts.py            # time; the tiles in use for that many rows come first and are marked
    python bench/trials/experts.py 1024 8192  # these numbers of tokens alone
    python bench/trials/experts.py --few 512  # without a sweep of tiles: those in use and the kernel for Hopper
    python bench/trials/experts.py compile    # fill Triton's cache with one process for each product, before that

Prints us of one product of Qwen3-30B-A3B's experts, fastest first. All tiles give the same bits, which is asserted.
"""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from whorl.ops import OPS
from whorl.ops.moe import experts_many_rows_hopper_triton as hopper
from whorl.ops.moe import experts_many_tokens_triton as tiles
from whorl.timing import measure

TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
EXPERTS, CHOICES = 128, 8
SHARED = 225_000  # bytes of shared memory that a program may use
SHOWN = 6
BLOCKS = {"gate_up": "BLOCK_C", "down": "BLOCK_F"}
Plan = dict[str, int]


class Product:
    """One product of a number of tokens, with its inputs and what the tiles in use give."""

    def __init__(self, name: str, num_tokens: int) -> None:
        case = {"tokens": (num_tokens,), "hidden": 2048, "width": 768, "experts": EXPERTS, "k": CHOICES}
        values = OPS["experts"].make(**case, dtype=torch.bfloat16, device="cuda")
        self.name, self.rows = name, num_tokens * CHOICES / EXPERTS
        self.x, self.gate_up, self.down = (values[name] for name in ("x", "gate_up", "down"))
        self.order, self.counts = tiles.sort_pairs(values["ids"], EXPERTS)
        pairs = num_tokens * CHOICES
        self.hidden = torch.randn(pairs, 768, dtype=self.x.dtype, device="cuda")
        self.y = torch.empty(pairs, 768 if name == "gate_up" else 2048, dtype=self.x.dtype, device="cuda")
        self.in_use = tiles.tile_plan(self.rows, 2)[list(BLOCKS).index(name)]

    def run(self, plan: Plan | None) -> Tensor:
        """Write and return the product by tiles of this plan; None: by the kernel for Hopper."""
        rest = self.order, self.counts, self.y
        if self.name == "gate_up" and plan is None:
            hopper.run_gate_up(self.x, self.gate_up, *rest, CHOICES)
        elif self.name == "gate_up":
            tiles.run_gate_up(self.x, self.gate_up, *rest, CHOICES, plan)
        elif plan is None:
            hopper.run_down(self.hidden, self.down, *rest)
        else:
            tiles.run_down(self.hidden, self.down, *rest, plan)
        return self.y

    def variants(self, *, is_swept: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Yield the tiles in use, the kernel for Hopper and, if the tiles are swept, other tiles."""
        yield f"{self.in_use} in use", lambda: self.run(self.in_use)
        yield "Hopper", lambda: self.run(None)
        for plan in plans(self.name, self.rows) if is_swept else ():
            yield str(plan), lambda plan=plan: self.run(plan)


def plans(product: str, rows_of_expert: float) -> Iterator[Plan]:
    """Yield tiles to try for an average number of rows of an expert."""
    sizes = itertools.product((16, 32, 64, 128), (32, 64, 128, 256), (64, 128), (4, 8), (2, 3, 4, 5))
    for rows, columns, block, num_warps, num_stages in sizes:
        width = columns * (2 if product == "gate_up" else 1)  # of the weights' tile
        fits = 60_000 <= (rows + width) * block * 2 * num_stages <= SHARED and width <= 256
        is_small, is_large = rows <= 32, rows == 128
        suits = num_warps == 4 and width <= 128 if is_small else block == 64 and width >= 128
        if fits and suits and not (is_large and num_warps == 4) and rows / 8 <= rows_of_expert <= 8 * rows:
            yield tiles.plan(rows, columns, block, num_warps, num_stages, BLOCKS[product])


def try_tiles(name: str, num_tokens: int, *, is_timed: bool, is_swept: bool) -> None:
    """Run a product with each of its variants, and print the fastest."""
    product, lines = Product(name, num_tokens), []
    expected = product.run(product.in_use).clone()
    for what, run in product.variants(is_swept=is_swept):
        try:
            y = run()
        except Exception as error:  # a plan that does not fit the chip
            print(f"{num_tokens} {name}: {what} {type(error).__name__}", flush=True)
            continue
        assert torch.equal(y, expected), what
        if is_timed:
            us = measure([run], "cuda").us
            lines.append((us, f"{num_tokens} {name}: {us:7.1f} us {what}"))
    print(*(line for _, line in [*lines[:1], *sorted(lines[1:])[:SHOWN]]), sep="\n", flush=True)


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["product"]:
        for num_tokens in (64, 256, 1024, 2048):
            try_tiles(arguments[1], num_tokens, is_timed=False, is_swept=True)
    elif arguments[:1] == ["compile"]:
        processes = [subprocess.Popen([sys.executable, __file__, "product", product]) for product in BLOCKS]
        assert not any(process.wait() for process in processes)
    else:
        is_few = arguments[:1] == ["--few"]
        for num_tokens in map(int, arguments[is_few:] or TOKENS):
            for product in BLOCKS:
                try_tiles(product, num_tokens, is_timed=True, is_swept=not is_few)


if __name__ == "__main__":
    main()
