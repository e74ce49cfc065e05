"""Writing keys and values into the pages of a cache."""

import torch
from torch import Tensor

from .._check import check_cache, check_slots
from .._draw import Draw, Sizes
from .._op import Values, operator
from . import paged_torch_npu


def _check(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    check_cache("write_kv", k_cache, v_cache)
    if k.shape != v.shape or k.dim() != 3 or k.shape[1:] != k_cache.shape[2:]:
        raise ValueError(
            f"write_kv: k is {list(k.shape)}, v {list(v.shape)}, expected [T, HK, D] of the cache's "
            f"{list(k_cache.shape[2:])}"
        )
    if not k.dtype == v.dtype == k_cache.dtype:
        raise ValueError(f"write_kv: k is {k.dtype}, v {v.dtype}, expected the cache's {k_cache.dtype}")
    check_slots("write_kv", slots, k.shape[0], k_cache)


@operator(check=_check, mutates=("k_cache", "v_cache"))
def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store the keys and values of new tokens in the cache.

    k, v: [T, HK, D]; k_cache, v_cache: [blocks, block size, HK, D] in k's dtype, written in place; slots: [T] int32 or
    int64: token t goes to offset slots[t] % block size of block slots[t] // block size, and nowhere when slots[t] is
    negative. Two tokens in one slot: either may win. A slot past the cache is an error on the CPU and is not looked
    for elsewhere. Returns nothing.
    """
    slots = slots.long()
    if min(slots.tolist(), default=0) < 0:
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    # Blocks may lie anywhere, the tokens of a block one behind the other.
    for cache, new in ((k_cache, k), (v_cache, v)):
        if cache.stride(0) == cache.shape[1] * cache.stride(1):
            cache.flatten(0, 1).index_copy_(0, slots, new)
        else:
            cache[slots // cache.shape[1], slots % cache.shape[1]] = new


def _triton_reason(k_cache: Tensor, v_cache: Tensor, **_: object) -> str | None:
    return None if k_cache.stride(-1) == v_cache.stride(-1) == 1 else "writes channels that lie side by side only"


write_kv.impl("triton", "paged_triton:write_kv", accepts=_triton_reason)
write_kv.impl("torch_npu", "paged_torch_npu:write_kv", accepts=paged_torch_npu.write_kv_reason)


_CASES: list[Values] = [
    {"tokens": (1,), "kv_heads": 1, "dim": 8},
    {"tokens": (5,), "kv_heads": 2, "dim": 24},
    {"tokens": (7,), "kv_heads": 3, "dim": 64, "skipped": 3},
    {"tokens": (0,), "kv_heads": 2, "dim": 16},
    {"tokens": (6,), "kv_heads": 2, "dim": 20, "sliced": True, "skipped": 1},
    {"tokens": (4,), "kv_heads": 1, "dim": 5, "scale": 0.01},
    {"tokens": (5,), "kv_heads": 2, "dim": 16, "skipped": 2, "short": True},  # slots in int32
    {"tokens": (3,), "kv_heads": 2, "dim": 16, "sliced": True, "short": True},
]
_BENCH: list[Values] = [{"tokens": (tokens,), "kv_heads": 4, "dim": 128, "block": 16} for tokens in (1, 64, 8192)]


def _make(
    draw: Draw, tokens: Sizes, kv_heads: int, dim: int, block: int = 4, skipped: int = 0, short: bool = False
) -> Values:
    count, blocks = tokens[0], -(-tokens[0] // block) + 3
    k, v = (draw.scale * draw.normal(count, kv_heads, dim, gap=3) for _ in range(2))
    shape = (blocks, block, kv_heads + draw.sliced, dim)
    k_cache, v_cache = (torch.randn(*shape, **draw.kind)[:, :, :kv_heads] for _ in range(2))
    slots = torch.randperm(blocks * block)[:count]
    slots[:skipped] = -1
    slots = slots.int() if short else slots
    return {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots.to(draw.device)}


write_kv.inputs(cases=_CASES, bench=_BENCH)(_make)
