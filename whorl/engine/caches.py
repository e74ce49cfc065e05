"""Sizes of the KV cache: tokens of a block, bytes of a token and memory available. Layers give `CacheSpec`s."""

import math
from collections.abc import Sequence

from whorl.device import accelerator
from whorl.host_memory import free_memory
from whorl.nn import CacheSpec, Model

_HOST_MEMORY = 1 << 30  # bytes; a CPU shares its memory with all other programs, so most of it is left free
_SHARE = 0.9  # of an accelerator's free memory; the rest is for activations


def cache_specs(model: Model, kv_cache_dtype: str = "auto") -> Sequence[CacheSpec]:
    """Return a spec for each cache of the model, in 8 bits if `kv_cache_dtype` says so; ValueError if one cannot be."""
    specs = model.cache_specs()
    if kv_cache_dtype == "auto":
        return specs
    for spec in specs:
        if not hasattr(spec, "quantised"):
            raise ValueError(
                f"kv_cache_dtype is {kv_cache_dtype!r}: {type(model).__name__} has a {type(spec).__name__}, which has "
                "no such format; leave kv_cache_dtype out to use the model's dtype"
            )
    return [spec.quantised(kv_cache_dtype) for spec in specs]  # type: ignore[attr-defined]


def block_size(specs: Sequence[CacheSpec], device: str, size: int | None = None) -> int:
    """Return a block size that every layer's attention supports; ValueError if one does not support `size`."""
    size = math.lcm(*(spec.block_size(device) for spec in specs)) if size is None else size
    reasons = (reason for spec in specs if (reason := spec.refusal(size, device)) is not None)
    if (reason := next(reasons, None)) is not None:
        raise ValueError(f"block_size is {size}: {reason}. Leave it out to use a size that all layers support")
    return size


def token_bytes(specs: Sequence[CacheSpec]) -> int:
    """Return the bytes of one token in the caches of all layers."""
    return sum(spec.token_bytes for spec in specs)


def cache_memory(device: str) -> int:
    """Return the bytes that the cache takes by default."""
    module = accelerator(device)
    if module is not None:
        return int(_SHARE * module.mem_get_info()[0])
    free = free_memory()
    return _HOST_MEMORY if free is None else min(_HOST_MEMORY, free // 2)
