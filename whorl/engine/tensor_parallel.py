"""Tensor parallelism: several ranks run one model. Rank 0 is the engine; the others repeat its calls on their shards.

Rank 0 schedules, drafts, accepts and aborts. The other ranks receive only the indices of the next call, in one message
over the host. Every rank runs the whole call on its device, sampling included: all ranks gather the same logits, bit
for bit, and a token is a function of the logits and of its request's seed, so no token has to be exchanged between
devices before the next call can start. Penalties, grammars and drafts are handled by rank 0 alone; it reads the tokens
that they depend on before the next step and sends the resulting tokens with the call. A draft head that computes from
hidden states is sharded like the model; with its calls rank 0 broadcasts these states from device to device.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from whorl.media import MediaItem
from whorl.nn import Experts, LowRanks, Model, Ranks, Update
from whorl.nn import weights as formats

from .call import Call
from .encoder import Job, Work
from .features import as_tensor
from .heap import keep_objects
from .launch import Rank, RankGroup, RankPlace, start
from .memory import Specs, blocks_that_fit, cache_room, cache_specs
from .rank_messages import receive, send, send_call, unpacked_call, unpacked_moves
from .rank_updates import FollowUpdates, LeadUpdate
from .runner import Result, Runner
from .settings import EngineSettings
from .weights.update import Places

if TYPE_CHECKING:
    from .speculate import Proposer


class Lead:
    """Rank 0's model and the group of ranks that runs it."""

    def __init__(self, group: RankGroup, model: Model) -> None:
        self.group, self.model = group, model
        self._end = weakref.finalize(self, _end, group)

    def num_blocks(self, specs: Specs, memory: int | None, *, adapters: int = 0, **sizes: int) -> int:
        """Return how many blocks fit on every rank. specs: of all caches on this rank; others may differ in the bytes
        of a token, because they may have different numbers of heads. memory: bytes for the cache on each; None: the
        default share of its own free memory. adapters: bytes of adapters here, which the others have yet to load.
        sizes: as for `blocks_that_fit`."""
        local = cache_room(specs, self.group.device, self.group.size)
        others = [{**room, "free": max(0, room["free"] - adapters)} for room in self.group.collect("room")]
        return min(blocks_that_fit(room, memory, **sizes) for room in [local, *others])

    def runner(
        self, model: Model, settings: EngineSettings, *, low_ranks: LowRanks | None = None, **options: Any
    ) -> "LeadRunner":
        """Create the runners of all ranks and connect the ranks; the arguments are those of `Runner`."""
        self.group.collect("room")  # a rank publishes this when it has loaded its weights
        self.group.put("runner", options)
        with self.group.together():
            self.group.join()
            return LeadRunner(self.model, settings, group=self.group, low_ranks=low_ranks, **options)

    def draft_runner(self, draft_head: Model, settings: EngineSettings, **options: Any) -> "LeadRunner":
        """Create rank 0's runner of the draft head; the other ranks have created theirs with that of the model."""
        return LeadRunner(draft_head, settings, group=self.group, **options)

    def close(self) -> None:
        self._end()


def shards(settings: EngineSettings, rank: int, size: int) -> Ranks:
    """Return which shards a rank has, and which experts."""
    experts = Ranks(rank=rank, size=size) if settings.divides_experts else None
    num_shards = settings.num_shards(size)
    own = rank if num_shards > 1 else 0
    return Ranks(rank=own, size=num_shards, experts=experts, segments=settings.tp_segments or 0)


def load(
    path: Path, place: RankPlace, settings: EngineSettings, *, device: str, proposer: "Proposer | None" = None
) -> Lead:
    """Start the ranks and load every rank's shard, all at the same time. Returns on rank 0 only.

    proposer: if it has a draft head, the other ranks load that, too; on rank 0 `Proposer.load` does.
    """
    from .weights import build, load_model, open_checkpoint, rounded

    formats.check_scheme(settings.quantize, torch.device(device).type)
    ranks = shards(settings, 0, place.size)
    # Raises here, before any rank starts, if the model cannot be sharded.
    with open_checkpoint(path, backend=settings.backend) as checkpoint:
        config = rounded(checkpoint, settings.quantize).config
        meta = build(config, device="meta", dtype=torch.float32, tp=ranks, max_length=settings.max_model_len)
        cache_specs(meta, settings.kv_cache_dtype)
        if settings.divides_experts:
            _check_divided(meta)
    draft_path = None
    if proposer is not None and proposer.wants_hidden:
        proposer.check(meta, None)
        draft_path = str(proposer.shared_path(path))
    message = {"path": str(path), "draft_path": draft_path, "settings": asdict(settings)}
    group = start(place, device, f"{__name__}:follow", message)
    try:
        model = load_model(path, settings, device=device, tp=ranks, reserve=settings.memory or 0)
    except BaseException:
        group.close(is_broken=True)
        raise
    return Lead(group, model)


def _check_divided(model: Any) -> None:
    """Raise ValueError if the model has no experts that ranks divide, or some whose bits would be others."""
    divided = [m for m in model.modules() if isinstance(m, Experts) and m.ranks.experts is not None]
    if not divided:
        raise ValueError(f"ep: {type(model).__name__} has no experts that ranks could divide; use tp")
    if any(module.gate_up_proj.format.multiplies_codes for module in divided):
        raise ValueError("ep: experts that quantize their input have other bits when they are divided; use tp")


def _end(group: RankGroup) -> None:
    """End the other ranks: ask them to stop, then kill those that have not."""
    group.close(ask_to_end=lambda: send(group, "stop"))


def _cache_room(
    model: Any, device: str, num_ranks: int, kv_cache_dtype: str = "auto", draft_head: Model | None = None
) -> dict[str, int]:
    """Return this rank's `cache_room`."""
    models = (model,) if draft_head is None else (model, draft_head)
    return cache_room([spec for each in models for spec in cache_specs(each, kv_cache_dtype)], device, num_ranks)


# ---- rank 0 broadcasts what it does, then does it


class LeadRunner(Runner):
    """Rank 0's runner: it sends every call to the other ranks before it runs it."""

    def __init__(self, *arguments: Any, group: RankGroup, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.group = group

    def run_call(self, call: Call, states: Tensor | None = None) -> Result:
        with self.group.together():
            send_call(self.group, "call" if self._states is None else "draft", call)
            if self._states is not None:
                if states is None:  # a call that only warms up or is timed
                    states = self._states.new_zeros(call.size[0], self._states.shape[1])
                distributed.broadcast(states, 0)
            return super().run_call(call, states)

    def put(self, lanes: Sequence[int], token_ids: Tensor) -> None:
        assert self._states is not None, "tokens are put into lanes of a draft head only"
        with self.group.together():
            send(self.group, "put", list(lanes))
            distributed.broadcast(token_ids, 0)
            super().put(lanes, token_ids)

    def logits(self, hidden: Tensor, slots: Sequence[int]) -> Tensor:
        with self.group.together():
            send(self.group, "logits", *hidden.shape, list(slots))
            distributed.broadcast(hidden.contiguous(), 0)
            return super().logits(hidden, slots)

    def load_adapter(self, slot: int, updates: Mapping[str, Update]) -> None:
        """Send an adapter to all ranks, each of which keeps its shard."""
        with self.group.together():
            tensors = {name: [x for x in (u.a, u.b, u.bias) if x is not None] for name, u in updates.items()}
            shapes = [
                [name, updates[name].scale, [list(x.shape) for x in of_name]] for name, of_name in tensors.items()
            ]
            send(self.group, "adapter", slot, shapes)
            for of_name in tensors.values():
                for x in of_name:
                    distributed.broadcast(x.float().contiguous(), 0, group=self.group.control)
            super().load_adapter(slot, updates)

    def open_offload(self, num_bytes: int, folder: str | None, draft: Runner | None = None, rank: int = 0) -> int:
        """As `Runner.open_offload`, on all ranks; return the fewest slots of any rank."""
        with self.group.together():
            send(self.group, "offload", num_bytes, folder)
            return _least([super().open_offload(num_bytes, folder, draft, rank)], self.group)[0]

    def weights_digest(self) -> bytes:
        with self.group.together():
            send(self.group, "digest")
            return _gathered(super().weights_digest(), self.group)

    def results(self, tickets: list[int], *, wait: bool = False, is_shared: bool = False) -> dict[int, bool]:
        """As `Runner.results`. is_shared: a result is good if it is on all ranks; the others wait for theirs."""
        results = super().results(tickets, wait=wait)
        if not is_shared or not results:
            return results
        with self.group.together():
            send(self.group, "results", list(results))
            return dict(zip(results, map(bool, _least(results.values(), self.group)), strict=True))

    def move(self, moves: Sequence[Any]) -> None:
        with self.group.together():
            send(self.group, "moves", list(moves))
            super().move(moves)

    def begin_update(self, places: Places, *, is_partial: bool) -> LeadUpdate:
        return LeadUpdate(places, self.group, self.device, is_partial=is_partial)

    def sleep(self, *, is_saved: bool) -> None:
        with self.group.together():
            send(self.group, "sleep", is_saved)
            super().sleep(is_saved=is_saved)

    def wake(self, tag: str) -> None:
        with self.group.together():
            send(self.group, "wake", tag)
            super().wake(tag)

    def encode(self, work: Work) -> None:
        """Encode images on all ranks: every rank has the whole vision tower and the features of every image."""
        with self.group.together():
            images = [None if job.item is None else (job.item.grid, job.item.patches.shape[1]) for job in work.jobs]
            jobs = [(job.number, job.layers, job.slot, image) for job, image in zip(work.jobs, images, strict=True)]
            send(self.group, "encode", work.dropped, jobs)
            for job in work.jobs:
                if job.item is not None:
                    distributed.broadcast(as_tensor(job.item.patches), 0, group=self.group.control)
            super().encode(work)


def _least(numbers: Iterable[int], rank: Rank) -> list[int]:
    """Return the least of all ranks' numbers; all ranks call this after a message."""
    least = torch.tensor([*map(int, numbers)])
    distributed.all_reduce(least, distributed.ReduceOp.MIN, group=rank.control)
    return least.tolist()


def _gathered(digest: bytes, rank: Rank) -> bytes:
    """Return the digests of all ranks, one after the other; all ranks call this after a message."""
    digests = [torch.empty(len(digest), dtype=torch.uint8) for _ in range(rank.size)]
    distributed.all_gather(digests, torch.frombuffer(bytearray(digest), dtype=torch.uint8), group=rank.control)
    return b"".join(each.numpy().tobytes() for each in digests)


# ---- the other ranks repeat what rank 0 does


def follow(rank: Rank) -> None:
    """Run a rank other than 0 from start to end: load its shard, connect, then repeat rank 0's calls."""
    from .weights import load_model, load_prediction

    message = rank.get("settings")
    settings = EngineSettings(**message["settings"])
    place = shards(settings, rank.rank, rank.size)
    options: dict[str, Any] = {"device": rank.device, "reserve": settings.memory or 0, "progress": False}
    model = load_model(Path(message["path"]), settings, tp=place, **options)
    draft_head = None
    if message["draft_path"] is not None:
        draft_head = load_prediction(Path(message["draft_path"]), model, progress=False)
    rank.publish("room", _cache_room(model, rank.device, rank.size, settings.kv_cache_dtype, draft_head))
    options = rank.get("runner")
    rank.join()
    runner = FollowRunner(model, settings, **options, low_ranks=LowRanks(model, settings.most_loras))
    if draft_head is not None:
        runner.draft = Runner(draft_head, settings, **options | {"sp": None}, share_tables_with=runner)
    keep_objects()  # a rank that collects garbage lets all others wait
    runner.follow(rank)
    if runner.beyond is not None:
        runner.beyond.close()


class FollowRunner(Runner):
    """The runner of a rank other than 0. draft: the runner of the draft head."""

    draft: Runner | None = None

    @torch.inference_mode()
    def follow(self, rank: Rank) -> None:
        """Receive and run calls until rank 0 sends the end."""
        updates = FollowUpdates(self.model, rank)
        while True:
            name, arguments, packed = receive(rank)
            if name == "stop":
                return
            if name == "call":
                self.run_call(unpacked_call(arguments, packed))
            elif name == "draft":
                self._draft_call(unpacked_call(arguments, packed))
            elif name == "put":
                self._put(*arguments)
            elif name == "logits":
                self._head(*arguments)
            elif name == "adapter":
                self._adapter(rank, *arguments)
            elif name == "moves":
                self.move(unpacked_moves(arguments[0]))
            elif name in ("offload", "digest", "results"):
                getattr(self, f"_{name}")(rank, *arguments)
            elif name == "begin_update":
                updates.begin(*arguments)
            elif name == "update":
                updates.receive(*arguments)
            elif name == "finish_update":
                updates.finish()
            elif name == "sleep":
                updates.forget_places()
                self.sleep(is_saved=arguments[0])
            elif name == "wake":
                self.wake(*arguments)
            else:
                dropped, jobs = arguments
                self.encode(Work(dropped, [self._job(rank, *job) for job in jobs], 0))

    def _offload(self, rank: Rank, num_bytes: int, folder: str | None) -> None:
        _least([self.open_offload(num_bytes, folder, self.draft, rank.rank)], rank)

    def _digest(self, rank: Rank) -> None:
        _gathered(self.weights_digest(), rank)

    def _results(self, rank: Rank, tickets: list[int]) -> None:
        """Wait for files that rank 0 has read, and say which this rank has as well."""
        _least(self.results(tickets, wait=True).values(), rank)

    def _job(self, rank: Rank, number: int, layers: int, slot: int, image: tuple[list[int], int] | None) -> Job:
        """Return the job of a message. image: if it is new, its grid and the numbers of a patch; the patches follow."""
        if image is None:
            return Job(number=number, layers=layers, slot=slot)
        (frames, rows, columns), width = image
        patches = torch.empty(frames * rows * columns, width)
        distributed.broadcast(patches, 0, group=rank.control)
        # The digest, which identifies the image, is needed on rank 0 only.
        item = MediaItem(kind="image", patches=patches.numpy(), grid=(frames, rows, columns), digest=b"")
        return Job(number=number, layers=layers, slot=slot, item=item)

    def _draft_call(self, call: Call) -> None:
        """Receive the hidden states of a call of the draft head, and run it."""
        draft = self.draft
        assert draft is not None
        assert draft._states is not None
        states = draft._states.new_empty(call.size[0], draft._states.shape[1])
        distributed.broadcast(states, 0)
        draft.run_call(call, states)

    def _put(self, lanes: list[int]) -> None:
        """Receive the last tokens of the draft head's lanes."""
        assert self.draft is not None
        token_ids = torch.zeros(len(lanes), dtype=torch.int64, device=self.device)
        distributed.broadcast(token_ids, 0)
        self.draft.put(lanes, token_ids)

    def _head(self, num_tokens: int, width: int, slots: list[int]) -> None:
        """Take part in `LeadRunner.logits`: receive hidden states [num_tokens, width], compute this rank's share."""
        hidden = torch.empty(num_tokens, width, dtype=self.model.dtype, device=self.device)
        distributed.broadcast(hidden, 0)
        self.logits(hidden, slots)

    def _adapter(self, rank: Rank, slot: int, shapes: list[tuple[str, float, list[list[int]]]]) -> None:
        """Receive an adapter and write this rank's shard of it to a slot."""
        updates = {}
        for name, scale, of_name in shapes:
            tensors = [torch.empty(shape) for shape in of_name]
            for x in tensors:
                distributed.broadcast(x, 0, group=rank.control)
            updates[name] = Update(a=tensors[0], b=tensors[1], scale=scale, bias=[*tensors, None][2])
        self.load_adapter(slot, updates)
