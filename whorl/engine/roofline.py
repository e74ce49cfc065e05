"""Roofline limits: how many bytes a decode step must read, and how fast this machine reads them."""

import functools
import time
from collections.abc import Mapping
from typing import Any

import torch

from whorl.device import accelerator, synchronize
from whorl.nn import Experts, Weighted, weighted

from .memory import cache_specs

_HOST_BYTES, _DEVICE_BYTES = 1 << 26, 1 << 30  # size of the timed copy; larger than any processor cache
_COPIES = 10


def step_bytes(
    model: Any,
    *,
    batch: int = 1,
    context: int = 0,
    kv_cache_dtype: str = "auto",
    distinct: Mapping[Experts, float] | None = None,
) -> float:
    """Return the least bytes that a decode step of `batch` sequences moves, each with `context` keys in the cache.

    distinct: as for `layer_bytes`.
    """
    total = sum(layer_bytes(layer, batch, distinct) for layer in _text_layers(model))
    return total + batch * sum(spec.step_bytes(context) for spec in cache_specs(model, kv_cache_dtype))


def layer_bytes(layer: Weighted, batch: int, distinct: Mapping[Experts, float] | None = None) -> float:
    """Return the bytes of a layer's weights that a decode step of `batch` sequences reads.

    distinct: how many different experts of a layer the step reads, where they were counted; others are estimated as if
    tokens chose their experts independently of each other.
    """
    if isinstance(layer, Experts) and distinct is not None and layer in distinct:
        return layer.read_bytes(distinct[layer])
    return layer.step_bytes(batch)


def prompt_flops(model: Any, num_tokens: int) -> float:
    """Return the least floating-point operations that a prompt of `num_tokens` needs."""
    return model.attention_flops(num_tokens) + sum(layer.prompt_flops(num_tokens) for layer in _text_layers(model))


def _text_layers(model: Any) -> list[Weighted]:
    """Return the layers that every token runs through: all but those of a vision tower, which only images need."""
    tower = getattr(model, "tower", None)
    tower_layers = set() if tower is None else set(tower.modules())
    return [layer for _, layer in weighted(model) if layer not in tower_layers]


def num_values(model: Any) -> int:
    """Return the number of parameters of the model, however its weights are quantised."""
    return sum(layer.num_values for _, layer in weighted(model))


@functools.cache
def copy_bandwidth(device: str) -> float:
    """Return the bytes per second that a copy reads and writes on this device, measured once."""
    size = _HOST_BYTES if accelerator(device) is None else _DEVICE_BYTES
    source, to = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(4):  # the first round warms up; the fastest is the least disturbed
        synchronize(device)
        start = time.perf_counter()
        for _ in range(_COPIES):
            to.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size * _COPIES / best


def decode_limit(model: Any, *, batch: int = 1, context: int = 0, kv_cache_dtype: str = "auto") -> float | None:
    """Return the tokens per second of `batch` sequences of `context` keys together if only memory reads took time; None
    if the model does not say what it reads."""
    if not isinstance(model, torch.nn.Module):
        return None
    device = next(model.parameters()).device.type
    num_bytes = step_bytes(model, batch=batch, context=context, kv_cache_dtype=kv_cache_dtype)
    return batch * copy_bandwidth(device) / num_bytes


def share(model: Any, tokens_per_second: float, *, context: int = 0, kv_cache_dtype: str = "auto") -> float | None:
    """Return the share of the memory-bound speed of one sequence that `tokens_per_second` is; None if the model does
    not say what it reads."""
    limit = decode_limit(model, context=context, kv_cache_dtype=kv_cache_dtype)
    return None if limit is None else tokens_per_second / limit
