"""Normalise the latents of new tokens, rotate their key channels, and write both to a paged cache."""

from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, operator
from ..rms_norm import rms_norm
from ..rope import rope
from . import write_torch_npu
from .codes import alignment_reason, latent_bytes, pack_latents
from .pages import ONE_CACHE, check_latents, make_angles, make_pages, split_pages, store


def _check(kv: Tensor, weight: Tensor, cache: Tensor, rotary_cache: Tensor | None, **_: object) -> None:
    sizes = weight.shape[0], kv.shape[1] - weight.shape[0]
    check_latents("latent_write", cache, rotary_cache, sizes, latent_bytes(*sizes))


@operator(check=_check, mutates=("cache", "rotary_cache"))
def latent_write(
    kv: Annotated[Tensor, "[T, N + 2*pairs] float"],
    weight: Annotated[Tensor, "[N] kv or fp32"],
    cos_sin: Annotated[Tensor, "[T, 2*pairs] float"],
    cache: Annotated[Tensor, "[blocks, block_size, width] kv or uint8"],
    slots: Annotated[Tensor, "[T] int, up to blocks*block_size - 1"],
    rotary_cache: Annotated[Tensor | None, "[blocks, block_size, 2*pairs] kv"] = None,
    *,
    eps: Annotated[float, "> 0"] = 1e-6,
) -> None:
    """Normalise the latent of each new token by RMSNorm, rotate the key channels after it, and store both in the cache.

    kv: the output of the down projection: N channels of the latent, normalised with weight as in `rms_norm`, and R
    channels of the key that all heads share, rotated in neighbouring pairs by cos_sin as in `rope` (style "pairs");
    cache: N + R wide; slots: as in `write_kv`. Both parts are rounded once. A uint8 cache, 656 wide for 512 and 64
    channels, stores e4m3 codes with a power-of-two scale for every 128 of them, and the rotary channels in bf16: see
    `codes.py`. With rotary_cache the rotary channels are stored there, and cache is N wide, as Ascend's attention reads
    them. Returns nothing.

        ops.latent_write(kv, weight, cos_sin, cache, slots)
    """
    split = weight.shape[0]
    latent = rms_norm.reference(kv[:, :split], weight, eps)
    rotated = rope.reference(kv[:, None, split:], None, cos_sin, style="pairs")[0][:, 0]
    if rotary_cache is not None:
        store(latent, cache, slots)
        store(rotated, rotary_cache, slots)
        return
    is_coded = cache.dtype == torch.uint8
    store(pack_latents(latent, rotated) if is_coded else torch.cat((latent, rotated), -1), cache, slots)


def triton_reason(cache: Tensor) -> str | None:
    """Return None, or the reason that Triton can run neither `latent_write` nor `index_write` with this cache."""
    return None if cache.stride(2) == 1 else "needs a cache with contiguous channels"


def _triton_reason(weight: Tensor, cache: Tensor, rotary_cache: Tensor | None, **_: object) -> str | None:
    if rotary_cache is not None:
        return ONE_CACHE
    reason = triton_reason(cache)
    return reason or (alignment_reason(cache, weight.shape[0]) if cache.dtype == torch.uint8 else None)


latent_write.impl("triton", "write_triton:latent_write", accepts=_triton_reason)
latent_write.impl("torch_npu", "write_torch_npu:latent_write", accepts=write_torch_npu.latent_reason)

_CASES: list[Values] = [
    {"tokens": (1,), "latent_dim": 8, "rotary": 4},
    {"tokens": (7,), "latent_dim": 32, "rotary": 16, "skipped": True},
    {"tokens": (5,), "latent_dim": 24, "rotary": 8, "scale": 0.01},
    {"tokens": (0,), "latent_dim": 16, "rotary": 8},
    {"tokens": (6,), "latent_dim": 40, "rotary": 12, "sliced": True, "eps": 1e-3},
    {"tokens": (6,), "latent_dim": 200, "rotary": 12, "skipped": True, "coded": True},
    {"tokens": (5,), "latent_dim": 24, "rotary": 8, "skipped": True, "split": True},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "latent_dim": 512, "rotary": 64, "block": 64, "coded": coded}
    for coded in (False, True)
    for tokens in (1, 64, 8192)
]


@latent_write.inputs(cases=_CASES, bench=_BENCH, words={"latent_dim": "N"})
def _(
    draw: Draw,
    tokens: tuple[int],
    latent_dim: int,
    rotary: int,
    block: int = 4,
    skipped: bool = False,
    coded: bool = False,
    split: bool = False,
) -> Values:
    blocks = -(-tokens[0] // block) + 1
    width = latent_bytes(latent_dim, rotary) if coded else latent_dim + rotary
    pages = make_pages(draw, blocks, block, width, coded)
    latents, rotary_pages = split_pages(pages, latent_dim) if split else (pages, None)
    return {
        "cos_sin": make_angles(draw, *tokens, rotary),
        "cache": latents,
        "slots": draw.slots(*tokens, blocks * block, skipped=skipped),
        "rotary_cache": rotary_pages,
    }
