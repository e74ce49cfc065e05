"""What fits into a device's memory: weights before they are read, and caches, whose specs the layers declare."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from whorl.device import HOST, accelerator, empty_cache
from whorl.host_memory import free_memory, is_of_memory, limits
from whorl.nn import CacheSpec, Matrix, Model, StateSpec

from .settings import EngineSettings
from .states import StatePool

_HOST_MEMORY = 1 << 30  # bytes; a CPU shares its memory with all other programs, so most of it is left free
_UNLIMITED = 1 << 60  # bytes
_SHARE = 0.9  # of an accelerator's free memory; the rest is for activations
Specs = Sequence[CacheSpec | StateSpec]


class OutOfMemory(ValueError):
    """Something does not fit into memory. The message has the numbers, or says what failed."""


def weight_bytes(model: nn.Module, *, unpack: bool) -> int:
    """Return the bytes of a model's parameters and buffers; it may be on "meta". unpack: as they are when the weights
    of fewer bits have been unpacked."""
    num_bytes = sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
    for matrix in _matrices(model) if unpack else ():
        if matrix.format.is_weight_only:
            stored = sum(parameter.nbytes for key, parameter in matrix.named_parameters() if key != "bias")
            num_bytes += math.prod(matrix.shape) * matrix.dtype.itemsize - stored
    return num_bytes


def largest_bytes(model: nn.Module) -> int:
    """Return the bytes of the largest matrix in fp32: it is in memory twice while it is read or widened."""
    return max((math.prod(matrix.shape[-2:]) for matrix in _matrices(model)), default=0) * torch.float32.itemsize


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


# ---- caches


def cache_specs(model: Model, kv_cache_dtype: str = "auto") -> Specs:
    """Return a spec for each cache of the model; entries of tokens are in 8 bits if `kv_cache_dtype` says so.

    Raises ValueError if one cannot be.
    """
    specs = model.cache_specs()
    if kv_cache_dtype == "auto":
        return specs
    for spec in by_token(specs):
        if not hasattr(spec, "quantised"):
            raise ValueError(
                f"kv_cache_dtype is {kv_cache_dtype!r}: {type(model).__name__} has a {type(spec).__name__}, which has "
                "no such format; leave kv_cache_dtype out to use the model's dtype"
            )
    return [spec if isinstance(spec, StateSpec) else spec.quantised(kv_cache_dtype) for spec in specs]  # type: ignore[attr-defined]


def by_token(specs: Specs) -> list[CacheSpec]:
    """Return the specs of caches that have an entry for each token."""
    return [spec for spec in specs if not isinstance(spec, StateSpec)]


def by_sequence(specs: Specs) -> list[StateSpec]:
    """Return the specs of caches that have a state for each sequence."""
    return [spec for spec in specs if isinstance(spec, StateSpec)]


def state_grid(specs: Specs) -> int | None:
    """Return the grid of the states; None without any. ValueError if layers have different ones."""
    grids = sorted({spec.grid for spec in by_sequence(specs)})
    if len(grids) > 1:
        raise ValueError(f"the states of this model's layers have grids of {grids} tokens; all must have the same")
    return grids[0] if grids else None


def state_pool(specs: Specs, model: Model, settings: EngineSettings, block_size: int) -> StatePool | None:
    """Return the pool of states and snapshots, if layers keep states; ValueError for settings that do not fit them."""
    name, grid = type(model).__name__, state_grid(specs)
    if grid is None:
        if settings.num_snapshots is not None:
            raise ValueError(
                f"num_snapshots is {settings.num_snapshots}, and no layer of {name} keeps a state for each sequence; "
                "leave it out"
            )
        return None
    count = settings.max_num_seqs if settings.num_snapshots is None else settings.num_snapshots
    count = count if settings.use_prefix_cache else 0
    rooms = [spec.most_rows for spec in by_sequence(specs) if spec.most_rows is not None]
    sizes = {"state_grid": grid, "block_size": block_size, "interval": settings.snapshot_tokens}
    states = StatePool(count, **sizes, most_rows=min(rooms, default=None))
    if (most := settings.max_prompt_tokens) is not None and most < states.grid:
        raise ValueError(
            f"max_prompt_tokens is {most}, expected at least {states.grid}, the tokens of a chunk of a prompt that the "
            f"states of {name}'s layers need"
        )
    return states


def state_line(specs: Specs, max_num_seqs: int, num_snapshots: int) -> str:
    """Return what the states of sequences take, in words."""
    lane, snapshot = (sum(getattr(spec, n) for spec in by_sequence(specs)) for n in ("lane_bytes", "snapshot_bytes"))
    total = (max_num_seqs + 1) * lane + num_snapshots * snapshot
    return (
        f"states: {_gb(total)}, for {max_num_seqs} sequences of {_gb(lane)} (--max-num-seqs) and {num_snapshots} "
        f"snapshots of {_gb(snapshot)} (--num-snapshots)"
    )


def without_states(model: Model, proposer: str) -> Specs:
    """Return the specs of a model that drafts for `proposer`; ValueError if a layer has a state."""
    specs = model.cache_specs()
    if states := by_sequence(specs):
        raise ValueError(
            f"{proposer}: {type(model).__name__} keeps a state for each sequence ({states[0].kind}), and a model that "
            "drafts cannot; use one with attention in all layers"
        )
    return specs


def check_rollback(specs: Specs, model: Model, proposer: str) -> None:
    """Raise ValueError if a layer's state cannot be rolled back when a draft of `proposer` is rejected."""
    for spec in by_sequence(specs):
        if not spec.rolls_back:
            raise ValueError(
                f"{proposer}: {type(model).__name__} keeps a state for each sequence ({spec.kind}), which cannot go "
                "back when a draft is rejected; use no proposer"
            )


def block_size(specs: Specs, device: str, size: int | None = None) -> int:
    """Return a block size that every layer's attention supports; ValueError if one does not support `size`."""
    if size is None:
        sizes = [spec.block_size(device) for spec in by_token(specs)]
        size = math.lcm(*sizes) if sizes else state_grid(specs) or 1
    reasons = (reason for spec in by_token(specs) if (reason := spec.refusal(size, device)) is not None)
    if (reason := next(reasons, None)) is not None:
        raise ValueError(f"block_size is {size}: {reason}. Leave it out to use a size that all layers support")
    return size


def token_bytes(specs: Specs) -> int:
    """Return the bytes of one token in the caches of all layers."""
    return sum(spec.token_bytes for spec in by_token(specs))


def cache_room(specs: Specs, device: str, num_ranks: int = 1) -> dict[str, int]:
    """Return the bytes on this rank of a token, of a sequence's state ("lane") and of a snapshot of it, and the bytes
    that are free for all caches of one of `num_ranks` ranks; "most": with states they may take more, up to so many."""
    states = by_sequence(specs)
    lane, snapshot = (sum(getattr(spec, name) for spec in states) for name in ("lane_bytes", "snapshot_bytes"))
    free, most = cache_memory(device, num_ranks), cache_memory(device, num_ranks, most=_UNLIMITED)
    return {"token": token_bytes(specs), "lane": lane, "snapshot": snapshot, "free": free, "most": most}


def blocks_that_fit(
    room: Mapping[str, int], memory: int | None, *, block_size: int, max_num_seqs: int, num_snapshots: int, most: int
) -> int:
    """Return how many blocks, at most `most`, fit beside the states of sequences and their snapshots.

    room: of `cache_room`. memory: bytes for all caches; None: those that are free. ValueError if the states do not fit.
    """
    states = (max_num_seqs + 1) * room["lane"] + num_snapshots * room["snapshot"]  # padding has a lane, too
    memory = min(room["free"] + states, room["most"]) if memory is None else memory
    if states > memory:
        raise ValueError(
            f"the cache has {memory:,} bytes, and the states of {max_num_seqs} sequences and {num_snapshots} snapshots "
            f"take {states:,}; lower max_num_seqs or num_snapshots, or raise memory"
        )
    return min(most, (memory - states) // (room["token"] * block_size)) if room["token"] else most


def cache_memory(device: str, num_ranks: int = 1, *, most: int = _HOST_MEMORY) -> int:
    """Return the bytes that the cache of a rank takes by default. On a CPU the ranks share the host's memory: they take
    half of what is free, and `most` bytes each."""
    module = accelerator(device)
    if module is not None:
        return int(_SHARE * module.mem_get_info()[0])
    free = free_memory()
    return most if free is None else min(most, free // (2 * num_ranks))


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
