"""The engine. Start reading at `LLM.step`: schedule, build the batch, propose drafts, run, accept, finish."""

import math
import random
import time
import weakref
from collections import abc, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from whorl.device import HOST, default_device, require
from whorl.media import MediaItem
from whorl.nn import Model

from . import build, sequence_parallel
from .batch import Batch
from .control import Control, PauseMode, WeightVersions
from .drafts import Drafts
from .encoder import NO_WORK, Encoder, Work
from .load import check_passed, load
from .lora import Adapter, AdapterFile, Adapters
from .memory import cache_specs, named_errors, need_accelerator
from .output import Delta, Output, Prompt, generate_all, token_ids_of
from .placing import Placement, place
from .runner import Result
from .sampler import Sampler, Token
from .sampling_params import SamplingParams, check_request
from .scheduler import Chunk, Scheduler, StepBudget
from .sequence import Content, FinishReason, Sequence, Tokenizer, detokenizer_for
from .settings import EngineSettings
from .speculate import DraftLength, Proposer, measure_cost, num_agreed
from .tensor_parallel import Lead
from .warmup import Kind, Warmed, WarmUp, kind_for, shown

_MAX_SHARED = 24  # on a CPU: a step of two clients takes about twice as long as one that decodes a single token


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
        checkpoint_path = path if model is None else None
        if model is None:
            model, tokenizer, self._lead = load(path, tokenizer, device, settings, speculate)
        else:
            check_passed(settings)
        self.model, self.tokenizer, self.proposer = model, tokenizer, speculate
        self.adapters = Adapters(model, settings.most_loras)
        kept = build.load_adapters(self)  # before the cache takes the rest of the memory
        self.drafts = Drafts(self, draft_length)
        if speculate is not None:
            speculate.check(model, tokenizer)
            speculate.load(checkpoint_path, model)
        self.vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, len(tokenizer))
        with named_errors("allocating the cache"):
            self.cache_specs = cache_specs(model, settings.kv_cache_dtype)
            self.pool, self.max_model_len = build.make_pool(self, device)
            self.runner = build.make_runner(self, device, kept)
        end_files = None
        if settings.offload_bytes:
            with named_errors("taking host memory for the cache"):
                end_files = build.make_offload(self, device)
        self._end_files = None if end_files is None else weakref.finalize(self, end_files)
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
        self._seeds = random.Random(settings.seed)
        self.run_ahead = device != HOST if settings.run_ahead is None else settings.run_ahead
        # Steps that are launched but not read: batch, function that waits for the tokens, results for the proposer.
        self._flights: deque[tuple[Batch, Callable[[], dict[Chunk, list[Token]]], list[Result]]] = deque()
        self.num_steps = 0
        self.warmed: Warmed | None = None  # the report of the last warm-up
        if warm:
            self.warm_up()

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
        prompt_ids = token_ids_of(prompt, self.tokenizer)
        contents = list(contents)
        sizes = {"vocab_size": self.model.vocab_size, "limit": self.max_model_len}
        check_request(prompt_ids, params, **sizes, has_tokenizer=self.tokenizer is not None)
        adapter = None if params.lora is None else self.adapters.find(params.lora)
        placement = self.place(prompt_ids, media)
        if self._weights.have_changed():
            self.forget()
        options: dict[str, Any] = {"max_len": self.max_model_len, "seed": self._seeds.getrandbits(63)}
        options |= {"contents": contents, "placement": placement, "eos_ids": self.eos_ids}
        copies: list[Sequence] = []
        for copy in range(params.n):
            after = copies[0] if copies and self.pool.use_prefix_cache else None
            detokenizer = detokenizer_for(params, self.tokenizer)
            copies.append(Sequence(prompt_ids, params, **options, copy=copy, detokenizer=detokenizer, after=after))
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
            if self.runner.routes is not None:
                self.runner.routes.store(seq, self.pool.block_size)
            self.control.remove(seq)
            self._carry_rest()

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

    def measure_drafts(self, proposer: Proposer) -> None:
        """Measure, once, the costs of verifying and of drafting, if draft lengths are to be chosen by them."""
        self.drafts.measure(proposer)

    @property
    def draft_length(self) -> DraftLength | None:
        """What chooses how many tokens to draft; None: always the proposer's k, or nothing is measured yet."""
        return self.drafts.length

    @property
    def num_drafted(self) -> int:
        """Tokens that were drafted."""
        return self.drafts.num_drafted

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that were accepted."""
        return self.drafts.num_accepted

    def stats(self) -> dict[str, int]:
        """Return counters since the start, and the present numbers of sequences and blocks."""
        return {
            **({} if self.encoder is None else self.encoder.stats()),
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
            self.drafts.propose(self.proposer, batch)
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
            self.drafts.count(chunk, len(seq.token_ids) - first)
        if chunk.draft or seq.is_finished:
            # Rollback sets one number: all tokens but the last are in the cache, and later slots are overwritten.
            seq.num_computed = min(seq.num_computed + len(chunk.draft), len(seq.token_ids) - 1)
            self.pool.shrink(seq)
        if self.settings.sp_quantize is None:  # with it only prompts are rounded: generated blocks are not shared
            self.pool.publish(seq)
        if seq.is_finished:
            if self.runner.routes is not None:
                self.runner.routes.store(seq, self.pool.block_size)
            self.scheduler.finish(seq)
        new = seq.token_ids[first:]
        num_drafted = num_agreed(new, chunk.draft)
        return Delta(seq, new, seq.text.take(is_finished=seq.is_finished), seq.finish_reason, num_drafted)
