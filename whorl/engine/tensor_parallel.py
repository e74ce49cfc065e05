"""Tensor parallelism: several ranks run one model. Rank 0 is the engine; the others repeat its calls on their shards.

Rank 0 schedules, drafts, accepts and aborts. The other ranks receive only the indices of the next call, in one message
over the host. Every rank runs the whole call on its device, sampling included: all ranks gather the same logits, bit
for bit, and a token is a function of the logits and of its request's seed, so no token has to be exchanged between
devices before the next call can start. Penalties, grammars and drafts are handled by rank 0 alone; it reads the tokens
that they depend on before the next step and sends the resulting tokens with the call.
"""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from whorl.media import MediaItem
from whorl.nn import Model, Ranks
from whorl.nn import weights as formats

from .batch import Call, Insert, field_offsets
from .caches import cache_memory, cache_specs, token_bytes
from .encoder import Job, Work
from .features import as_tensor
from .launch import Rank, RankGroup, RankPlace, start
from .runner import Result, Runner

_STOP, _CALL, _LOGITS, _DROP, _ENCODE = range(5)  # kinds of messages from rank 0
_HEADER = 9  # numbers in a message header: the kind of message, and up to eight arguments
_INSERT = len(Insert._fields)


class Lead:
    """Rank 0's model and the group of ranks that runs it."""

    def __init__(self, group: RankGroup, model: Model, kv_cache_dtype: str = "auto") -> None:
        self.group, self._local_model, self._kv_cache_dtype = group, model, kv_cache_dtype
        self.model: Any = SharedModel(group, model)
        self._end = weakref.finalize(self, _end, group)

    def num_blocks(self, block_size: int, memory: int | None) -> int:
        """Return how many blocks fit on every rank. memory: bytes for the cache on each; None: the default share of its
        own free memory. Ranks may differ in the bytes of a token, because they may have different numbers of heads."""
        local = _cache_room(self.model, self.group.device, self._kv_cache_dtype)
        return min(
            (room["free"] if memory is None else memory) // (room["token"] * block_size)
            for room in [local, *self.group.collect("room")]
        )

    def runner(self, model: Model, **settings: Any) -> "LeadRunner":
        """Create the runners of all ranks and connect the ranks; the arguments are those of `Runner`."""
        self.group.collect("room")  # a rank publishes this when it has loaded its weights
        self.group.put("runner", settings)
        with self.group.together():
            self.group.join()
            runner = LeadRunner(self._local_model, **settings)
        runner.group = self.group
        return runner

    def close(self) -> None:
        self._end()


def load(
    path: Path,
    place: RankPlace,
    *,
    device: str,
    dtype: torch.dtype | None,
    max_length: int | None,
    unpack: bool | None = None,
    quantize: str | None = None,
    kv_cache_dtype: str = "auto",
    progress: bool = True,
) -> Lead:
    """Start the ranks and load every rank's shard, all at the same time. Returns on rank 0 only."""
    from .weights import build, load_model, open_checkpoint, rounded

    formats.check_scheme(quantize, torch.device(device).type)
    ranks = Ranks(rank=0, size=place.size)
    with open_checkpoint(path) as checkpoint:  # raises here, before any rank starts, if the model cannot be sharded
        config = rounded(checkpoint, quantize).config
        meta = build(config, device="meta", dtype=torch.float32, tp=ranks, max_length=max_length)
        cache_specs(meta, kv_cache_dtype)
    options: dict[str, Any] = {"max_length": max_length, "unpack": unpack, "quantize": quantize}
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    settings = {"path": str(path), "options": {"dtype": name, **options}, "kv_cache_dtype": kv_cache_dtype}
    group = start(place, device, f"{__name__}:follow", settings)
    try:
        model = load_model(path, device=device, dtype=dtype, tp=ranks, progress=progress, **options)
    except BaseException:
        group.close(is_broken=True)
        raise
    return Lead(group, model, kv_cache_dtype)


def _end(group: RankGroup) -> None:
    """End the other ranks: ask them to stop, then kill those that have not."""
    group.close(ask_to_end=lambda: _send(group, _STOP))


def _cache_room(model: Any, device: str, kv_cache_dtype: str = "auto") -> dict[str, int]:
    """Return the bytes of a cached token on this rank, and the bytes that are free for the cache."""
    return {"token": token_bytes(cache_specs(model, kv_cache_dtype)), "free": cache_memory(device)}


# ---- rank 0 broadcasts what it does, then does it


class SharedModel:
    """Rank 0's model, whose `logits` all ranks compute together: prompts are scored outside of a call."""

    def __init__(self, group: RankGroup, model: Any) -> None:
        self._group, self._model = group, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: Tensor) -> Tensor:
        with self._group.together():
            _send(self._group, _LOGITS, *hidden.shape)
            distributed.broadcast(hidden.contiguous(), 0)
            return self._model.logits(hidden)  # type: ignore[no-any-return]


class LeadRunner(Runner):
    """Rank 0's runner: it sends every call to the other ranks before it runs it."""

    group: RankGroup

    def run_call(self, call: Call, states: Tensor | None = None) -> Result:
        assert states is None, "a model that takes hidden states is not supported with several ranks"
        with self.group.together():
            arrays, tables = _pack(call)
            axes = np.zeros((0, 0), dtype=np.int64) if call.axes is None else np.ascontiguousarray(call.axes)
            inserts = np.array(call.inserts, dtype=np.int64).reshape(-1, _INSERT)
            arguments = (call.num_keys, call.is_decode, len(axes), len(inserts), len(tables))
            _send(self.group, _CALL, *call.size, *arguments)
            numbers = (array.reshape(-1).view(np.uint8) for array in (axes, inserts, tables))
            distributed.broadcast(torch.from_numpy(np.concatenate([arrays, *numbers])), 0, group=self.group.control)
            return super().run_call(call)

    def encode(self, work: Work) -> None:
        """Encode images on all ranks: every rank has the whole vision tower and the features of every image."""
        with self.group.together():
            if work.dropped:
                _send(self.group, _DROP, len(work.dropped))
                distributed.broadcast(torch.tensor(work.dropped), 0, group=self.group.control)
            for job in work.jobs:
                grid, width = ((0, 0, 0), 0) if job.item is None else (job.item.grid, job.item.patches.shape[1])
                _send(self.group, _ENCODE, job.number, job.layers, *grid, width)
                if job.item is not None:
                    distributed.broadcast(as_tensor(job.item.patches), 0, group=self.group.control)
            super().encode(work)


def _send(group: RankGroup, *header: int) -> None:
    """Broadcast a message header, padded with zeros: the kind of message, then its arguments."""
    distributed.broadcast(torch.tensor([*header, *[0] * (_HEADER - len(header))]), 0, group=group.control)


def _pack(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a call's arrays, padded to a multiple of 8, and its new block tables in one array of int64:
    the lane, the length and the blocks of each."""
    num_bytes = field_offsets(call.size)[1]
    packed = np.zeros(num_bytes + -num_bytes % 8, dtype=np.uint8)
    call.write(_views(packed, call.size), {})
    tables = [number for lane, blocks in call.tables for number in (lane, len(blocks), *blocks)]
    return packed, np.array(tables, dtype=np.int64)


def _unpack(packed: np.ndarray, size: tuple[int, int, int], num_keys: int, is_decode: int, *counts: int) -> Call:
    """Rebuild the call. counts: axes of positions, inserted runs of image features, and numbers in the block tables."""
    num_axes, num_inserts, num_tables = counts
    numbers = packed[len(packed) - 8 * _num_extra(size[0], *counts) :].view(np.int64)
    axes, inserts, table_numbers = np.split(numbers, (num_axes * size[0], len(numbers) - num_tables))
    tables, unread = [], table_numbers.tolist()
    while unread:
        lane, count, *unread = unread
        tables.append((lane, unread[:count]))
        unread = unread[count:]
    call = Call(bool(is_decode), _views(packed, size), num_keys, tables)  # type: ignore[arg-type]
    call.axes = axes.reshape(num_axes, size[0]) if num_axes else None
    call.inserts = [Insert(*row) for row in inserts.reshape(num_inserts, _INSERT).tolist()]
    return call


def _num_extra(num_tokens: int, num_axes: int, num_inserts: int, num_tables: int) -> int:
    """Return how many numbers of eight bytes follow a call's arrays."""
    return num_axes * num_tokens + num_inserts * _INSERT + num_tables


def _views(packed: np.ndarray, size: tuple[int, int, int]) -> dict[str, np.ndarray]:
    return {
        name: packed[start : start + int(kind[1]) * count].view(kind)
        for name, kind, start, count in field_offsets(size)[0]
    }


# ---- the other ranks repeat what rank 0 does


def follow(rank: Rank) -> None:
    """Run a rank other than 0 from start to end: load its shard, connect, then repeat rank 0's calls."""
    from .weights import load_model

    load_settings = rank.get("settings")
    options = {"tp": Ranks(rank=rank.rank, size=rank.size), "progress": False, **load_settings["options"]}
    model = load_model(Path(load_settings["path"]), device=rank.device, **options)
    rank.publish("room", _cache_room(model, rank.device, load_settings["kv_cache_dtype"]))
    settings = rank.get("runner")
    rank.join()
    runner = FollowRunner(model, **settings)
    runner.follow(rank)


class FollowRunner(Runner):
    """The runner of a rank other than 0."""

    @torch.inference_mode()
    def follow(self, rank: Rank) -> None:
        """Receive and run calls until rank 0 sends the end."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        while True:
            distributed.broadcast(header, 0, group=rank.control)
            kind, *numbers = header.tolist()
            if kind == _STOP:
                return
            if kind == _CALL:
                self.run_call(self._receive(rank, *numbers))
            elif kind == _LOGITS:
                self._head(*numbers[:2])
            elif kind == _DROP:
                dropped = torch.zeros(numbers[0], dtype=torch.int64)
                distributed.broadcast(dropped, 0, group=rank.control)
                self.encode(Work(dropped.tolist(), [], 0))
            else:
                self.encode(Work([], [self._job(rank, *numbers[:6])], 0))

    def _job(self, rank: Rank, number: int, layers: int, frames: int, rows: int, columns: int, width: int) -> Job:
        """Return the job of an _ENCODE message; receive the patches, `width` numbers each, if the image is new."""
        if not width:
            return Job(number=number, layers=layers)
        patches = torch.empty(frames * rows * columns, width)
        distributed.broadcast(patches, 0, group=rank.control)
        # The digest, which identifies the image, is needed on rank 0 only.
        item = MediaItem(kind="image", patches=patches.numpy(), grid=(frames, rows, columns), digest=b"")
        return Job(number=number, layers=layers, item=item)

    def _receive(self, rank: Rank, num_tokens: int, entries: int, samples: int, *arguments: int) -> Call:
        """Receive the call that a _CALL message announces. arguments: as `_unpack` takes them."""
        size = num_tokens, entries, samples
        num_bytes = field_offsets(size)[1]
        packed = torch.empty(num_bytes + -num_bytes % 8 + 8 * _num_extra(num_tokens, *arguments[2:]), dtype=torch.uint8)
        distributed.broadcast(packed, 0, group=rank.control)
        return _unpack(packed.numpy(), size, *arguments)

    def _head(self, num_tokens: int, width: int) -> None:
        """Take part in `SharedModel.logits`: receive hidden states [num_tokens, width], compute this rank's share."""
        hidden = torch.empty(num_tokens, width, dtype=self.model.dtype, device=self.device)
        distributed.broadcast(hidden, 0)
        self.model.logits(hidden)
