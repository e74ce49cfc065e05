"""Sizes of caches: tokens of a block, bytes of a token and of a state, and memory available. Layers declare specs."""

import math
from collections.abc import Mapping, Sequence

from whorl.device import accelerator
from whorl.host_memory import free_memory
from whorl.nn import CacheSpec, Model, StateSpec

from .settings import EngineSettings
from .states import StatePool

_HOST_MEMORY = 1 << 30  # bytes; a CPU shares its memory with all other programs, so most of it is left free
_SHARE = 0.9  # of an accelerator's free memory; the rest is for activations
Specs = Sequence[CacheSpec | StateSpec]


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
    states = StatePool(count, state_grid=grid, block_size=block_size, interval=settings.snapshot_tokens)
    if (most := settings.max_prompt_tokens) is not None and most < states.grid:
        raise ValueError(
            f"max_prompt_tokens is {most}, expected at least {states.grid}, the tokens of a chunk of a prompt that the "
            f"states of {name}'s layers need"
        )
    return states


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
    that are free for all caches of one of `num_ranks` ranks."""
    states = by_sequence(specs)
    lane, snapshot = (sum(getattr(spec, name) for spec in states) for name in ("lane_bytes", "snapshot_bytes"))
    return {"token": token_bytes(specs), "lane": lane, "snapshot": snapshot, "free": cache_memory(device, num_ranks)}


def blocks_that_fit(
    room: Mapping[str, int], memory: int | None, *, block_size: int, max_num_seqs: int, num_snapshots: int, most: int
) -> int:
    """Return how many blocks, at most `most`, fit beside the states of sequences and their snapshots.

    room: of `cache_room`. memory: bytes for all caches; None: those that are free. ValueError if the states do not fit.
    """
    memory = room["free"] if memory is None else memory
    states = (max_num_seqs + 1) * room["lane"] + num_snapshots * room["snapshot"]  # padding has a lane, too
    if states > memory:
        raise ValueError(
            f"the cache has {memory:,} bytes, and the states of {max_num_seqs} sequences and {num_snapshots} snapshots "
            f"take {states:,}; lower max_num_seqs or num_snapshots, or raise memory"
        )
    return min(most, (memory - states) // (room["token"] * block_size)) if room["token"] else most


def cache_memory(device: str, num_ranks: int = 1) -> int:
    """Return the bytes that the cache of a rank takes by default. On a CPU the ranks share the host's memory."""
    module = accelerator(device)
    if module is not None:
        return int(_SHARE * module.mem_get_info()[0])
    free = free_memory()
    return _HOST_MEMORY if free is None else min(_HOST_MEMORY, free // (2 * num_ranks))
