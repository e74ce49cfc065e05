"""The runner executes a batch: it owns the KV caches, runs the forward calls and samples from their logits.

State lives on the device, by lane (lanes.py). The host sends a call's indices in one copy and does not wait, so it may
prepare step n + 1 while step n runs; tokens that the host has not read are taken from the lane. Calls are replayed as
graphs if the device can record them (graphs.py).
"""

import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from whorl import ops
from whorl.device import has_one_arithmetic, lasting, synchronize
from whorl.nn import Inserted, LowRanks, Model, States, StateSpec, Step, Update
from whorl.ops._varied import varied

from .batch import Batch
from .call import Call, PlacedChunk, Sample, Score
from .dummy_calls import DummyCalls
from .encoder import Work
from .features import Features
from .graph_sizes import DECODING
from .graphs import Graphs, Outputs
from .host_blocks import Carry, FileMove, HostBlocks, weights_digest
from .inputs import Inputs, Padded
from .lanes import Lanes
from .memory import by_sequence, cache_specs
from .routes import Routes
from .sampling_params import FILTERS
from .scheduler import Chunk
from .sequence_parallel import PromptForward, SPSettings
from .settings import EngineSettings
from .sleep import Sleeper
from .states import Move
from .weights.update import Places
from .weights.update import Update as WeightUpdate


@dataclass(slots=True, eq=False)
class Result:
    """The outputs of a call, on the device: logits [S, V] and token ids [S] of its samples.

    hidden: hidden states [T, C] of all tokens. scored: those of `scores`, in their order; if it has none, not used.
    placed: where each chunk begins in the call. The next replay of a graph overwrites the outputs of a recorded call.
    """

    samples: list[Sample]
    logits: Tensor
    token_ids: Tensor
    scores: list[Score]
    scored: Tensor
    hidden: Tensor | None = None
    placed: list[PlacedChunk] = field(default_factory=list)


class Runner:
    """One model, its caches and the lanes of up to `max_num_seqs` sequences on one device.

    max_len: the most tokens of a sequence. vocab_size: only ids below it are sampled; None: the model's. sp: the fields
    of `sequence_parallel.SPSettings`, with several ranks; None: prompts run without sequence parallelism.
    num_snapshots: room for so many snapshots of states, if the model's layers keep a state for each sequence.
    low_ranks: the slots of adapters; None: no sequence has one.
    share_tables_with: a runner of the same sizes whose block tables this runner uses, because its caches lie in the
    same blocks. may_draft: whether calls may verify drafts.
    """

    def __init__(
        self,
        model: Model,
        settings: EngineSettings,
        *,
        num_blocks: int,
        block_size: int,
        max_len: int,
        device: str,
        vocab_size: int | None = None,
        num_snapshots: int = 0,
        sp: dict[str, Any] | None = None,
        low_ranks: LowRanks | None = None,
        share_tables_with: "Runner | None" = None,
        may_draft: bool = True,
    ) -> None:
        self.model, self.block_size, self.max_len, self.device = model, block_size, max_len, device
        self.may_draft = may_draft
        self.low_ranks, self._num_blocks = low_ranks, num_blocks
        self.beyond: HostBlocks | None = None  # see `open_offload`
        self.vocab_size = vocab_size or model.vocab_size
        specs, max_num_seqs = cache_specs(model, settings.kv_cache_dtype), settings.max_num_seqs
        states = by_sequence(specs)
        self.states = States(states, max_num_seqs + 1, num_snapshots, device) if states else None
        lanes_of = iter(() if self.states is None else self.states.caches)
        self.caches = [
            next(lanes_of) if isinstance(spec, StateSpec) else spec.empty(num_blocks, block_size, device)
            for spec in specs
        ]
        other_lanes = None if share_tables_with is None else share_tables_with.lanes
        self.lanes: Lanes = Lanes(max_num_seqs, -(-max_len // block_size), device, other_lanes)
        spare = self.lanes.spare
        padding = {"lanes": spare, "entry_lanes": spare, "sample_lanes": spare, "slots": -1}
        padding |= {"table_at": spare * self.lanes.width, "top_p": 1}
        self._inputs = Inputs(max(settings.step_tokens, DECODING[-1]), device, padding)
        self._dummies = DummyCalls(padding, self.vocab_size)
        # The fixed memory where graphs read the target model's hidden states.
        channels = getattr(model, "state_size", 0)
        self._states = torch.zeros(DECODING[-1], channels, dtype=model.dtype, device=device) if channels else None
        self._sleeper: Sleeper | None = None
        tower = getattr(model, "tower", None)
        self.features = None if tower is None else Features(tower, device, low_ranks)
        self.prompts = None if sp is None else PromptForward(model, device, SPSettings(**sp))
        self.graphs = Graphs(
            self._inputs,
            self._dummies,
            device,
            use_graphs=False if settings.divides_experts else settings.use_graphs,
            states=self._states,
            block_size=block_size,
            max_len=max_len,
            max_prompt_tokens=settings.prompt_graphs,
            has_prompts=self._is_plain,
        )
        has_routes = settings.routed_experts and share_tables_with is None  # not of what drafts
        self.routes = Routes(model, num_blocks * block_size, device) if has_routes else None

    def begin_update(self, places: Places, *, is_partial: bool) -> WeightUpdate:
        """Begin an update of the model's weights."""
        return WeightUpdate(places, is_partial=is_partial)

    def sleep(self, *, is_saved: bool) -> None:
        """Free the memory of weights and caches. is_saved: the host keeps the weights."""
        self._sleeper = Sleeper(cast(torch.nn.Module, self.model), self.caches, self.device)
        self._sleeper.free_cache()
        self._sleeper.free_weights(is_saved=is_saved)

    def wake(self, tag: str) -> None:
        """Take memory again for "weights" or "kv_cache". It is elsewhere now, so graphs are recorded again."""
        assert self._sleeper is not None, "only what sleeps is woken"
        self._sleeper.take(tag)
        self.graphs.clear()

    def encode(self, work: Work) -> None:
        """Run the vision tower's part of a step, before `run`."""
        assert self.features is not None, "images reach only a model with a vision tower"
        self.features.drop(work.dropped)
        self.features.run(work.jobs)

    @torch.inference_mode()
    def run(self, batch: Batch, states: Mapping[Chunk, Tensor] | None = None) -> list[Result]:
        """Run the calls of a batch. states: the target's hidden states [T, C] by chunk, if the model takes them."""
        calls = batch.calls(self.block_size, self.lanes.width, is_joined=self._joins(batch))
        if states is None:
            return [self.run_call(call) for call in calls]
        return [self.run_call(call, torch.cat([states[placed.chunk] for placed in call.placed])) for call in calls]

    @property
    def _is_plain(self) -> bool:
        """Whether calls need neither the hidden states of another model nor sequence parallelism."""
        return self._states is None and self.prompts is None

    def _joins(self, batch: Batch) -> bool:
        """Return whether prompts and decoding sequences run in one call, which reads the weights once for both.

        The bits are those of two calls, except on Ascend.
        """
        has_room = batch.num_tokens <= self._inputs.max_tokens
        return self._is_plain and not batch.has_images and has_room and has_one_arithmetic(self.device)

    def put(self, lanes: Sequence[int], token_ids: Tensor) -> None:
        """Set the last token of each lane to token_ids [N], for tokens that were sampled outside of this runner."""
        at = lasting(torch.tensor(lanes), self.device).to(self.device, non_blocking=True)
        self.lanes.keep(at, token_ids)

    @torch.inference_mode()
    def run_call(self, call: Call, states: Tensor | None = None) -> Result:
        """Run one call, as a graph if one fits. states: as for `run`, of all tokens of the call."""
        for lane, blocks, slot in call.tables:
            self.lanes.admit(lane, blocks, slot)
        self._do(call.moves)
        call.is_adapted = call.is_adapted and self.low_ranks is not None
        graph = self.graphs.find(call, self._compute)
        if graph is None:
            self._inputs.send(call, Padded(call.size))
            with varied():
                outputs = self._compute(self._inputs.tensors(call.size), **self._eager_options(call, states))
        else:
            self._inputs.send(call, graph.padded)
            if self._states is not None and states is not None:
                self._states[: len(states)].copy_(states)
            graph.replay()
            outputs = graph.outputs_of(call)
        hidden, logits, token_ids = outputs
        scored = hidden[call.score_indices] if call.scores else hidden
        return Result(call.samples, logits, token_ids, call.scores, scored, hidden, call.placed)

    def open_offload(self, num_bytes: int, folder: str | None, draft: "Runner | None" = None, rank: int = 0) -> int:
        """Take host memory for blocks, `num_bytes` at most, and use a folder of files; return the number of slots.
        draft: the runner of the draft head, whose caches lie in the same blocks."""
        caches = [*self.caches, *(() if draft is None else draft.caches)]
        sizes: dict[str, Any] = {"num_bytes": num_bytes, "num_blocks": self._num_blocks, "device": self.device}
        self.beyond = HostBlocks(caches, self.states, **sizes, folder=folder, rank=rank)
        return self.beyond.num_slots

    def weights_digest(self) -> bytes:
        """Return a digest of the weights of all ranks."""
        return weights_digest(self.model)

    def results(self, tickets: list[int], *, wait: bool = False, is_shared: bool = False) -> dict[int, bool]:
        """Return the results of moves of files that are done; wait: of all. is_shared: on all ranks."""
        assert self.beyond is not None
        assert self.beyond.files is not None
        results = ((ticket, self.beyond.files.result(ticket, wait=wait)) for ticket in tickets)
        return {ticket: is_good for ticket, is_good in results if is_good is not None}

    def move(self, moves: Sequence[Move | Carry | FileMove]) -> None:
        """Copy states, blocks and files outside of a call, in this order."""
        self._do(moves)

    def _do(self, moves: Sequence[Move | Carry | FileMove]) -> None:
        for move in moves:
            if isinstance(move, Move):
                self._move(move)
            else:
                assert self.beyond is not None, "blocks move to the host only with kv_offload"
                self.beyond.do(move)

    def _move(self, move: Move) -> None:
        assert self.states is not None, "states move only in a model that has some"
        if move.snapshot < 0:
            self.states.clear(move.lane)
        else:
            (self.states.save if move.is_saved else self.states.load)(move.lane, move.snapshot)

    def _eager_options(self, call: Call, states: Tensor | None) -> dict[str, Any]:
        """Return the arguments of `_compute` for a call that is not recorded."""
        width = -(-call.num_keys // self.block_size)
        options: dict[str, Any] = {"width": width, "is_decode": call.is_decode, "is_dense": call.is_dense}
        options |= {"decoding_from": call.decoding_from, "is_adapted": call.is_adapted}
        options |= {} if call.axes is None else self._image_inputs(call)
        if self._states is not None:
            no_states = self._states.new_zeros(call.size[0], self._states.shape[1])
            options["states"] = no_states if states is None else states
        return options

    def _image_inputs(self, call: Call) -> dict[str, Any]:
        """Return the inputs of a call with images that are not among its arrays."""
        assert call.axes is not None
        axes = lasting(torch.from_numpy(np.ascontiguousarray(call.axes)), self.device)
        inserted = None
        if call.inserts:
            assert self.features is not None
            inserted = self.features.inserted(call.inserts, call.size[0])
        return {"positions": axes.to(self.device, non_blocking=True), "inserted": inserted}

    def _compute(
        self,
        inputs: dict[str, Tensor],
        *,
        width: int,
        is_decode: bool,
        is_dense: bool,
        decoding_from: tuple[int, int] | None = None,
        positions: Tensor | None = None,
        inserted: Inserted | None = None,
        states: Tensor | None = None,
        is_adapted: bool = False,
    ) -> Outputs:
        """Return hidden states of all tokens, logits and token ids of the samples. A graph records all of this.

        width: blocks of a lane that the call may read. decoding_from: as in `Step`. positions: [A, T], if they have
        several axes. states: the target model's hidden states. is_adapted: some lane has an adapter.
        """
        if decoding_from is not None:
            self.lanes.write_blocks(inputs)
        token_ids, block_tables = self.lanes.read(inputs, width, is_decode=is_decode)
        step = Step(
            token_ids=token_ids,
            positions=inputs["positions"] if positions is None else positions,
            slots=inputs["slots"],
            block_tables=block_tables,
            query_starts=inputs["query_starts"],
            context_lens=inputs["context_lens"],
            max_position=min(width * self.block_size, self.max_len),
            inserted=inserted,
            states=states,
            decoding_from=decoding_from,
            lanes=None if self.states is None else inputs["entry_lanes"],
            is_decode=is_decode,
            may_draft=self.may_draft,
        )
        if self.routes is not None:
            self.routes.slots = inputs["slots"]
        with self._adapters(inputs["lanes"], is_adapted):
            hidden = self._forward(step, is_decode, is_adapted)
        if self.routes is not None:
            self.routes.slots = None
        if not len(inputs["seeds"]):  # no prompt ends in this call; not every backend takes empty tensors
            no_logits = hidden.new_empty(0, self.model.vocab_size)
            return hidden, no_logits, no_logits.new_empty(0, dtype=torch.int64)
        with self._adapters(inputs["sample_lanes"], is_adapted):
            logits = self.model.logits(hidden if is_dense else hidden[inputs["sample_indices"]])
        filters: dict[str, Any] = {name: inputs[name] for name in FILTERS}
        token_ids = ops.sample(logits[:, : self.vocab_size], seeds=inputs["seeds"], steps=inputs["places"], **filters)
        # A sequence with a draft has several samples in one lane, and any of them may be stored. That is harmless: the
        # host reads them all before the next step and sends the accepted one with it.
        self.lanes.keep(inputs["sample_lanes"], token_ids)
        return hidden, logits, token_ids

    def _adapters(self, lanes: Tensor, is_adapted: bool) -> contextlib.AbstractContextManager[None]:
        """Let the rows of products in the context, of these lanes, use their adapters."""
        if not is_adapted or self.low_ranks is None:
            return contextlib.nullcontext()
        return self.low_ranks.chosen(self.lanes.slots.index_select(0, lanes))

    def logits(self, hidden: Tensor, slots: Sequence[int]) -> Tensor:
        """Return the logits [N, V] of hidden states [N, C] outside of a call. slots: of their adapters; -1: none."""
        if self.low_ranks is None or max(slots) < 0:
            return self.model.logits(hidden)
        with self.low_ranks.chosen(torch.tensor(slots, dtype=torch.int32).to(hidden.device)):
            return self.model.logits(hidden)

    def load_adapter(self, slot: int, updates: Mapping[str, Update]) -> None:
        """Write an adapter to a slot, see `LowRanks.load`. No call that is in progress may use the slot."""
        assert self.low_ranks is not None, "the engine has no slots for adapters"
        has_moved = True
        try:
            has_moved = self.low_ranks.load(slot, updates)
        finally:
            if has_moved:
                synchronize(self.device)
                self.graphs.forget_adapted()

    def _forward(self, step: Step, is_decode: bool, is_adapted: bool) -> Tensor:
        """Return hidden states [T, C]; prompts may run with sequence parallelism, if none has an adapter."""
        if self.prompts is not None and not is_decode and not is_adapted and self.prompts.takes(step):
            return self.prompts(step, self.caches)
        return self.model.forward(step, self.caches)

    @torch.inference_mode()
    def cost(self, counts: Sequence[int], *, repeats: int = 5) -> dict[int, float]:
        """Return the seconds of a decode call, logits included, by number of tokens. The caches are not changed."""
        medians = {}
        for count in counts:
            call, times = self._dummies.decode(count), []
            for _ in range(repeats + 1):
                synchronize(self.device)
                start = time.perf_counter()
                self.run_call(call)
                synchronize(self.device)
                times.append(time.perf_counter() - start)
            medians[count] = statistics.median(times[1:])  # the first call warms up
        return medians

    def warm_up(self, num_tokens: int, keys: int) -> None:
        """Run a dummy decode call of this size, and record it if decode calls are recorded. Nothing is written."""
        call = self._dummies.decode(num_tokens)
        call.num_keys = keys
        self.run_call(call)

    def warm_up_prompt(self, length: int) -> None:
        """Run a dummy prompt of `length` tokens; nothing is sampled or written."""
        self.run_call(self._dummies.prompt(length))
