"""Sums over K in one tree, so that their bits are equal for every number of ranks that share K.

A row-parallel matmul cuts K into a fixed number of segments. Each segment is a matmul by itself, rounded as `linear`
rounds. Segments are added in pairs, pairs of pairs and so on, in fp32, rounded once. A rank has a whole branch of that
tree, whatever the number of ranks. A trainer without ranks computes the same tree.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from whorl import ops


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of parts, a power of two of them, in fp32 (fp64 for fp64) and in the order of a balanced tree."""
    level = [part if part.dtype == torch.float64 else part.float() for part in parts]
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def linear_segments(x: Tensor, weight: Tensor, count: int) -> list[Tensor]:
    """Return the matmuls of `count` segments of K: x [T, K], weight [N, K], [T, N] each."""
    return [ops.linear(x[:, at], weight[:, at]) for at in cuts(x.shape[1], count)]


def segmented_linear(x: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """Return x W^T + bias as row-parallel ranks compute it with `count` segments in all; the bias is added last."""
    y = tree_sum(linear_segments(x, weight, count)).to(x.dtype)
    return y if bias is None else y + bias


def expert_segments(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, count: int) -> list[Tensor]:
    """Return what each segment of F adds to the output of experts, [T, C] each; arguments: of `ops.experts`."""
    rows, places, counts = ops.permute(x, ids, len(gate_up))
    hidden = ops.glu(ops.grouped_matmul(rows, gate_up, counts))
    parts = [ops.grouped_matmul(hidden[:, at], down[:, :, at], counts) for at in cuts(hidden.shape[1], count)]
    return [ops.unpermute(part, places, weights) for part in parts]


def cuts(size: int, count: int) -> list[slice]:
    """Return `count` equal ranges of `size` channels. Raises ValueError where they are not equal."""
    if size % count:
        raise ValueError(f"segments: {size} channels cannot be cut into {count} equal ones")
    return [slice(a, b) for a, b in pairwise(range(0, size + 1, size // count))]
