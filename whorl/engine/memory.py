"""How much of a device's memory the cache gets, where the share of all of it is what was asked for."""

from whorl.device import accelerator

from .caches import cache_memory


def need_accelerator(share: float, device: str) -> None:
    """Refuse where there is no memory that could be shared out."""
    if accelerator(device) is None:
        raise ValueError(
            f"gpu_memory_utilization is {share}, and {device} is no accelerator: say how many bytes the cache takes "
            "(memory, --cache-memory)"
        )


def memory_left(share: float, device: str) -> int:
    """Bytes of a cache with which `share` of the device's memory is in use, weights and other programs counted."""
    module = accelerator(device)
    assert module is not None, "need_accelerator comes first"
    free, total = module.mem_get_info()
    used = total - free
    if (left := int(share * total) - used) <= 0:
        raise ValueError(
            f"gpu_memory_utilization is {share}, {share * total / 1e9:.1f} of {device}'s {total / 1e9:.1f} GB, "
            f"and {used / 1e9:.1f} GB are in use by weights and others: say more, or share the model (tp)"
        )
    return min(left, cache_memory(device))  # activations need room, too
