"""How many tokens a cache block has, what they weigh, and how much memory there is. Layers say, as `CacheSpec`s."""

import math
from collections.abc import Sequence

from whorl.device import accelerator
from whorl.nn import CacheSpec, Model

_HOST_MEMORY = 1 << 30  # bytes; where memory is the machine's own, taking most of it would be rude
_SHARE = 0.9  # of an accelerator's free memory; the rest is for activations


def cache_specs(model: Model, kv_cache_dtype: str = "auto") -> Sequence[CacheSpec]:
    """One for each cache of the model; in 8 bits where that is asked for. ValueError: a layer's cache has none."""
    specs = model.cache_specs()
    if kv_cache_dtype == "auto":
        return specs
    for spec in specs:
        if not hasattr(spec, "quantised"):
            raise ValueError(
                f"kv_cache_dtype is {kv_cache_dtype!r}: {type(model).__name__} keeps {type(spec).__name__}, which has "
                "no such format. Leave it out for the model's own"
            )
    return [spec.quantised(kv_cache_dtype) for spec in specs]  # type: ignore[attr-defined]


def block_size(specs: Sequence[CacheSpec], device: str, asked: int | None = None) -> int:
    """Tokens of a block that every layer's attention takes; ValueError: one does not take what was asked for."""
    size = math.lcm(*(spec.block_size(device) for spec in specs)) if asked is None else asked
    reasons = (reason for spec in specs if (reason := spec.refusal(size, device)) is not None)
    if (reason := next(reasons, None)) is not None:
        raise ValueError(f"block_size is {size}: {reason}. Leave it out for what the layers ask for")
    return size


def token_bytes(specs: Sequence[CacheSpec]) -> int:
    """Of a token in all layers."""
    return sum(spec.token_bytes for spec in specs)


def cache_memory(device: str) -> int:
    """Bytes that the cache takes where nobody says how many."""
    module = accelerator(device)
    return _HOST_MEMORY if module is None else int(_SHARE * module.mem_get_info()[0])
