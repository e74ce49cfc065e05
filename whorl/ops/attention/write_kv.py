"""Write keys and values of new tokens into the paged KV cache."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from .._check import check_scales
from .._draw import Draw
from .._formats import FORMATS
from .._op import Values, operator
from ..quant import dynamic_quant
from . import paged_torch_npu


def _check(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, **_: object) -> None:
    check_scales("write_kv", k_cache, k_scale, v_scale)


_SCALE = Annotated[Tensor | None, "[blocks, HK, block_size] fp32, contiguous"]


@operator(check=_check, mutates=("k_cache", "v_cache", "k_scale", "v_scale"))
def write_kv(
    k: Annotated[Tensor, "[T, HK, D] float"],
    v: Annotated[Tensor, "[T, HK, D] k"],
    k_cache: Annotated[Tensor, "[blocks, block_size, HK, D] k or int8 or fp8"],
    v_cache: Annotated[Tensor, "[blocks, block_size, HK, D] k_cache"],
    slots: Annotated[Tensor, "[T] int, up to blocks*block_size - 1"],
    k_scale: _SCALE = None,
    v_scale: _SCALE = None,
) -> None:
    """Store the keys and values of new tokens in the cache.

    Token t is written to offset slots[t] % block size of block slots[t] // block size, and is skipped when slots[t] is
    negative. Where two tokens have one slot, either may win. A slot past the cache raises ValueError on the CPU and is
    not checked elsewhere. Returns nothing.

    With k_scale and v_scale, which are written too, the caches are int8 or float8_e4m3fn: every head of a token is
    quantised over its D channels as by `dynamic_quant`.

        ops.write_kv(k, v, k_cache, v_cache, slots)
    """
    slots = slots.long()
    if min(slots.tolist(), default=0) < 0:
        is_written = slots >= 0
        k, v, slots = k[is_written], v[is_written], slots[is_written]
    for cache, scales, new in ((k_cache, k_scale, k), (v_cache, v_scale, v)):
        if scales is not None:
            new, new_scales = quantised(new, cache)
            scales[slots // scales.shape[2], :, slots % scales.shape[2]] = new_scales.to(scales.dtype)
        _store(cache, slots, new)


def _store(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write new [T, HK, D] to the slots [T] of the cache, whose blocks may have any stride between them."""
    if cache.dtype.itemsize == 1:  # torch cannot copy fp8 by index
        cache, new = cache.view(torch.int8), new.view(torch.int8)
    if cache.stride(0) == cache.shape[1] * cache.stride(1):
        cache.flatten(0, 1).index_copy_(0, slots, new)
    else:
        cache[slots // cache.shape[1], slots % cache.shape[1]] = new


def quantised(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of x [T, HK, D] in the dtype of the cache, and scales [T, HK].

    In tests against fp64 the cache is fp64, and so are the codes.
    """
    codes, scales = dynamic_quant.reference(x, format=_cache_format(cache))
    return codes.to(cache.dtype), scales


def _cache_format(cache: Tensor) -> Literal["int8", "fp8"]:
    return "int8" if cache.dtype == torch.int8 else "fp8"


def _triton_reason(k: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, **_: object) -> str | None:
    if k_scale is not None and k.dtype == torch.float64:
        return "computes scales in fp32, got torch.float64"
    return None if k_cache.stride(-1) == v_cache.stride(-1) == 1 else "writes contiguous channels only"


write_kv.impl("cpp", "whorl.ops.cpu.rotation:write_kv")
write_kv.impl("triton", "paged_triton:write_kv", accepts=_triton_reason, takes_fp64=True)
write_kv.impl("torch_npu", "paged_torch_npu:write_kv", accepts=paged_torch_npu.write_kv_reason)


_CASES: list[Values] = [
    {"tokens": (1,), "kv_heads": 1, "dim": 8},
    {"tokens": (5,), "kv_heads": 2, "dim": 24},
    {"tokens": (7,), "kv_heads": 3, "dim": 64, "skipped": 3},
    {"tokens": (0,), "kv_heads": 2, "dim": 16},
    {"tokens": (6,), "kv_heads": 2, "dim": 20, "sliced": 3, "skipped": 1},
    {"tokens": (4,), "kv_heads": 1, "dim": 5, "scale": 0.01},
    {"tokens": (5,), "kv_heads": 2, "dim": 16, "skipped": 2, "short": True},  # slots in int32
    {"tokens": (3,), "kv_heads": 2, "dim": 16, "sliced": 3, "short": True},
    {"tokens": (5,), "kv_heads": 2, "dim": 24, "format": "int8", "skipped": 2},
    {"tokens": (6,), "kv_heads": 3, "dim": 20, "format": "fp8", "sliced": 3, "scale": 0.01},
    {"tokens": (4,), "kv_heads": 1, "dim": 64, "format": "fp8", "short": True},
    {"tokens": (0,), "kv_heads": 2, "dim": 16, "format": "int8"},
]
_BENCH: list[Values] = [{"tokens": (tokens,), "kv_heads": 4, "dim": 128, "block": 16} for tokens in (1, 64, 8192)]
_BENCH += [{"tokens": (64,), "kv_heads": 4, "dim": 128, "block": 16, "format": name} for name in FORMATS]


def _make(
    draw: Draw,
    tokens: tuple[int],
    kv_heads: int,
    dim: int,
    block: int = 4,
    skipped: int = 0,
    short: bool = False,
    format: str = "",
) -> Values:
    blocks = -(-tokens[0] // block) + 3
    caches = draw_caches(draw, (blocks, block, kv_heads + bool(draw.sliced), dim), format)
    caches |= {name: caches[name][:, :, :kv_heads] for name in ("k_cache", "v_cache")}
    if format:
        caches |= {name: caches[name][:, :kv_heads].contiguous() for name in ("k_scale", "v_scale")}
    slots = draw.slots(*tokens, blocks * block)
    slots[:skipped] = -1
    return {**caches, "slots": slots.int() if short else slots}


def draw_caches(draw: Draw, shape: tuple[int, ...], format: str, scale: float = 1.0) -> Values:
    """Draw k_cache and v_cache of shape [blocks, block size, HK, D]; with a format, quantised and with their scales.

    Returns them by the names that operators use; without a format the scales are None.
    """
    caches: Values = {"k_cache": None, "v_cache": None, "k_scale": None, "v_scale": None}
    for name in ("k", "v"):
        values = scale * torch.randn(*shape, **draw.kind)
        if not format:
            caches[f"{name}_cache"] = values
            continue
        codes, scales = dynamic_quant.reference(values, format=format)  # type: ignore[arg-type]
        caches |= {f"{name}_cache": codes, f"{name}_scale": scales.transpose(1, 2).contiguous()}
    return caches


write_kv.inputs(cases=_CASES, bench=_BENCH)(_make)
