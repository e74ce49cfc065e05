# mypy: allow-untyped-defs
"""Write latents and the indexer's keys of new tokens to paged caches, normed and rotated in registers.

One program takes one token. The rotation partner of each channel is loaded a second time, so that the channels stay in
their order.
"""

import triton
import triton.language as tl
from torch import Tensor

from .._overlap_triton import begin, follow, overlap
from .._rows import ceil_div, power_of_2, unit_stride
from .._sums_triton import row_sum
from .codes import GROUP
from .codes_triton import GROUP_SIZE, byte_views, codes_for, hadamard_rows, scale_for


@triton.jit
def _rotate(x, partner, cos, sin, is_first):
    """Rotate channels with their partners, with the rounding of `rotated` in `rope`; the first of a pair subtracts."""
    product = partner * sin
    return tl.fma(x, cos, tl.where(is_first, -product, product))


@triton.jit
def _inverse_root(mean, eps):
    """Return 1 / sqrt(mean + eps), correctly rounded as in the norms."""
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _latent_write_kernel(
    kv_ptr,
    weight_ptr,
    angles_ptr,
    cache_ptr,
    scales_ptr,
    rotary_ptr,
    slots_ptr,
    kv_stride,
    angles_stride,
    stride_block,
    stride_offset,
    eps,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the latent of one token. GROUPS: scale groups of an 8-bit cache; otherwise 0, and scales_ptr is None."""
    begin(OVERLAP)
    columns = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < LATENT, other=0.0).to(tl.float32)
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        dtype = kv_ptr.dtype.element_ty
        at = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_offset
        x_ptr = kv_ptr + token * kv_stride
        x = tl.load(x_ptr + columns, mask=columns < LATENT, other=0.0).to(tl.float32)
        channels = tl.arange(0, BLOCK_R)
        is_real = channels < 2 * HALF
        unrotated = tl.load(x_ptr + LATENT + channels, mask=is_real, other=0.0).to(tl.float32)
        partner = tl.load(x_ptr + LATENT + (channels ^ 1), mask=is_real, other=0.0).to(tl.float32)
        angle = angles_ptr + token * angles_stride + channels // 2
        cos = tl.load(angle, mask=is_real, other=0.0).to(tl.float32)
        sin = tl.load(angle + HALF, mask=is_real, other=0.0).to(tl.float32)
        inverse = _inverse_root(row_sum(x * x, 1, BLOCK) / LATENT, eps)[:, None]
        latent = (x * inverse * weight).to(dtype)
        rotated = _rotate(unrotated, partner, cos, sin, channels % 2 == 0).to(dtype)
        if GROUPS == 0:
            tl.store(cache_ptr + at + columns, latent, mask=columns < LATENT)
            tl.store(cache_ptr + at + LATENT + channels, rotated, mask=is_real)
        else:
            _store_latent(cache_ptr + at, scales_ptr + at // 4, latent, LATENT, BLOCK, GROUPS)
            tl.store(
                rotary_ptr + at // 2 + (LATENT + 4 * GROUPS) // 2 + channels, rotated.to(tl.bfloat16), mask=is_real
            )


@triton.jit
def _store_latent(codes_ptr, scales_ptr, latent, LATENT: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Store the codes of a latent, followed by one scale for every 128 of them."""
    parts: tl.constexpr = max(1, BLOCK // GROUP_SIZE)
    wide = tl.reshape(latent.to(tl.float32), (parts, BLOCK // parts))
    scale = scale_for(tl.max(tl.abs(wide), 1))
    codes = tl.reshape(codes_for(wide, tl.broadcast_to(scale[:, None], wide.shape)), (1, BLOCK))
    columns = tl.arange(0, BLOCK)[None, :]
    tl.store(codes_ptr + columns, codes.to(codes_ptr.dtype.element_ty), mask=columns < LATENT)
    group = tl.arange(0, parts)
    tl.store(scales_ptr + LATENT // 4 + group, scale, mask=group < GROUPS)


@triton.jit
def _load_normed(k_ptr, weight_ptr, bias_ptr, at, is_real, mean, inverse):
    """Return channels `at` of the layer norm, rounded."""
    x = tl.load(k_ptr + at, mask=is_real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=is_real, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + at, mask=is_real, other=0.0).to(tl.float32)
    return tl.fma((x - mean) * inverse, weight, bias).to(k_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _index_write_kernel(
    k_ptr,
    weight_ptr,
    bias_ptr,
    angles_ptr,
    cache_ptr,
    scales_ptr,
    slots_ptr,
    k_stride,
    angles_stride,
    stride_block,
    stride_offset,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    IS_PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the indexer's key of one token. scales_ptr: None unless the cache has 8 bits."""
    begin(OVERLAP)
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_ptr += token * k_stride
        channels = tl.arange(0, BLOCK)[None, :]
        is_real = channels < D
        x = tl.load(k_ptr + channels, mask=is_real, other=0.0).to(tl.float32)
        mean = (row_sum(x, 1, BLOCK) / D)[:, None]
        centred = tl.where(is_real, x - mean, 0.0)
        inverse = _inverse_root(row_sum(centred * centred, 1, BLOCK) / D, eps)[:, None]
        unrotated = _load_normed(k_ptr, weight_ptr, bias_ptr, channels, is_real, mean, inverse)
        is_rotary = channels < 2 * HALF
        if IS_PAIRS:
            is_first, other, pair = channels % 2 == 0, channels ^ 1, channels // 2
        else:
            is_first = channels < HALF
            other = tl.where(is_first, channels + HALF, channels - HALF)
            pair = tl.where(is_first, channels, channels - HALF)
        partner = _load_normed(k_ptr, weight_ptr, bias_ptr, other, is_rotary, mean, inverse)
        angle = angles_ptr + token * angles_stride + pair
        cos = tl.load(angle, mask=is_rotary, other=1.0).to(tl.float32)
        sin = tl.load(angle + HALF, mask=is_rotary, other=0.0).to(tl.float32)
        rotated = tl.where(is_rotary, _rotate(unrotated, partner, cos, sin, is_first), unrotated).to(
            k_ptr.dtype.element_ty
        )
        if scales_ptr is None:
            tl.store(cache_ptr + block * stride_block + offset * stride_offset + channels, rotated, mask=is_real)
        else:
            wide = hadamard_rows(rotated.to(tl.float32), 1, D)
            scale = scale_for(tl.max(tl.abs(wide), 1))
            codes = codes_for(wide, tl.broadcast_to(scale[:, None], wide.shape)).to(cache_ptr.dtype.element_ty)
            tl.store(cache_ptr + block * stride_block + offset * D + channels, codes)
            at = (block * stride_block + BLOCK_SIZE * D) // 4 + offset
            tl.store(scales_ptr + at + tl.zeros((1,), tl.int64), scale)


def latent_write(
    kv: Tensor, weight: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor, rotary_cache: None, eps: float
) -> None:
    if not kv.shape[0]:
        return
    kv, angles, latent_dim = unit_stride(kv), unit_stride(cos_sin), weight.shape[0]
    is_coded = cache.itemsize == 1
    codes, scales, rotated = byte_views(cache) if is_coded else (cache, None, None)
    _latent_write_kernel[(kv.shape[0],)](
        kv,
        weight.contiguous(),
        angles,
        codes,
        scales,
        rotated,
        slots.contiguous(),
        kv.stride(0),
        angles.stride(0),
        *cache.stride()[:2],
        eps,
        LATENT=latent_dim,
        HALF=angles.shape[1] // 2,
        BLOCK_SIZE=cache.shape[1],
        BLOCK=power_of_2(latent_dim),
        BLOCK_R=power_of_2(angles.shape[1]),
        GROUPS=ceil_div(latent_dim, GROUP) if is_coded else 0,
        num_warps=1,
        enable_fp_fusion=False,
        **overlap(kv),
    )


def index_write(
    k: Tensor, weight: Tensor, bias: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor, eps: float, style: str
) -> None:
    if not k.shape[0]:
        return
    k, angles = unit_stride(k), unit_stride(cos_sin)
    codes, scales = byte_views(cache)[:2] if cache.itemsize == 1 else (cache, None)
    _index_write_kernel[(k.shape[0],)](
        k,
        weight.contiguous(),
        bias.contiguous(),
        angles,
        codes,
        scales,
        slots.contiguous(),
        k.stride(0),
        angles.stride(0),
        *cache.stride()[:2],
        eps,
        D=k.shape[1],
        HALF=angles.shape[1] // 2,
        IS_PAIRS=style == "pairs",
        BLOCK_SIZE=cache.shape[1],
        BLOCK=power_of_2(k.shape[1]),
        num_warps=1,
        enable_fp_fusion=False,
        **overlap(k),
    )
