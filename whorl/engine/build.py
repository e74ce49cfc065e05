"""What an engine is built of: adapters, the block pool, the runners, and the memory beyond the device."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from whorl import __version__
from whorl.device import HOST, arithmetic_of
from whorl.nn import Experts, Linear, Update
from whorl.ops.cpu.library import kernels_digest

from . import sequence_parallel
from .blocks import BlockPool
from .memory import block_size as cache_block_size
from .memory import (
    blocks_that_fit,
    cache_room,
    cache_specs,
    check_cache,
    check_rollback,
    memory_left,
    state_line,
    state_pool,
    token_bytes,
    without_states,
)
from .offload import Offload, Sizes
from .runner import Runner

if TYPE_CHECKING:
    from .llm import LLM

log = logging.getLogger(__name__)
Kept = dict[int, Mapping[str, Update]]  # adapters by slot, until there is a runner


def load_adapters(llm: "LLM") -> Kept:
    """Load the adapters of the settings on this rank; return them for the others."""
    kept: Kept = {}

    def keep(slot: int, updates: Mapping[str, Update]) -> None:
        llm.adapters.low_ranks.load(slot, updates)
        if llm._lead is not None:
            kept[slot] = updates

    for name, path in llm.settings.adapters.items():
        llm.adapters.load(name, path, keep)
    return kept


def make_pool(llm: "LLM", device: str) -> tuple[BlockPool, int]:
    """Create the block pool: by default what fits into memory, up to what `max_num_seqs` full sequences need. Return
    it, and the most tokens of a sequence."""
    model, settings, lead, specs = llm.model, llm.settings, llm._lead, llm.cache_specs
    num_blocks, memory, proposer = settings.num_blocks, settings.memory, type(llm.proposer).__name__
    if llm._draft_head is not None:
        without_states(llm._draft_head, proposer)
        specs = [*specs, *cache_specs(llm._draft_head, settings.kv_cache_dtype)]
    if llm.proposer is not None:
        check_rollback(specs, model, proposer)
    block_size = cache_block_size(specs, device, settings.block_size)
    max_len = _checked_max_len(settings.max_model_len, model.max_length, "the model's context")
    states = state_pool(llm.cache_specs, model, settings, block_size)
    if num_blocks is None:
        share = settings.memory_share
        memory = memory if share is None else memory_left(share, device)
        sizes = {"block_size": block_size, "max_num_seqs": settings.max_num_seqs}
        sizes |= {"num_snapshots": 0 if states is None else states.num_snapshots}
        sizes |= {"most": settings.max_num_seqs * -(-max_len // block_size)}
        if lead is None:
            num_blocks = blocks_that_fit(cache_room(specs, device), memory, **sizes)
        else:
            sizes["adapters"] = llm.adapters.low_ranks.nbytes
            num_blocks = lead.num_blocks(specs, memory, **sizes)
            if share is not None:  # other ranks' devices may have less free memory
                num_blocks = min(num_blocks, lead.num_blocks(specs, None, **sizes))
    check_cache(num_blocks, block_size * token_bytes(specs), device, memory=memory)
    pool = BlockPool(num_blocks, block_size, use_prefix_cache=settings.use_prefix_cache, states=states)
    return pool, _checked_max_len(settings.max_model_len, min(max_len, num_blocks * block_size), "the cache")


def make_runner(llm: "LLM", device: str, kept: Kept) -> Runner:
    """Create the runner of the model, and that of the proposer's draft head. kept: adapters that all ranks load."""
    pool, settings, lead = llm.pool, llm.settings, llm._lead
    options: dict[str, Any] = {
        "num_blocks": pool.num_blocks,
        "block_size": pool.block_size,
        "max_len": llm.max_model_len,
        "device": device,
        "vocab_size": llm.vocab_size,
        "num_snapshots": 0 if pool.states is None else pool.states.num_snapshots,
        "may_draft": llm.proposer is not None,
    }
    num_shards = settings.num_shards(1 if lead is None else lead.group.size)
    sp = sequence_parallel.for_ranks(settings, num_shards, device=device, model=llm.model)
    make = Runner if lead is None else lead.runner
    runner = make(llm.model, settings, **options, sp=sp, low_ranks=llm.adapters.low_ranks)
    if runner.states is not None:
        log.info("%s", state_line(llm.cache_specs, settings.max_num_seqs, options["num_snapshots"]))
    for slot in list(kept):
        runner.load_adapter(slot, kept.pop(slot))  # on the other ranks, too
    if llm._draft_head is not None and llm.proposer is not None:
        make_draft = Runner if lead is None else lead.draft_runner
        draft = make_draft(llm._draft_head, settings, **options, share_tables_with=runner)
        llm.proposer.attach(pool, draft, max_rows=settings.step_tokens)
    return runner


def make_offload(llm: "LLM", device: str) -> Callable[[], None] | None:
    """Let blocks go to host memory and to files. Return what writes the files that are due; None: nothing goes."""
    settings, pool, runner = llm.settings, llm.pool, llm.runner
    folder = settings.kv_offload_dir
    if folder is not None and arithmetic_of(device) is None:
        log.warning("kv_offload_dir: this %s cannot be identified, so blocks of other runs cannot be used", device)
        folder = None
    draft = None if llm._draft_head is None else llm.proposer.drafter.runner  # type: ignore[union-attr]
    num_slots = runner.open_offload(settings.offload_bytes, folder, draft)
    beyond = runner.beyond
    assert beyond is not None
    if not num_slots:
        return None
    disk = 0 if folder is None else settings.kv_offload_disk
    bytes_of = {"slot": beyond.slot_bytes, "snapshot": beyond.snapshot_bytes, "disk": disk}
    pool.beyond = Offload(
        runner,
        [] if pool.states is None else pool.states.moves,
        Sizes(slots=num_slots, ranks=1 if llm._lead is None else llm._lead.group.size, **bytes_of),
        identify=partial(identity, llm, folder is None),
        folder=folder,
        checks_memory=device == HOST,
    )
    log.info("%s", pool.beyond)
    return beyond.close


def _checked_max_len(max_model_len: int | None, limit: int, limited_by: str) -> int:
    """Return `max_model_len`, or the limit if it is None; ValueError if it is above the limit."""
    if max_model_len is not None and not 2 <= max_model_len <= limit:
        raise ValueError(f"max_model_len is {max_model_len}, expected 2 to {limit}, the tokens that {limited_by} holds")
    return limit if max_model_len is None else max_model_len


# ---- whose blocks an engine may use

# Settings that change bits and show neither in weights nor in caches.
_SETTINGS = ("sp_quantize", "sp_min_tokens")


def identity(llm: "LLM", is_private: bool) -> bytes:
    """Return what all cached blocks of an engine depend on: those of two engines with one identity have equal bits. An
    engine whose blocks no other may use has a new one each time.

    It has the model's class, config and weights, the layout of its caches, the settings that change bits, and all that
    decides which kernels run: versions, device and number of threads.
    """
    if is_private:
        return os.urandom(16)
    config = getattr(llm.model, "config", None)
    known: dict[str, Any] = {
        "whorl": __version__,
        "arithmetic": arithmetic_of(llm.runner.device),
        "threads": torch.get_num_threads(),
        "ranks": 1 if llm._lead is None else llm._lead.group.size,  # they add in an order of their own
        "kernels": kernels_digest() if llm.runner.device == HOST else "",
        "model": [type(llm.model).__qualname__, str(llm.model.dtype)],
        "length": _length(llm.model),
        "segments": _segments(llm.model),
        "config": _plain(config),
        "caches": [repr(spec) for spec in llm.cache_specs],
        "block": [llm.pool.block_size, llm.runner.beyond.slot_bytes if llm.runner.beyond is not None else 0],
        "settings": {name: getattr(llm.settings, name) for name in _SETTINGS},
    }
    text = json.dumps(known, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode() + llm.runner.weights_digest()).digest()


def _length(model: Any) -> int | None:
    """Return the tokens that rotations were made for; None where they do not depend on it."""
    rope = getattr(getattr(model, "config", None), "rope", None)
    return None if rope is not None and not rope.depends_on_length else getattr(model, "max_length", None)


def _segments(model: Any) -> list[int]:
    """Return into how many segments layers cut K."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return sorted({module.segments for module in modules if isinstance(module, Linear | Experts)})


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, the same in every process."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return str(value)
