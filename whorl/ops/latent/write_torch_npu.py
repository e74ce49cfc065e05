"""Writing latents and the indexer's keys to paged caches on Ascend: norm, rotation and npu_scatter_nd_update_.

npu_kv_rmsnorm_rope_cache would do all three at once, but it stores the rotary channels in half-split order, and the
cache here keeps neighbouring pairs.
"""

import torch
from torch import Tensor

from whorl.contracts import rms_norm_limit, scatter_nd_update_limit

from .. import _torch_npu
from .._torch_npu import dtype_name
from ..rope.torch_npu import reason as rope_reason
from ..rope.torch_npu import rotate_both


def _store_reason(rows: Tensor, cache: Tensor) -> str | None:
    if cache.dtype == torch.uint8:
        return "has no operator that writes e4m3 codes"
    if not cache.is_contiguous():
        return "needs a contiguous cache"
    return scatter_nd_update_limit(
        shape=(cache.shape[0] * cache.shape[1], cache.shape[2]),
        index_shape=(len(rows), 1),
        updates_shape=(len(rows), cache.shape[2]),
        dtype=dtype_name(cache),
    )


def _store(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    source, destinations, is_any = _torch_npu.replace_skipped(slots)
    flat = cache.view(-1, cache.shape[2])
    updates = torch.where(is_any, rows[source], flat[:1]).contiguous()
    _torch_npu.call("npu_scatter_nd_update_", input=flat, indices=destinations[:, None].contiguous(), updates=updates)


def _rotate(x: Tensor, cos_sin: Tensor, style: str) -> Tensor:
    """Rotate the first channels of x [T, D]."""
    return rotate_both(x[:, None], None, cos_sin, style, style, "leading", inverse=False)[0][:, 0]


def latent_reason(
    kv: Tensor, weight: Tensor, cos_sin: Tensor, cache: Tensor, rotary_cache: Tensor | None, **_: object
) -> str | None:
    """Return None, or the reason that torch_npu's operators cannot compute `latent_write`."""
    split = weight.shape[0]
    for pages in (cache,) if rotary_cache is None else (cache, rotary_cache):
        if (limit := _store_reason(kv, pages)) is not None:
            return limit
    norm = rms_norm_limit(
        shape=(len(kv), split), gamma_shape=weight.shape, dtype=dtype_name(kv), gamma_dtype=dtype_name(weight)
    )
    return norm or rope_reason(kv[:, None, split:], cos_sin)


def latent_write(
    kv: Tensor,
    weight: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    rotary_cache: Tensor | None,
    eps: float,
) -> None:
    split = weight.shape[0]
    latent, _ = _torch_npu.call("npu_rms_norm", input=kv[:, :split].contiguous(), gamma=weight, epsilon=eps)
    rotated = _rotate(kv[:, split:], cos_sin, "pairs")
    if rotary_cache is None:
        _store(torch.cat((latent, rotated), -1), cache, slots)
    else:
        _store(latent, cache, slots)
        _store(rotated, rotary_cache, slots)


def index_reason(k: Tensor, cos_sin: Tensor, cache: Tensor, **_: object) -> str | None:
    """Return None, or the reason that torch_npu's operators cannot compute `index_write`."""
    return _store_reason(k, cache) or rope_reason(k[:, None], cos_sin)


def index_write(
    k: Tensor, weight: Tensor, bias: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor, eps: float, style: str
) -> None:
    normed = torch.nn.functional.layer_norm(k.float(), weight.shape, weight.float(), bias.float(), eps).to(k.dtype)
    _store(_rotate(normed, cos_sin, style), cache, slots)
