"""Add sequence parallelism to a tensor-parallel model by compiling it; the model stays as it is, its bits are equal.

    python examples/sequence_parallel.py --ranks 2

Two processes on this machine communicate over gloo. On a cluster torchrun starts them, and only `run` is needed.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from whorl import passes

WIDTH, INNER, TOKENS = 64, 256, 48


class Block(nn.Module):
    """A tensor-parallel MLP: each rank has a shard of the inner channels, and the outputs are all-reduced."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        # The seed is the same, so all ranks draw the same weights and keep their shard.
        up, down = torch.randn(INNER, WIDTH) / WIDTH**0.5, torch.randn(WIDTH, INNER) / INNER**0.5
        self.up = nn.Parameter(up.chunk(size, 0)[rank].contiguous(), requires_grad=False)
        self.down = nn.Parameter(down.chunk(size, 1)[rank].contiguous(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        part = torch.nn.functional.silu(self.norm(x) @ self.up.T) @ self.down.T
        dist.all_reduce(part)  # the pass also finds functional collectives and DTensor's reductions
        return x + part


def run(rank: int, size: int, store: str) -> None:
    """Compare the plain model with the compiled ones, on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(rank, size) for _ in range(3)))
    x = torch.randn(TOKENS, WIDTH)
    # With quantize="int8" the all-gathers send one byte per channel instead of four. Without it the bits are equal.
    exact = passes.compile(model, passes.SequenceParallel(min_tokens=16), backend="eager")
    small = passes.compile(model, passes.SequenceParallel(min_tokens=16, quantize="int8"), backend="eager")
    with torch.no_grad():
        plain, same, close = model(x), exact(x), small(x)
    if rank == 0:
        print(exact.report)
        print(f"sequence parallel equals plain: {torch.equal(plain, same)}")
        before, after = small.report.bytes_before(TOKENS), small.report.bytes_after(TOKENS)
        print(f"with int8 {after} bytes instead of {before}, largest error {(plain - close).abs().max().item():.3f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args.ranks, str(Path(folder) / "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
