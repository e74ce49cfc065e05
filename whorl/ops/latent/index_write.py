"""Normalise and rotate the indexer's keys of new tokens, and write them to a paged cache."""

from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, narrow, operator, widen
from ..rope import rope
from ..rope.tables import Style
from . import write_torch_npu
from .codes import alignment_reason, index_bytes, store_index
from .pages import check_pages, make_angles, make_pages, store
from .write import triton_reason


def _check(k: Tensor, cos_sin: Tensor, cache: Tensor, **_: object) -> None:
    check_pages("index_write", cache, k.shape[1], index_bytes(k.shape[1]))
    if cos_sin.shape[1] > k.shape[1]:
        raise ValueError(
            f"index_write: cos_sin has {cos_sin.shape[1]} channels, expected at most {k.shape[1]} as k has"
        )


_NORM = Annotated[Tensor, "[D] k or fp32"]


@operator(check=_check, mutates=("cache",))
def index_write(
    k: Annotated[Tensor, "[T, D] float"],
    weight: _NORM,
    bias: _NORM,
    cos_sin: Annotated[Tensor, "[T, 2*pairs] float"],
    cache: Annotated[Tensor, "[blocks, block_size, width] k or uint8"],
    slots: Annotated[Tensor, "[T] int, up to blocks*block_size - 1"],
    *,
    eps: Annotated[float, "> 0"] = 1e-6,
    style: Style = "half",
) -> None:
    """Normalise the indexer's key of each new token by LayerNorm, rotate its first channels, and store it in the cache.

    weight, bias: those of the norm; cos_sin, style: by which the first channels are rotated, as in `rope`; cache:
    D wide; slots: as in `write_kv`. Computed in fp32, rounded to k's dtype after the norm and again after the rotation,
    as two operators would. A uint8 cache, D + 4 wide, stores the `hadamard` transform (D a power of two) as e4m3 codes
    with one power-of-two scale, in two planes per block: see `codes.py`. Returns nothing.

        ops.index_write(k, weight, bias, cos_sin, cache, slots)
    """
    wide = widen(k)
    scale, shift = (x.to(wide.dtype) for x in (weight, bias))
    normed = narrow(torch.nn.functional.layer_norm(wide, weight.shape, scale, shift, eps), k.dtype)
    rotated = rope.reference(normed[:, None], None, cos_sin, style=style)[0][:, 0]
    (store_index if cache.dtype == torch.uint8 else store)(rotated, cache, slots)


def _triton_reason(k: Tensor, cache: Tensor, **_: object) -> str | None:
    reason = triton_reason(cache)
    if reason is not None or cache.dtype != torch.uint8:
        return reason
    return alignment_reason(cache, cache.shape[1] * k.shape[1])


index_write.impl("triton", "write_triton:index_write", accepts=_triton_reason)
index_write.impl("torch_npu", "write_torch_npu:index_write", accepts=write_torch_npu.index_reason)

_CASES: list[Values] = [
    {"tokens": (1,), "dim": 8, "rotary": 4},
    {"tokens": (7,), "dim": 32, "rotary": 16, "skipped": True},
    {"tokens": (5,), "dim": 24, "rotary": 24, "scale": 0.01},
    {"tokens": (0,), "dim": 16, "rotary": 8},
    {"tokens": (6,), "dim": 40, "rotary": 12, "sliced": True, "eps": 1e-3},
    {"tokens": (6,), "dim": 32, "rotary": 12, "skipped": True, "coded": True},
    {"tokens": (6,), "dim": 40, "rotary": 12, "style": "pairs"},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "dim": 128, "rotary": 64, "block": 64, "coded": coded}
    for coded in (False, True)
    for tokens in (1, 64, 8192)
]


@index_write.inputs(cases=_CASES, bench=_BENCH, words={"dim": "D"})
def _(
    draw: Draw, tokens: tuple[int], dim: int, rotary: int, block: int = 4, skipped: bool = False, coded: bool = False
) -> Values:
    blocks = -(-tokens[0] // block) + 1
    return {
        "cos_sin": make_angles(draw, *tokens, rotary),
        "cache": make_pages(draw, blocks, block, index_bytes(dim) if coded else dim, coded),
        "slots": draw.slots(*tokens, blocks * block, skipped=skipped),
    }
