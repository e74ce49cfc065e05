"""The engine. Start reading at `LLM.step`: schedule, build the batch, propose drafts, run, accept, finish."""

import logging
import math
import random
import time
import weakref
from collections import abc, deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from whorl.device import HOST, arithmetic_of, default_device, require
from whorl.media import MediaItem
from whorl.nn import Model, Update

from . import sequence_parallel
from .batch import Batch
from .blocks import BlockPool
from .control import Control, PauseMode
from .encoder import NO_WORK, Encoder, Work
from .load import load
from .lora import Adapter, AdapterFile, Adapters
from .memory import block_size as cache_block_size
from .memory import (
    blocks_that_fit,
    cache_room,
    cache_specs,
    check_cache,
    check_rollback,
    memory_left,
    named_errors,
    need_accelerator,
    state_line,
    state_pool,
    token_bytes,
    without_states,
)
from .offload import Offload, Sizes
from .offload_identity import identity
from .output import Delta, Output, Prompt, generate_all
from .placing import Placement, place
from .runner import Result, Runner
from .sampler import Sampler, Token
from .sampling_params import SamplingParams
from .scheduler import Chunk, Scheduler, StepBudget
from .sequence import Content, Detokenizer, FinishReason, Sequence
from .settings import EngineSettings
from .speculate import DraftLength, Proposer, cut, measure_cost, num_agreed
from .tensor_parallel import Lead
from .warmup import Kind, Warmed, WarmUp, kind_for, shown

log = logging.getLogger(__name__)

_COST_TOKENS = 64  # the largest decode step that is timed for `DraftLength`
_MAX_SHARED = 24  # on a CPU: a step of two clients takes about twice as long as one that decodes a single token
_COST_SECONDS = 0.2  # time to measure the cost of verifying drafts, and again of drafting


class Tokenizer(Protocol):
    """The methods and attributes of a tokenizer that the engine uses."""

    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    added_ids: frozenset[int]

    def __len__(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def token(self, token_id: int) -> str: ...
    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer: ...


class LLM:
    """A model with its tokenizer, KV cache and scheduler. It is not thread-safe: one thread at a time may use it.

    path: a folder, a file or a Hugging Face id; None loads the small default model. Alternatively pass `model` and
    `tokenizer`; without a tokenizer prompts are token ids and outputs have no text.
    settings: an `EngineSettings`; changes: fields of it that override `settings`, by name.
    speculate: the proposer of drafts. draft_length: "fixed" always drafts the proposer's k tokens; "measured" chooses
    the length that pays, from a cost table that is timed once after the first draft; or a `DraftLength` of your own.
    warm: False leaves the warm-up to the caller, whatever the settings say.
    Raises ValueError when the settings, the model and the device do not fit together.
    The output does not depend on the settings except for dtype and for what rounds: quantize, kv_cache_dtype and
    sp_quantize. lora: folders of adapters by name, see `load_lora`.
    Example: `LLM("Qwen/Qwen3-0.6B").generate("Hello", SamplingParams(max_tokens=8))[0].text`
    """

    def __init__(
        self,
        path: str | Path | None = None,
        settings: EngineSettings | None = None,
        *,
        model: Model | None = None,
        tokenizer: Tokenizer | None = None,
        speculate: Proposer | None = None,
        draft_length: DraftLength | Literal["measured", "fixed"] = "measured",
        warm: bool = True,
        **changes: Any,
    ) -> None:
        self.settings = settings = (settings or EngineSettings()).changed(**changes)
        device = require(settings.device or default_device())
        if settings.memory_share is not None:
            need_accelerator(settings.memory_share, device)
        self._lead: Lead | None = None
        self._kept_adapters: dict[int, abc.Mapping[str, Update]] = {}  # until there is a runner
        checkpoint_path = path if model is None else None
        if model is None:
            model, tokenizer, self._lead = load(path, tokenizer, device, settings, speculate)
        elif settings.num_ranks not in (None, 1):
            raise ValueError(
                f"LLM: tp or ep is {settings.num_ranks}, expected 1 for a model that is passed as an object; pass its "
                "path, so that every rank can load it"
            )
        elif settings.tp_segments is not None:
            raise ValueError(
                "LLM: tp_segments needs the path of a model; build one that is passed with Ranks(segments=)"
            )
        self.model, self.tokenizer, self.proposer = model, tokenizer, speculate
        self.adapters = Adapters(model, settings.most_loras)
        for name, adapter_path in settings.adapters.items():  # before the cache takes the rest of the memory
            self.adapters.load(name, adapter_path, self._keep_adapter)
        self._is_unmeasured = draft_length == "measured"
        self.draft_length = draft_length if isinstance(draft_length, DraftLength) else None
        if speculate is not None:
            speculate.check(model, tokenizer)
            speculate.load(checkpoint_path, model)
        self.vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, len(tokenizer))
        with named_errors("allocating the cache"):
            self._make_cache(settings, device)
            self._make_runner(settings, device)
        self._end_files: Callable[[], None] | None = None
        if settings.offload_bytes:
            with named_errors("taking host memory for the cache"):
                self._make_offload(settings, device)
        self._weights = WeightVersions(model)
        self.control = Control(self)
        self._budget = StepBudget(settings.step_tokens, device=device, fixed=settings.max_prompt_tokens)
        tower = getattr(model, "tower", None)
        grid = 1 if self.pool.states is None else self.pool.states.grid
        self.encoder = None if tower is None else Encoder(tower.config.depth, settings.encoder_cache, grid=grid)
        counts = {"max_num_seqs": settings.max_num_seqs, "max_num_batched_tokens": settings.step_tokens}
        max_shared = _MAX_SHARED if device == HOST else None  # on an accelerator a step costs the same for one and many
        self.scheduler = Scheduler(self.pool, **counts, max_shared=max_shared, encoder=self.encoder)
        self.sampler = Sampler(self.runner, self.vocab_size, mode=settings.logprobs_mode)
        self.eos_ids = () if tokenizer is None else tuple(tokenizer.eos_ids)
        self._special_ids = frozenset() if tokenizer is None else tokenizer.special_ids | tokenizer.added_ids
        self._seeds = random.Random(settings.seed)
        self.run_ahead = device != HOST if settings.run_ahead is None else settings.run_ahead
        # Steps that are launched but not read: batch, function that waits for the tokens, results for the proposer.
        self._flights: deque[tuple[Batch, Callable[[], dict[Chunk, list[Token]]], list[Result]]] = deque()
        self.num_steps = self.num_drafted = self.num_accepted = 0
        self.warmed: Warmed | None = None  # the report of the last warm-up
        if warm:
            self.warm_up()

    def _make_cache(self, settings: EngineSettings, device: str) -> None:
        """Create the block pool: by default what fits into memory, up to what `max_num_seqs` full sequences need."""
        model, num_blocks, memory = self.model, settings.num_blocks, settings.memory
        self.cache_specs = specs = cache_specs(model, settings.kv_cache_dtype)
        if (draft_head := self._draft_head) is not None:
            without_states(draft_head, type(self.proposer).__name__)
            specs = [*specs, *cache_specs(draft_head, settings.kv_cache_dtype)]
        if self.proposer is not None:
            check_rollback(specs, model, type(self.proposer).__name__)
        block_size = cache_block_size(specs, device, settings.block_size)
        block_bytes = block_size * token_bytes(specs)
        max_len = _checked_max_len(settings.max_model_len, model.max_length, "the model's context")
        states = state_pool(self.cache_specs, model, settings, block_size)
        if num_blocks is None:
            share = settings.memory_share
            memory = memory if share is None else memory_left(share, device)
            sizes = {"block_size": block_size, "max_num_seqs": settings.max_num_seqs}
            sizes |= {"num_snapshots": 0 if states is None else states.num_snapshots}
            sizes |= {"most": settings.max_num_seqs * -(-max_len // block_size)}
            if self._lead is None:
                num_blocks = blocks_that_fit(cache_room(specs, device), memory, **sizes)
            else:
                sizes["adapters"] = self.adapters.low_ranks.nbytes
                num_blocks = self._lead.num_blocks(specs, memory, **sizes)
                if share is not None:  # other ranks' devices may have less free memory
                    num_blocks = min(num_blocks, self._lead.num_blocks(specs, None, **sizes))
        check_cache(num_blocks, block_bytes, device, memory=memory)
        self.pool = BlockPool(num_blocks, block_size, use_prefix_cache=settings.use_prefix_cache, states=states)
        limit = min(max_len, num_blocks * block_size)
        self.max_model_len = _checked_max_len(settings.max_model_len, limit, "the cache")

    def _keep_adapter(self, slot: int, updates: abc.Mapping[str, Update]) -> None:
        """Write an adapter before there is a runner."""
        self.adapters.low_ranks.load(slot, updates)
        self._kept_adapters[slot] = updates

    def _make_runner(self, settings: EngineSettings, device: str) -> None:
        num_ranks = 1 if self._lead is None else self._lead.group.size
        options: dict[str, Any] = {
            "num_blocks": self.pool.num_blocks,
            "block_size": self.pool.block_size,
            "max_len": self.max_model_len,
            "device": device,
            "vocab_size": self.vocab_size,
            "num_snapshots": 0 if self.pool.states is None else self.pool.states.num_snapshots,
            "may_draft": self.proposer is not None,
        }
        num_shards = settings.num_shards(num_ranks)
        sp = sequence_parallel.for_ranks(settings, num_shards, device=device, model=self.model)
        low_ranks = self.adapters.low_ranks
        make = Runner if self._lead is None else self._lead.runner
        self.runner = make(self.model, settings, **options, sp=sp, low_ranks=low_ranks)
        if self.runner.states is not None:
            log.info("%s", state_line(self.cache_specs, settings.max_num_seqs, options["num_snapshots"]))
        for slot, updates in self._kept_adapters.items() if self._lead is not None else ():
            self.runner.load_adapter(slot, updates)  # on the other ranks, too
        self._kept_adapters.clear()
        if (draft_head := self._draft_head) is not None and self.proposer is not None:
            runner_class = Runner if self._lead is None else self._lead.draft_runner
            runner = runner_class(draft_head, settings, **options, share_tables_with=self.runner)
            self.proposer.attach(self.pool, runner, max_rows=settings.step_tokens)

    def _make_offload(self, settings: EngineSettings, device: str) -> None:
        """Let blocks go to host memory and to files."""
        folder = settings.kv_offload_dir
        if folder is not None and arithmetic_of(device) is None:
            log.warning("kv_offload_dir: this %s cannot be identified, so blocks of other runs cannot be used", device)
            folder = None
        draft = None if self._draft_head is None else self.proposer.drafter.runner  # type: ignore[union-attr]
        num_slots = self.runner.open_offload(settings.offload_bytes, folder, draft)
        beyond = self.runner.beyond
        assert beyond is not None
        if not num_slots:
            return
        num_ranks = 1 if self._lead is None else self._lead.group.size
        disk = 0 if folder is None else settings.kv_offload_disk
        bytes_of = {"slot": beyond.slot_bytes, "snapshot": beyond.snapshot_bytes, "disk": disk}
        self.pool.beyond = Offload(
            self.runner,
            [] if self.pool.states is None else self.pool.states.moves,
            Sizes(slots=num_slots, ranks=num_ranks, **bytes_of),
            identify=partial(identity, self, folder is None),
            folder=folder,
            checks_memory=device == HOST,
        )
        log.info("%s", self.pool.beyond)
        self._end_files = weakref.finalize(self, beyond.close)

    def _carry_rest(self) -> None:
        """Carry what is due at once, because no step follows."""
        if self.pool.beyond is not None and not self.has_work and not self._flights:
            self.pool.beyond.begin(is_decoding=False)
            self._carry()

    def _carry(self) -> None:
        try:
            if moves := self.pool.take_moves():
                self.runner.move(moves)
        except BaseException:
            self.forget()  # what was to be copied may not have been
            raise

    @property
    def _draft_head(self) -> Model | None:
        """The proposer's model that drafts from the target's hidden states; its caches lie in the target's blocks."""
        return self.proposer.draft_head if self.proposer is not None and self.proposer.wants_hidden else None

    def step(self) -> list[Delta]:
        """Run one step of the engine and return the new tokens of each sequence that got some.

        When running ahead, the next step is launched before this step's tokens are read, so that the device never waits
        for the host. If a sequence turns out to be finished, its token of the next step is discarded.
        """
        if self.control.deltas:
            deltas, self.control.deltas = self.control.deltas, []
            return deltas
        is_held = self.control.is_held
        if not self._flights and not is_held:
            self._launch()
        if self._flights and not is_held and self._may_run_ahead():
            self._launch()
        if not self._flights:
            assert is_held or not self.scheduler.has_work, (
                f"nothing was scheduled although there is work: {self.stats()}"
            )
            return []
        deltas = self.land()
        self._carry_rest()
        return deltas

    def land(self) -> list[Delta]:
        """Read the tokens of the oldest step that was launched, and return them."""
        batch, read, results = self._flights.popleft()
        tokens = read()
        deltas = [delta for chunk in batch.chunks if (delta := self._finish(chunk, tokens.get(chunk))) is not None]
        if self.proposer is not None:
            self.proposer.observe(results)
        return deltas

    # ---- requests

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        contents: Iterable[Content] = (),
        media: abc.Sequence[MediaItem] = (),
    ) -> list[Sequence]:
        """Queue a prompt and return its sequences, `params.n` of them; `step` then computes them.

        prompt: text or token ids. contents: digests of what placeholder tokens stand for; prefix blocks are shared only
        where they are equal. media: images and videos in the order of their placeholder tokens, of which the prompt
        has one for each feature. Raises ValueError for a request that could never run, such as too long a prompt.
        """
        self.control.check()
        params = params or self.default_params
        prompt_ids = self._encode(prompt)
        contents = list(contents)
        self._check(prompt_ids, params)
        adapter = None if params.lora is None else self.adapters.find(params.lora)
        placement = self.place(prompt_ids, media)
        if self._weights.have_changed():
            self.forget()
        seed = self._seeds.getrandbits(63)
        copies: list[Sequence] = []
        for copy in range(params.n):
            copies.append(
                Sequence(
                    prompt_ids,
                    params,
                    max_len=self.max_model_len,
                    seed=seed,
                    copy=copy,
                    contents=contents,
                    placement=placement,
                    eos_ids=self.eos_ids,
                    detokenizer=None
                    if self.tokenizer is None
                    else self.tokenizer.detokenizer(skip_special=params.skip_special),
                    after=copies[0] if copies and self.pool.use_prefix_cache else None,
                )
            )
        for seq in copies:
            if adapter is not None:
                adapter.give(seq)
            self.control.add(seq)
        return copies

    @property
    def default_params(self) -> SamplingParams:
        """The sampling parameters of a request without any: those that the model's files recommend, else greedy;
        without the model's own tokenizer those of `SamplingParams`."""
        return SamplingParams(**getattr(self.tokenizer, "sampling", {}))

    def place(self, prompt_ids: abc.Sequence[int], media: abc.Sequence[MediaItem]) -> Placement | None:
        """Match media with a prompt's placeholder tokens; ValueError if they do not fit. Thread-safe, unlike `add`."""
        return place(prompt_ids, media, self.model, most=self.settings.encoder_cache)

    def abort(self, seq: Sequence) -> None:
        """Stop a sequence and free its blocks; a finished sequence is left as it is."""
        if not seq.is_finished:
            seq.finish(FinishReason.ABORT)
            self._note_routes(seq)
            self.control.remove(seq)
            self._carry_rest()

    def _note_routes(self, seq: Sequence) -> None:
        """Store the experts of a sequence that ends, while it has its blocks. The last token was sent to none."""
        if self.runner.routes is not None and seq.block_table:
            count = min(seq.num_computed, len(seq.token_ids) - 1)
            seq.routed_experts = self.runner.routes.read(seq.block_table, self.pool.block_size, count)

    def forget(self) -> None:
        """Clear the prefix cache and recompute running sequences, because the weights have changed.

        `add` and `generate` call it when weights were modified in place. Call it yourself after a change that torch's
        version counters do not see, such as one through `.data`.
        """
        self.scheduler.preempt_all()
        self.pool.forget()
        if self.encoder is not None:
            self.encoder.forget()

    def forget_weights(self) -> None:
        """`forget`, after the weights have changed in a way that is known."""
        self._weights.have_changed()
        self.forget()

    # ---- what a trainer does: see control.py

    def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: str | None = None, partial: bool = False
    ) -> str:
        """Replace the weights by these tensors, by Hugging Face's names, and return their version.

        version: default: the number of updates so far. partial: tensors that do not come keep their values; else every
        tensor must come. Requests in progress do what their `on_update` says; no cached prefix of the old weights is
        used again. Raises ValueError for tensors that do not fit the model. If any had been copied by then, the weights
        are incomplete, all requests are aborted, and `WeightsError` is raised until an update succeeds.
        Example: `llm.update_weights(model.named_parameters())`
        """
        return self.control.update_all(tensors, version, is_partial=partial)

    @property
    def weight_version(self) -> str:
        """The version of the weights: "0" as they were loaded, then as `update_weights` was told."""
        return self.control.version

    def pause(self, mode: PauseMode = "abort") -> None:
        """Launch no further step until `resume`; new requests wait.

        mode: what becomes of the requests: they are aborted ("abort"), they are finished by the steps that follow
        ("wait"), or they stay as they are ("keep").
        """
        self.control.pause(mode)

    def resume(self) -> None:
        """End a pause."""
        self.control.resume()

    def sleep(self, level: int = 1, *, mode: PauseMode = "abort") -> None:
        """Give memory back to the device until `wake`: that of the cache, and that of the weights.

        level: 1 keeps the weights in the host's memory, 2 discards them, so that an update must follow. mode: what
        becomes of the requests, as for `pause`; those that are kept are computed again from their tokens.
        """
        self.control.sleep(level, mode)

    def wake(self, tags: Iterable[str] | None = None) -> None:
        """Take memory again for "weights" and "kv_cache", or for one of the two; steps need both."""
        self.control.wake(tags)

    def renew_addresses(self) -> None:
        """Note where the weights are now, after their memory was allocated anew."""
        self._weights = WeightVersions(self.model)

    @property
    def is_flying(self) -> bool:
        """Whether a step is launched whose tokens are not read."""
        return bool(self._flights)

    @property
    def may_step(self) -> bool:
        """Whether `step` would do anything now."""
        is_ready = self.scheduler.has_work and not self.control.is_held
        return bool(self.control.deltas or self._flights) or is_ready

    def load_lora(self, name: str, source: str | Path | AdapterFile, *, replace: bool = False) -> Adapter:
        """Load an adapter, so that requests may choose it: `SamplingParams(lora=name)`.

        source: a folder that PEFT wrote, a Hugging Face id, or what `read_adapter` returned. replace: it takes the name
        of a loaded one; sequences that began with that one go on with it. Raises ValueError if it cannot be served, the
        name is taken or no slot is free (`max_loras`), and OutOfMemory; the engine goes on as before.
        """
        return self.adapters.load(name, source, self.runner.load_adapter, replace=replace)

    def unload_lora(self, name: str) -> None:
        """Unload an adapter; sequences that began with it go on. Raises ValueError if none has the name."""
        self.adapters.unload(name)

    def close(self) -> None:
        """End the other ranks, if there are any, and write what files still lack. The end of the program does this as
        well."""
        if self._end_files is not None:
            self._end_files()
        if self._lead is not None:
            self._lead.close()

    @property
    def sp_report(self) -> sequence_parallel.Report | None:
        """What ranks exchange in calls with sequence parallelism; None if it is off."""
        return None if self.runner.prompts is None else self.runner.prompts.report

    @property
    def problem(self) -> str | None:
        """Why no step can be run now: another rank is lost or stopped; None: it can."""
        return None if self._lead is None else self._lead.group.problem

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return self.scheduler.has_work or self.control.num_late > 0

    def generate(
        self,
        prompts: Prompt | abc.Sequence[Prompt],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        media: abc.Sequence[abc.Sequence[MediaItem]] | None = None,
        progress: bool = True,
    ) -> list[Output]:
        """Generate for all prompts; return the outputs in the order of the prompts, the `n` of a prompt side by side.

        prompts: one prompt or a list; each is text or token ids. params: one for all prompts, or one for each. media:
        the images and videos of each prompt. progress: show a progress bar. Raises ValueError for a prompt that cannot
        run, AllowError when an `allow` function gives up. Example: `llm.generate(["Hello", "Bye"], progress=False)`
        """
        return generate_all(self, prompts, params, media, progress)

    def warm_up(self, kind: Kind | None = None, *, progress: bool = True) -> Warmed:
        """Compile, tune and record before the first request; see `warmup`. kind: None takes it from the settings."""
        work = WarmUp(self, kind or kind_for(self.settings.warmup, self.runner.device, is_server=False))
        for _ in work.run() if work.kind == "off" else shown(work.run(), progress=progress):
            pass
        return work.report

    @property
    def max_prompt_tokens(self) -> int:
        """How many prompt tokens a step may compute at present."""
        return self._budget.tokens

    def measure_cost(self, max_tokens: int = 16, *, seconds: float = math.inf) -> dict[int, float]:
        """Return the seconds of a decode step by its number of tokens, for `DraftLength`. max_tokens: the largest
        number to time. seconds: stop after about this time, with a shorter table. The cache is not changed."""
        counts = sorted({1, 2, 3, 4, 6, 8, 12, 16, *range(16, max_tokens, 16), max_tokens})
        return measure_cost(self.runner, [count for count in counts if count <= max_tokens], seconds)

    def stats(self) -> dict[str, int]:
        """Return counters since the start, and the present numbers of sequences and blocks."""
        encoder, encoder_stats = self.encoder, {}
        if encoder is not None:
            encoder_stats = {"num_encoded": encoder.num_encoded, "num_encoder_hits": encoder.num_hit}
            encoder_stats["num_encoder_tokens"] = encoder.num_held
        return {
            **encoder_stats,
            **self._state_stats(),
            **({} if self.pool.beyond is None else self.pool.beyond.stats()),
            "num_steps": self.num_steps,
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "num_blocks": self.pool.num_blocks,
            "num_blocks_used": self.pool.num_used,
            "num_preemptions": self.scheduler.num_preemptions,
            "num_tokens_queried": self.pool.num_queried,
            "num_tokens_hit": self.pool.num_hit,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
        }

    def _state_stats(self) -> dict[str, int]:
        """Return the bytes of states and snapshots on this rank, and counters of snapshots; {} for a model without."""
        if self.pool.states is None or self.runner.states is None:
            return {}
        return {"num_state_bytes": self.runner.states.num_bytes, **self.pool.states.stats()}

    # ---- the parts of a step

    def _may_run_ahead(self) -> bool:
        """Return whether the next step may be launched before the tokens of this one are read: drafts, penalties, masks
        and log-probabilities depend on those tokens."""
        return self.run_ahead and self.proposer is None and all(seq.is_plain for seq in self.scheduler.running)

    def _launch(self) -> None:
        """Schedule a step and start it on the device; sequences are updated as if it had already run."""
        chunks, work = self._schedule()
        if self.pool.beyond is not None and not chunks and not work.jobs:
            self._carry()
            if self.pool.beyond.is_reading and not self._flights:  # there is nothing else to do
                self.pool.beyond.settle_reads(wait=True)
                chunks, work = self._schedule()
        if not chunks and not work.jobs:
            return
        started = time.perf_counter()
        if work.jobs or work.dropped:
            self.runner.encode(work)
        batch = Batch(chunks)
        if self.proposer is not None:
            self._propose(self.proposer, batch)
        results, read = self._run(batch)
        results_for_proposer = results if self._draft_head is not None else []
        self._flights.append((batch, read, results_for_proposer))
        if num_prompt_tokens := batch.num_prompt_tokens + work.num_tokens:
            self._budget.observe(num_prompt_tokens, time.perf_counter() - started)
        for chunk in chunks:
            seq = chunk.sequence
            seq.num_computed = chunk.start + chunk.length
            seq.num_unread += chunk.is_last
            if not chunk.is_decode:  # a generated token's block is published when the host knows the token
                self.pool.publish(seq)
                if self.encoder is not None:
                    self.encoder.passed(seq)
        if self.pool.states is not None:
            self.pool.states.advance(chunks)
        self.num_steps += 1

    def _schedule(self) -> tuple[list[Chunk], Work]:
        """Return the chunks of the next step and the vision tower's work."""
        if self.pool.beyond is not None:
            self.pool.beyond.settle_reads()
        lookahead = self.proposer.k if self.proposer else 0
        chunks = self.scheduler.schedule(lookahead=lookahead, max_prompt_tokens=self._budget.tokens)
        return chunks, NO_WORK if self.encoder is None else self.encoder.take()

    def _run(self, batch: Batch) -> tuple[list[Result], Callable[[], dict[Chunk, list[Token]]]]:
        """Start a batch on the device; return its results and the function that waits for its tokens."""
        try:
            if batch.chunks:
                batch.moves = self.pool.take_moves()
            results = self.runner.run(batch)
            return results, self.sampler.start(results)
        except BaseException:
            # States may include the step's tokens, which would count twice; moves may not have been made.
            if self.pool.states is not None or self.pool.beyond is not None:
                self.forget()
            raise

    def _propose(self, proposer: Proposer, batch: Batch) -> None:
        """Add drafts to the chunks that have room for one. A draft uses free blocks only; it preempts no sequence."""
        chunks = [chunk for chunk in batch.chunks if chunk.room > 0 and chunk.sequence.params.drafts]
        k = self._draft_len(proposer, len(chunks))
        if k == 0 or not chunks:
            return
        for chunk, draft in zip(chunks, proposer.propose([chunk.sequence for chunk in chunks], k), strict=True):
            token_ids = draft.token_ids[: chunk.room]
            # A sampled draft is not cut: leaving tokens unverified because of their value would bias the output.
            if draft.probs is None:
                token_ids = cut(token_ids, self._special_ids)
            while token_ids and not self.pool.grow(chunk.sequence, len(chunk.sequence.token_ids) + len(token_ids)):
                token_ids.pop()
            if not token_ids:
                self.pool.shrink(chunk.sequence)  # a proposer may have taken blocks to draft in
            chunk.draft = token_ids
            chunk.probs = None if draft.probs is None else draft.probs[: len(token_ids)]

    def _draft_len(self, proposer: Proposer, num_sequences: int) -> int:
        if self.num_drafted:  # an output without any draft need not wait for the measurement
            self.measure_drafts(proposer)
        return proposer.k if self.draft_length is None else self.draft_length.choose(proposer.k, num_sequences)

    def measure_drafts(self, proposer: Proposer) -> None:
        """Measure, once, the costs of verifying and of drafting, if draft lengths are to be chosen by them."""
        if self._is_unmeasured:
            self._is_unmeasured = False
            max_tokens = min(_COST_TOKENS, self.scheduler.max_num_seqs * (proposer.k + 1))
            cost = self.measure_cost(max_tokens, seconds=_COST_SECONDS)
            self.draft_length = DraftLength(cost, drafting=proposer.cost(seconds=_COST_SECONDS))

    def _finish(self, chunk: Chunk, tokens: list[Token] | None) -> Delta | None:
        """Append a chunk's sampled tokens to its sequence; None if there are none or it is already finished."""
        seq = chunk.sequence
        if tokens is None or seq.is_finished:
            return None
        seq.num_unread -= 1
        first = len(seq.token_ids)
        if not seq.weight_versions or seq.weight_versions[-1][0] != self.control.version:
            seq.weight_versions.append((self.control.version, seq.num_outputs))
        if seq.error is not None:  # these tokens were sampled without a mask
            seq.finish(FinishReason.ERROR)
            tokens = []
        for token in tokens:
            seq.append(token.id, token.logprob)
            if seq.is_finished:  # draft tokens after the end of the sequence are not output
                break
        if chunk.draft:
            self._count(chunk, len(seq.token_ids) - first)
        if chunk.draft or seq.is_finished:
            # Rollback sets one number: all tokens but the last are in the cache, and later slots are overwritten.
            seq.num_computed = min(seq.num_computed + len(chunk.draft), len(seq.token_ids) - 1)
            self.pool.shrink(seq)
        if self.settings.sp_quantize is None:  # with it only prompts are rounded: generated blocks are not shared
            self.pool.publish(seq)
        if seq.is_finished:
            self._note_routes(seq)
            self.scheduler.finish(seq)
        new = seq.token_ids[first:]
        num_drafted = num_agreed(new, chunk.draft)
        return Delta(seq, new, seq.text.take(is_finished=seq.is_finished), seq.finish_reason, num_drafted)

    def _count(self, chunk: Chunk, num_new: int) -> None:
        num_drafted, num_accepted = len(chunk.draft), max(0, min(num_new - 1, len(chunk.draft)))
        chunk.sequence.num_drafted += num_drafted
        chunk.sequence.num_accepted += num_accepted
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if self.draft_length is not None:
            self.draft_length.observe(num_drafted, num_accepted)

    # ---- submission

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("prompt: it is text, and this LLM has no tokenizer; pass token ids")
        return self.tokenizer.encode(prompt)

    def _check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Raise ValueError if a request could never run."""
        vocab_size = self.model.vocab_size
        if not prompt_ids:
            raise ValueError("prompt: it has 0 tokens, expected at least 1")
        if bad := [i for i in prompt_ids if not 0 <= i < vocab_size]:
            raise ValueError(f"prompt: token ids {bad[:4]} are outside the vocabulary of {vocab_size}")
        _check_lengths(len(prompt_ids), params, self.max_model_len)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: strings need a tokenizer, and this LLM has none; use stop_token_ids")
        ids = [*params.logit_bias, *params.stop_token_ids]
        if bad := [i for i in ids if not 0 <= i < vocab_size]:
            raise ValueError(f"logit_bias, stop_token_ids: {bad[:4]} are outside the vocabulary")
        if params.n > 1 and params.prompt_logprobs is not None:
            raise ValueError(f"prompt_logprobs: n is {params.n}, expected 1, because they are the same for every copy")


def _checked_max_len(max_model_len: int | None, limit: int, limited_by: str) -> int:
    """Return `max_model_len`, or the limit if it is None; ValueError if it is above the limit."""
    if max_model_len is not None and not 2 <= max_model_len <= limit:
        raise ValueError(f"max_model_len is {max_model_len}, expected 2 to {limit}, the tokens that {limited_by} holds")
    return limit if max_model_len is None else max_model_len


def _check_lengths(length: int, params: SamplingParams, limit: int) -> None:
    """Raise ValueError for a prompt or an answer that is too long. limit: tokens of the longest sequence."""
    if length >= limit:
        raise ValueError(f"prompt: {length} tokens leave no room for an answer: sequences have up to {limit}")
    if params.max_tokens is not None and length + params.max_tokens > limit:
        raise ValueError(
            f"prompt of {length} tokens and max_tokens {params.max_tokens} make {length + params.max_tokens}: "
            f"sequences have up to {limit}. Set max_tokens to at most {limit - length}, or None for as many as fit"
        )
    if params.min_tokens > (room := limit - length):
        raise ValueError(f"min_tokens is {params.min_tokens}, expected at most {room}, the room after this prompt")


class WeightVersions:
    """The version counters of a model's weights, to detect whether weights have changed since the KV cache was
    computed. torch counts in-place changes, except those through `.data`."""

    def __init__(self, model: object) -> None:
        self._weights = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
        self._known, self._addresses = self._read()

    def have_changed(self) -> bool:
        """Return whether weights have changed since the last call. RuntimeError if a weight is another tensor now:
        recorded graphs read the old memory."""
        versions, addresses = self._read()
        if addresses != self._addresses:
            raise RuntimeError(
                "LLM: a weight was replaced by another tensor, and recorded graphs read the old one; copy new values "
                "into the weights (parameter.copy_ under torch.no_grad), or create a new LLM"
            )
        previous, self._known = self._known, versions
        return versions != previous

    def _read(self) -> tuple[list[int], list[int]]:
        """Return the version counter and the address of each weight."""
        versions = [0 if weight.is_inference() else weight._version for weight in self._weights]
        return versions, [weight.data_ptr() for weight in self._weights]
