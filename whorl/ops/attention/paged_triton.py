# mypy: allow-untyped-defs
"""The paged KV cache in Triton: the kernels that write it, and the choice of the kernel that attends over it."""

import triton
import triton.language as tl
from torch import Tensor

from .._codes_triton import magnitude_bits, row_scale, to_codes
from .._formats import code_constants
from .._launch_triton import launched
from .._overlap_triton import follow, overlap
from .._rows import power_of_2, unit_stride
from .cuts_triton import LOG2_E
from .decode_triton import decode
from .prompt_triton import prompt


@launched
@triton.jit
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slots_ptr,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    k_stride_block,
    k_stride_offset,
    k_stride_head,
    v_stride_block,
    v_stride_offset,
    v_stride_head,
    BLOCK_SIZE: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
    LARGEST: tl.constexpr = 0.0,
    IS_INTEGER: tl.constexpr = False,
):
    """Write the heads of one token; with scales as codes, of which the last two say more."""
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        heads = tl.arange(0, BLOCK_H)[:, None]
        channels = tl.arange(0, BLOCK_D)[None, :]
        mask = (heads < HK) & (channels < D)
        k_at = k_ptr + token * k_stride_t + heads * k_stride_h + channels
        v_at = v_ptr + token * v_stride_t + heads * v_stride_h + channels
        k_to = k_cache_ptr + block * k_stride_block + offset * k_stride_offset + heads * k_stride_head + channels
        v_to = v_cache_ptr + block * v_stride_block + offset * v_stride_offset + heads * v_stride_head + channels
        if k_scale_ptr is None:
            k = tl.load(k_at, mask=mask)
            v = tl.load(v_at, mask=mask)
            tl.store(k_to, k, mask=mask)
            tl.store(v_to, v, mask=mask)
        else:
            scale_at = (block * HK + heads) * BLOCK_SIZE + offset
            _store_codes(k_at, k_to, k_scale_ptr + scale_at, mask, heads < HK, LARGEST, IS_INTEGER)
            _store_codes(v_at, v_to, v_scale_ptr + scale_at, mask, heads < HK, LARGEST, IS_INTEGER)


@triton.jit
def _store_codes(x_ptr, cache_ptr, scale_ptr, mask, is_head, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr):
    x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    scale = row_scale(tl.max(magnitude_bits(x), 1), LARGEST)[:, None]
    codes = to_codes(x, scale, LARGEST, IS_INTEGER)
    tl.store(cache_ptr, codes.to(cache_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr, scale, mask=is_head)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, **scales: Tensor | None) -> None:
    if not k.numel():
        return
    k, v = unit_stride(k), unit_stride(v)
    heads, dim = k.shape[1:]
    strides = *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]
    shapes = {
        "BLOCK_SIZE": k_cache.shape[1],
        "HK": heads,
        "D": dim,
        "BLOCK_H": power_of_2(heads),
        "BLOCK_D": power_of_2(dim),
        "num_warps": max(1, min(8, power_of_2(heads) * power_of_2(dim) // 256)),
        **overlap(k),
    }
    if scales["k_scale"] is not None:
        shapes |= code_constants(k_cache)
    tensors = (k, v, k_cache, v_cache, scales["k_scale"], scales["v_scale"], slots.contiguous())
    _write_kv_kernel[(k.shape[0],)](*tensors, *strides, **shapes)


# Average queries per sequence up to which the decode kernels run, where a program takes one token. With more queries
# the prompt kernels run, where it takes a tile of queries.
FEW_QUERIES = 16


def attention(
    scale: float,
    window: int,
    softcap: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sinks: Tensor | None,
    **arguments: Tensor,
) -> Tensor:
    """Compute `paged_attention`, by the decode or the prompt kernels; the bits are equal."""
    tensors = [unit_stride(arguments[name]) for name in ("q", "k_cache", "v_cache", "block_tables")]
    tensors += [arguments["query_starts"].contiguous(), arguments["context_lens"].contiguous()]
    strides = (*tensors[0].stride()[:2], *tensors[1].stride()[:3], *tensors[2].stride()[:3], tensors[3].stride(0))
    attend = decode if len(arguments["q"]) <= FEW_QUERIES * len(arguments["context_lens"]) else prompt
    return attend(tensors, (k_scale, v_scale), strides, scale * LOG2_E, window, softcap, sinks)
