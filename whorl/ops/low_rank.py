"""Low-rank updates of linear layers, of which every token chooses one: LoRA for each request."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from ._draw import Draw
from ._op import Values, operator
from ._tracing import is_readable
from .linear import multiply
from .low_rank_update import updated


def _check_low_rank(y: Tensor, a: Tensor, ranks: Tensor, sizes: Sequence[int], **_: object) -> None:
    if len(sizes) != a.shape[1] or sum(sizes) != y.shape[1] or min(sizes) < 1:
        raise ValueError(
            f"low_rank: sizes are {list(sizes)}, expected {a.shape[1]} positive numbers with a sum of {y.shape[1]}"
        )
    if is_readable(ranks) and ranks.numel() and not 0 <= int(ranks.min()) <= int(ranks.max()) <= a.shape[2]:
        raise ValueError(f"low_rank: ranks are {ranks.tolist()}, expected 0 to {a.shape[2]}")


WITHOUT = {"torch_npu": "torch_npu has no product of rows with matrices that each row chooses"}


@operator(
    check=_check_low_rank,
    forward_only=True,
    without=WITHOUT,
    flops="2*T*R*K*P+2*T*N*R",
    bytes=lambda values, _: _bytes(values),
)
def low_rank(
    y: Annotated[Tensor, "[T, N] float"],
    x: Annotated[Tensor, "[T, K] y"],
    a: Annotated[Tensor, "[G>0, P>0, R>0, K] y"],
    b: Annotated[Tensor, "[G, N, R] y"],
    groups: Annotated[Tensor, "[T] int32, from -1 to G - 1"],
    ranks: Annotated[Tensor, "[G, P] int32"],
    scales: Annotated[Tensor, "[G, P] fp32"],
    sizes: Sequence[int],
    bias: Annotated[Tensor | None, "[G, N] y"] = None,
) -> Annotated[Tensor, "[T, N] y"]:
    """Add to each row of y the update of its group: y + ((x A^T) B^T + bias) * scale, by part of the columns.

    y: the product of x with a matrix whose columns are P parts of `sizes`. groups: which update each row gets; -1:
    none, and the row is copied. Part p of group g has A = a[g, p, :r] and B = b[g, columns, :r], where r = ranks[g, p],
    and its scale; r = 0: these columns are copied. What a and b hold past the rank is not used. Sums in fp32, rounded
    to y's dtype four times, where PEFT's layer rounds: after A, after B and bias, after the scale, after the sum. A
    row's bits depend on that row and its group alone, not on the other rows nor on their order. Returns a new tensor.

        y = ops.low_rank(y, x, a, b, groups, ranks, scales, [4096, 1024, 1024])
    """
    return updated(multiply, y, x, a, b, groups, ranks, scales, sizes, bias)


low_rank.impl("cpp", "whorl.ops.cpu.low_rank:low_rank")
low_rank.impl("triton", "low_rank_triton:forward")


def _bytes(values: Values) -> int:
    """Return the bytes of y, twice, of x, and of the matrices of those groups that rows have."""
    a, b, y = values["a"], values["b"], values["y"]
    used = set(values["groups"].tolist()) - {-1}
    ranks = values["ranks"].tolist()
    a_values = sum(ranks[group][part] * a.shape[3] for group in used for part in range(a.shape[1]))
    b_values = sum(ranks[group][part] * size for group in used for part, size in enumerate(values["sizes"]))
    return int((2 * y.numel() + values["x"].numel() + a_values + b_values) * b.element_size())


_CASES: list[Values] = [
    {"tokens": (1,), "inner": 8, "rank": 4, "sizes": [5], "choices": 1},
    {"tokens": (19,), "inner": 40, "rank": 16, "sizes": [33, 7, 16], "choices": 3},
    {"tokens": (7,), "inner": 33, "rank": 20, "sizes": [24, 24], "choices": 9, "scale": 0.01},
    {"tokens": (0,), "inner": 16, "rank": 8, "sizes": [16], "choices": 2},
    {"tokens": (70,), "inner": 70, "rank": 16, "sizes": [130], "choices": 4, "biased": True, "sliced": True},
    {"tokens": (35,), "inner": 64, "rank": 40, "sizes": [64, 3], "choices": 70, "biased": True},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "inner": 4096, "rank": 16, "sizes": sizes, "choices": 64}
    for tokens in (64, 8192)
    for sizes in ([4096, 1024, 1024], [12288, 12288])
]


def _make(
    draw: Draw, tokens: tuple[int], inner: int, rank: int, sizes: list[int], choices: int, biased: bool = False
) -> Values:
    device, parts, width = draw.device, len(sizes), sum(sizes)
    ranks = torch.full((choices, parts), rank, dtype=torch.int32)
    ranks[torch.rand(ranks.shape) < 0.3] //= 2
    ranks[torch.rand(ranks.shape) < 0.1] = 0
    wide = torch.float64 if draw.dtype == torch.float64 else torch.float32
    values: Values = {
        "y": draw.scaled(*tokens, width),
        "x": draw.scaled(*tokens, inner),
        "a": torch.randn(choices, parts, rank, inner, device=device).to(draw.dtype) / inner**0.5,
        "b": torch.randn(choices, width, rank, device=device).to(draw.dtype) / rank**0.5,
        "groups": torch.randint(-1, choices, tokens).int().to(device),
        "ranks": ranks.to(device),
        "scales": (2 * torch.rand(choices, parts)).to(device, wide),
        "sizes": sizes,
    }
    return values | ({"bias": draw.scaled(choices, width)} if biased else {})


low_rank.inputs(cases=_CASES, bench=_BENCH)(_make)
