"""What a decode step must read and how fast this machine reads it: the limit that speeds are held against."""

import functools
import time
from typing import Any

import torch

from whorl.device import accelerator, synchronize
from whorl.nn import Weighted, weighted

from .caches import cache_specs

_HOST_BYTES, _DEVICE_BYTES = 1 << 26, 1 << 30  # of a copy; larger than any cache
_COPIES = 10


def step_bytes(model: Any, *, batch: int = 1, context: int = 0, kv_cache_dtype: str = "auto") -> float:
    """Bytes that a decode step of `batch` sequences moves at least, each with `context` keys in the cache."""
    total = sum(layer.step_bytes(batch) for layer in _of_tokens(model))
    return total + batch * sum(spec.step_bytes(context) for spec in cache_specs(model, kv_cache_dtype))


def prompt_flops(model: Any, num_tokens: int) -> float:
    """That a prompt of so many tokens needs at least."""
    return model.attention_flops(num_tokens) + sum(layer.prompt_flops(num_tokens) for layer in _of_tokens(model))


def _of_tokens(model: Any) -> list[Weighted]:
    """The layers that a token runs through: not those of a tower, which has run when a picture becomes tokens."""
    tower = getattr(model, "tower", None)
    outside = set() if tower is None else set(tower.modules())
    return [layer for _, layer in weighted(model) if layer not in outside]


def num_values(model: Any) -> int:
    """Numbers that the model consists of, however its weights are held."""
    return sum(layer.num_values for _, layer in weighted(model))


@functools.cache
def copy_bandwidth(device: str) -> float:
    """Bytes a second that a copy reads and writes, measured once."""
    size = _HOST_BYTES if accelerator(device) is None else _DEVICE_BYTES
    source, to = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(4):  # the first one warms up; of the rest the one least disturbed
        synchronize(device)
        start = time.perf_counter()
        for _ in range(_COPIES):
            to.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size * _COPIES / best


def decode_limit(model: Any, *, batch: int = 1, context: int = 0, kv_cache_dtype: str = "auto") -> float | None:
    """Tokens a second that `batch` sequences of `context` keys have together if reading were all; None where the model
    does not say what it reads."""
    if not isinstance(model, torch.nn.Module):
        return None
    device = next(model.parameters()).device.type
    needed = step_bytes(model, batch=batch, context=context, kv_cache_dtype=kv_cache_dtype)
    return batch * copy_bandwidth(device) / needed


def share(model: Any, tokens_per_second: float, *, context: int = 0, kv_cache_dtype: str = "auto") -> float | None:
    """Of the speed that a sequence would have if reading were all; None where the model does not say what it reads."""
    if not isinstance(model, torch.nn.Module):
        return None
    device = next(model.parameters()).device.type
    needed = step_bytes(model, context=context, kv_cache_dtype=kv_cache_dtype)
    return tokens_per_second * needed / copy_bandwidth(device)
