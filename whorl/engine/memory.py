"""Memory of the KV cache when gpu_memory_utilization, a share of the device's whole memory, sets it."""

from whorl.device import accelerator

from .caches import cache_memory


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
