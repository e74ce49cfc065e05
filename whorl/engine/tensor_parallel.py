"""Several ranks run one model. Rank 0 is the engine; the others repeat its calls on their share of the weights.

Rank 0 decides: it schedules, drafts, accepts and aborts, and what it decides reaches the others as the indices of the
next call, one message over the host. Every rank runs the whole call on its device, sampling included: all ranks gather
the same logits, bit for bit, and a token is a function of these and of its request's seed, so that no token need travel
between devices before the next call can start. Penalties, grammars and drafts are rank 0's alone; it reads the tokens
they give before it goes on, and sends them in the call.
"""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from whorl.media import MediaItem
from whorl.nn import Model, Ranks

from .batch import Call, Insert, layout
from .caches import cache_memory, cache_specs, token_bytes
from .encoder import Job, Work
from .features import as_tensor
from .launch import Place, Rank, RankGroup, start
from .runner import Result, Runner

_STOP, _CALL, _LOGITS, _DROP, _ENCODE = range(5)
_HEADER = 9  # numbers: the kind of message, and up to eight about it
_INSERT = len(Insert._fields)


class Lead:
    """Rank 0's model and the crew that runs it with it."""

    def __init__(self, crew: RankGroup, model: Model, kv_cache_dtype: str = "auto") -> None:
        self.crew, self._own, self._kv_cache_dtype = crew, model, kv_cache_dtype
        self.model: Any = SharedModel(crew, model)
        self._end = weakref.finalize(self, _end, crew)

    def num_blocks(self, block_size: int, memory: int | None) -> int:
        """How many fit on every rank; ranks may hold different numbers of heads. memory: bytes of each."""
        own = _room(self.model, self.crew.device, self._kv_cache_dtype)
        return min(
            (room["free"] if memory is None else memory) // (room["token"] * block_size)
            for room in [own, *self.crew.collect("room")]
        )

    def runner(self, model: Model, **settings: Any) -> "LeadRunner":
        """As `Runner` is called, by the engine. Every rank makes its caches, and they connect."""
        self.crew.collect("room")  # whoever has said so has its weights
        self.crew.put("runner", settings)
        with self.crew.together():
            self.crew.join()
            runner = LeadRunner(self._own, **settings)
        runner.crew = self.crew
        return runner

    def close(self) -> None:
        self._end()


def load(
    path: Path,
    place: Place,
    *,
    device: str,
    dtype: torch.dtype | None,
    max_length: int | None,
    unpack: bool | None = None,
    quantize: str | None = None,
    kv_cache_dtype: str = "auto",
    progress: bool = True,
) -> Lead:
    """Start the ranks and load every one's share, all at the same time. Returns on rank 0 only."""
    from .weights import build, load_model, open_checkpoint, rounded

    ranks = Ranks(rank=0, size=place.size)
    with open_checkpoint(path) as checkpoint:  # what cannot be shared is refused before anything starts
        config = rounded(checkpoint, quantize).config
        meta = build(config, device="meta", dtype=torch.float32, tp=ranks, max_length=max_length)
        cache_specs(meta, kv_cache_dtype)
    options: dict[str, Any] = {"max_length": max_length, "unpack": unpack, "quantize": quantize}
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    settings = {"path": str(path), "options": {"dtype": name, **options}, "kv_cache_dtype": kv_cache_dtype}
    crew = start(place, device, f"{__name__}:follow", settings)
    try:
        model = load_model(path, device=device, dtype=dtype, tp=ranks, progress=progress, **options)
    except BaseException:
        crew.close(is_broken=True)
        raise
    return Lead(crew, model, kv_cache_dtype)


def _end(crew: RankGroup) -> None:
    crew.close(goodbye=lambda: _send(crew, _STOP))


def _room(model: Any, device: str, kv_cache_dtype: str = "auto") -> dict[str, int]:
    return {"token": token_bytes(cache_specs(model, kv_cache_dtype)), "free": cache_memory(device)}


# ---- rank 0 says what it does, and does it


class SharedModel:
    """Rank 0's model for what is computed outside of a call: the logits that score a prompt."""

    def __init__(self, crew: RankGroup, model: Any) -> None:
        self._crew, self._model = crew, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: Tensor) -> Tensor:
        with self._crew.together():
            _send(self._crew, _LOGITS, *hidden.shape)
            distributed.broadcast(hidden.contiguous(), 0)
            return self._model.logits(hidden)  # type: ignore[no-any-return]


class LeadRunner(Runner):
    crew: RankGroup

    def run_call(self, call: Call, states: Tensor | None = None) -> Result:
        assert states is None, "ranks share no model that takes the hidden states of another"
        with self.crew.together():
            arrays, tables = _pack(call)
            axes = np.zeros((0, 0), dtype=np.int64) if call.axes is None else np.ascontiguousarray(call.axes)
            inserts = np.array(call.inserts, dtype=np.int64).reshape(-1, _INSERT)
            more = (call.num_keys, call.is_decode, len(axes), len(inserts), len(tables))
            _send(self.crew, _CALL, *call.size, *more)
            numbers = (each.reshape(-1).view(np.uint8) for each in (axes, inserts, tables))
            distributed.broadcast(torch.from_numpy(np.concatenate([arrays, *numbers])), 0, group=self.crew.control)
            return super().run_call(call)

    def encode(self, work: Work) -> None:
        """Every rank has the whole tower, and the features of every picture."""
        with self.crew.together():
            if work.dropped:
                _send(self.crew, _DROP, len(work.dropped))
                distributed.broadcast(torch.tensor(work.dropped), 0, group=self.crew.control)
            for job in work.jobs:
                grid, width = ((0, 0, 0), 0) if job.item is None else (job.item.grid, job.item.patches.shape[1])
                _send(self.crew, _ENCODE, job.number, job.layers, *grid, width)
                if job.item is not None:
                    distributed.broadcast(as_tensor(job.item.patches), 0, group=self.crew.control)
            super().encode(work)


def _send(crew: RankGroup, *header: int) -> None:
    distributed.broadcast(torch.tensor([*header, *[0] * (_HEADER - len(header))]), 0, group=crew.control)


def _pack(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a call's arrays, and its new block tables: lane, length and blocks of each."""
    num_bytes = layout(call.size)[1]
    packed = np.zeros(num_bytes + -num_bytes % 8, dtype=np.uint8)
    call.write(_views(packed, call.size), {})
    tables = [number for lane, blocks in call.tables for number in (lane, len(blocks), *blocks)]
    return packed, np.array(tables, dtype=np.int64)


def _unpack(packed: np.ndarray, size: tuple[int, int, int], num_keys: int, is_decode: int, *counts: int) -> Call:
    """counts: axes of positions, runs of rows that are given features, and numbers of tables."""
    num_axes, num_inserts, num_tables = counts
    numbers = packed[len(packed) - 8 * _more(size[0], *counts) :].view(np.int64)
    axes, inserts, left = np.split(numbers, (num_axes * size[0], len(numbers) - num_tables))
    tables, rest = [], left.tolist()
    while rest:
        lane, count, *rest = rest
        tables.append((lane, rest[:count]))
        rest = rest[count:]
    call = Call(bool(is_decode), _views(packed, size), num_keys, tables)  # type: ignore[arg-type]
    call.axes = axes.reshape(num_axes, size[0]) if num_axes else None
    call.inserts = [Insert(*row) for row in inserts.reshape(num_inserts, _INSERT).tolist()]
    return call


def _more(rows: int, num_axes: int, num_inserts: int, num_tables: int) -> int:
    """Numbers of eight bytes behind a call's arrays."""
    return num_axes * rows + num_inserts * _INSERT + num_tables


def _views(packed: np.ndarray, size: tuple[int, int, int]) -> dict[str, np.ndarray]:
    return {
        name: packed[first : first + int(kind[1]) * count].view(kind) for name, kind, first, count in layout(size)[0]
    }


# ---- the others do what they are told


def follow(member: Rank) -> None:
    """A rank's whole life."""
    from .weights import load_model

    asked = member.get("settings")
    ranks = Ranks(rank=member.rank, size=member.size)
    model = load_model(Path(asked["path"]), device=member.device, tp=ranks, progress=False, **asked["options"])
    member.say("room", _room(model, member.device, asked["kv_cache_dtype"]))
    settings = member.get("runner")
    member.join()
    runner = FollowRunner(model, **settings)
    runner.follow(member)


class FollowRunner(Runner):
    @torch.inference_mode()
    def follow(self, member: Rank) -> None:
        header = torch.zeros(_HEADER, dtype=torch.int64)
        while True:
            distributed.broadcast(header, 0, group=member.control)
            kind, *numbers = header.tolist()
            if kind == _STOP:
                return
            if kind == _CALL:
                self.run_call(self._receive(member, *numbers))
            elif kind == _LOGITS:
                self._head(*numbers[:2])
            elif kind == _DROP:
                dropped = torch.zeros(numbers[0], dtype=torch.int64)
                distributed.broadcast(dropped, 0, group=member.control)
                self.encode(Work(dropped.tolist(), [], 0))
            else:
                self.encode(Work([], [self._job(member, *numbers[:6])], 0))

    def _job(self, member: Rank, number: int, layers: int, frames: int, rows: int, columns: int, width: int) -> Job:
        if not width:
            return Job(number=number, layers=layers)
        patches = torch.empty(frames * rows * columns, width)
        distributed.broadcast(patches, 0, group=member.control)
        # Which picture it is concerns rank 0 alone.
        item = MediaItem(kind="image", patches=patches.numpy(), grid=(frames, rows, columns), digest=b"")
        return Job(number=number, layers=layers, item=item)

    def _receive(self, member: Rank, rows: int, entries: int, samples: int, *more: int) -> Call:
        size = rows, entries, samples
        num_bytes = layout(size)[1]
        packed = torch.empty(num_bytes + -num_bytes % 8 + 8 * _more(rows, *more[2:]), dtype=torch.uint8)
        distributed.broadcast(packed, 0, group=member.control)
        return _unpack(packed.numpy(), size, *more)

    def _head(self, rows: int, width: int) -> None:
        hidden = torch.empty(rows, width, dtype=self.model.dtype, device=self.device)
        distributed.broadcast(hidden, 0)
        self.model.logits(hidden)
