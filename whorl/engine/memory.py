"""What fits into a device's memory: weights before they are read, and the KV cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import nn

from whorl.device import HOST, accelerator, empty_cache
from whorl.host_memory import is_of_memory, limits
from whorl.nn import Matrix

from .caches import cache_memory


class OutOfMemory(ValueError):
    """Something does not fit into memory. The message has the numbers, or says what failed."""


def weight_bytes(model: nn.Module, *, unpack: bool) -> int:
    """Return the bytes of a model's parameters and buffers; it may be on "meta". unpack: as they are when the weights
    of fewer bits have been unpacked."""
    num_bytes = sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
    for matrix in _matrices(model) if unpack else ():
        if matrix.format.is_weight_only:
            stored = sum(parameter.nbytes for key, parameter in matrix.named_parameters() if key != "bias")
            num_bytes += prod(matrix.shape) * matrix.dtype.itemsize - stored
    return num_bytes


def largest_bytes(model: nn.Module) -> int:
    """Return the bytes of the largest matrix in fp32: it is in memory twice while it is read or widened."""
    return max((prod(matrix.shape[-2:]) for matrix in _matrices(model)), default=0) * torch.float32.itemsize


def check_weights(
    model: nn.Module, path: Path, device: torch.device, *, unpack: bool, reserve: int = 0, num_ranks: int = 1
) -> None:
    """Raise OutOfMemory if the weights of a model on "meta" do not fit into the free memory of the device.

    unpack: as in `weight_bytes`. reserve: bytes that are needed besides, for the cache. num_ranks: on a CPU the ranks
    share the host's memory, and load at the same time.
    """
    free, owner = _free(device.type)
    count = 1 if accelerator(device.type) is not None else num_ranks
    weights, largest = count * weight_bytes(model, unpack=unpack), count * largest_bytes(model)
    reserve *= count
    if free is None or weights + largest + reserve <= free:
        return
    parts = [f"{_gb(weights)} for the weights", f"{_gb(largest)} to read the largest one"]
    parts += [f"{_gb(reserve)} for the cache"] if reserve else []
    ways = ["a smaller model"]
    if any(matrix.format.has_weight for matrix in _matrices(model)):
        ways.append("weights of fewer bits (--quantize w4a16)")
    ways += ["more ranks (--tp)"] if accelerator(device.type) is not None else []
    raise OutOfMemory(
        f"{path}: {_gb(weights + largest + reserve)} of memory are needed, {', '.join(parts)}, and {_gb(free)} {owner} "
        f"are free; end other programs, or take {' or '.join(ways)}"
    )


def check_cache(num_blocks: int, block_bytes: int, device: str, *, memory: int | None, name: str = "cache") -> None:
    """Raise OutOfMemory if the cache has no block, or more than the free memory.

    memory: the bytes that were requested for it; None: a number of blocks, or none.
    """
    free, owner = _free(device)
    if num_blocks < 1:
        left = cache_memory(device) if memory is None else memory
        raise OutOfMemory(
            f"{name}: a block takes {block_bytes} bytes and its memory is {left}; give {block_bytes} bytes or more, "
            f"such as --cache-memory {64 * block_bytes}, or take a smaller model"
        )
    if free is not None and max(num_blocks * block_bytes, memory or 0) > free:
        size = f"{num_blocks} blocks of {block_bytes} bytes take {_gb(num_blocks * block_bytes)}"
        if memory is not None:
            size = f"its memory is {_gb(memory)}"
        raise OutOfMemory(
            f"{name}: {size}, and {_gb(free)} {owner} are free; give at most {free} bytes (--cache-memory), which hold "
            f"{free // max(1, block_bytes)} blocks (--num-blocks)"
        )


@contextmanager
def named_errors(doing: str) -> Iterator[None]:
    """Turn the errors of an allocation that failed into OutOfMemory, with what was being done and what is free."""
    try:
        yield
    except OutOfMemory:
        raise
    except (MemoryError, OSError, RuntimeError, ValueError) as error:
        if not is_of_memory(error):
            raise
        free, owner = _free(HOST)
        left = "" if free is None else f"; {_gb(free)} {owner} are free"
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise OutOfMemory(f"memory ran out while {doing}{left}: {reason[:200]}") from error


def _free(device: str) -> tuple[int | None, str]:
    """Return the free bytes, None if they are not known, and whose they are."""
    module = accelerator(device)
    if module is None:
        return min(limits(), default=(None, ""))
    empty_cache(device)  # what torch keeps for the next tensors is free as well
    return module.mem_get_info()[0], f"of {device}'s memory"


def _matrices(model: nn.Module) -> Iterator[Matrix]:
    return (module for module in model.modules() if isinstance(module, Matrix))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


# ---- gpu_memory_utilization


def need_accelerator(share: float, device: str) -> None:
    """Raise ValueError if the device is no accelerator."""
    if accelerator(device) is None:
        raise ValueError(
            f"gpu_memory_utilization is {share}, and {device} is no accelerator; set the bytes of the cache instead "
            "(memory, --cache-memory)"
        )


def memory_left(share: float, device: str) -> int:
    """Return the bytes left for the cache if `share` of the device's memory may be in use, weights and other programs
    included; ValueError if none are left."""
    module = accelerator(device)
    assert module is not None, "call need_accelerator first"
    free, total = module.mem_get_info()
    used = total - free
    if (left := int(share * total) - used) <= 0:
        raise ValueError(
            f"gpu_memory_utilization is {share}, {share * total / 1e9:.1f} of {device}'s {total / 1e9:.1f} GB, "
            f"and weights and other programs use {used / 1e9:.1f} GB; raise it, or shard the model (tp)"
        )
    return min(left, cache_memory(device))  # activations need memory as well
