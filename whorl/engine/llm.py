"""The engine. Start reading at `LLM.step`: schedule, build the batch, propose drafts, run, accept, finish."""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from whorl.device import HOST, default_device, require
from whorl.media import MediaItem
from whorl.nn import Model

from . import sequence_parallel
from .batch import Batch
from .blocks import BlockPool
from .caches import block_size as cache_block_size
from .caches import cache_memory, cache_specs, token_bytes
from .contents import Content
from .encoder import NO_WORK, Encoder
from .launch import Place
from .load import load
from .memory import memory_left, need_accelerator
from .output import Delta, Output, shown_progress
from .placing import Placement, place
from .request_limits import check_request
from .runner import Result, Runner
from .sampler import Sampler, Token
from .scheduler import Chunk, Scheduler
from .sequence import Detokenizer, FinishReason, SamplingParams, Sequence
from .settings import EngineSettings
from .speculate import DraftLength, Proposer, cut, measure_cost, num_agreed
from .step_budget import StepBudget
from .tensor_parallel import Lead
from .warmup import Kind, Warmed, WarmUp, kind_for, shown
from .weight_versions import WeightVersions

if TYPE_CHECKING:
    from whorl.passes import Report

Prompt = str | List[int]
_COST_ROWS = 64  # of the longest decode step that is timed for `DraftLength`
_COST_SECONDS = 0.2


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    added_ids: frozenset[int]

    def __len__(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def token(self, token_id: int) -> str: ...
    def detokenizer(self) -> Detokenizer: ...


class LLM:
    """A model with its tokenizer, cache and scheduler. Not for several threads at once.

    path: a folder, a file or a Hugging Face id; None is the small default. Tests and other callers may hand in
    `model` and `tokenizer` instead; without a tokenizer prompts are token ids and outputs have no text.
    settings: what `EngineSettings` documents; changes: other values of its fields, by name.
    speculate: who drafts; draft_length: how much. "measured": as much as pays by what steps cost on this machine, which
    takes a fraction of a second after the first draft; "fixed": always the proposer's k.
    warm: False: whoever makes the engine warms it up himself, whatever the settings say.
    What comes out does not depend on the settings, but for dtype and for what rounds: quantize, kv_cache_dtype and
    sp_quantize. `sp_report` says what sequence parallelism has done.
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
        self.settings = asked = (settings or EngineSettings()).changed(**changes)
        device = require(asked.device or default_device())
        if model is not None or Place.find(asked.tp).size == 1:
            sequence_parallel.for_ranks(asked, 1, device=device)  # refuses before anything is loaded
        if asked.memory_share is not None:
            need_accelerator(asked.memory_share, device)
        self._lead: Lead | None = None
        own_path = path if model is None else None
        if speculate is not None and speculate.wants_hidden and Place.find(asked.tp).size > 1:
            raise ValueError(
                f"{type(speculate).__name__}: it drafts from hidden states, which ranks do not hand it, and there are "
                f"{Place.find(asked.tp).size} of them: take 1, or draft in another way"
            )
        if model is None:
            model, tokenizer, self._lead = load(path, tokenizer, device, asked)
        elif asked.tp not in (None, 1):
            raise ValueError(
                f"LLM: tp is {asked.tp}, and the model was handed in; give its path, for every rank to load it"
            )
        self.model, self.tokenizer, self.proposer = model, tokenizer, speculate
        self._is_unmeasured = draft_length == "measured"
        self.draft_length = draft_length if isinstance(draft_length, DraftLength) else None
        if speculate is not None:
            speculate.check(model, tokenizer)
            speculate.load(own_path, model)
        self.vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, len(tokenizer))
        self._make_cache(asked, device)
        self._make_runner(asked, device)
        self._weights = WeightVersions(model)
        self._budget = StepBudget(asked.step_tokens, device=device, fixed=asked.max_prompt_tokens)
        tower = getattr(model, "tower", None)
        self.encoder = None if tower is None else Encoder(tower.config.depth, asked.encoder_cache)
        counts = {"max_num_seqs": asked.max_num_seqs, "max_num_batched_tokens": asked.step_tokens}
        self.scheduler = Scheduler(self.pool, **counts, encoder=self.encoder)
        self.sampler = Sampler(model, self.vocab_size)
        self.eos_ids = () if tokenizer is None else tuple(tokenizer.eos_ids)
        self._special_ids = frozenset() if tokenizer is None else tokenizer.special_ids | tokenizer.added_ids
        self._seeds = random.Random(asked.seed)
        self.run_ahead = device != HOST if asked.run_ahead is None else asked.run_ahead
        self._flights: deque[tuple[Batch, Callable[[], dict[Chunk, list[Token]]], list[Result]]] = deque()
        self.num_steps = self.num_drafted = self.num_accepted = 0
        self.warmed: Warmed | None = None  # what has been warmed up
        if warm:
            self.warm_up()

    def _make_cache(self, asked: EngineSettings, device: str) -> None:
        """The pool of blocks: as many as were asked for, or as fit, or as the longest sequences need."""
        model, num_blocks = self.model, asked.num_blocks
        self.cache_specs = specs = cache_specs(model, asked.kv_cache_dtype)
        if (beside := self._beside) is not None:
            specs = [*specs, *cache_specs(beside, asked.kv_cache_dtype)]
        block_size = cache_block_size(specs, device, asked.block_size)
        max_len = _at_most(asked.max_model_len, model.max_length, "the model's positions")
        if num_blocks is None:
            share = asked.memory_share
            memory = asked.memory if share is None else memory_left(share, device)
            size = block_size * token_bytes(specs)
            most = asked.max_num_seqs * -(-max_len // block_size)
            fit = (cache_memory(device) if memory is None else memory) // size
            num_blocks = min(most, fit if self._lead is None else self._lead.num_blocks(block_size, memory))
            if share is not None and self._lead is not None:  # other ranks' devices may have less to give
                num_blocks = min(num_blocks, self._lead.num_blocks(block_size, None))
        self.pool = BlockPool(num_blocks, block_size, use_prefix_cache=asked.use_prefix_cache)
        self.max_model_len = _at_most(asked.max_model_len, min(max_len, num_blocks * block_size), "the cache")

    def _make_runner(self, asked: EngineSettings, device: str) -> None:
        num_ranks = 1 if self._lead is None else self._lead.crew.size
        sizes: dict[str, Any] = {
            "num_blocks": self.pool.num_blocks,
            "block_size": self.pool.block_size,
            "max_len": self.max_model_len,
            "device": device,
            "use_graphs": asked.use_graphs,
            "prompt_graphs": asked.prompt_graphs,
            "max_num_seqs": asked.max_num_seqs,
            "max_rows": asked.step_tokens,
            "vocab_size": self.vocab_size,
            "kv_cache_dtype": asked.kv_cache_dtype,
        }
        sp = sequence_parallel.for_ranks(asked, num_ranks, device=device, model=self.model)
        self.runner = (Runner if self._lead is None else self._lead.runner)(self.model, **sizes, sp=sp)
        if (beside := self._beside) is not None and self.proposer is not None:
            runner = Runner(beside, **sizes, beside=self.runner)
            self.proposer.attach(self.pool, runner, max_rows=asked.step_tokens)

    @property
    def _beside(self) -> Model | None:
        """A model that drafts from the target's hidden states, with caches in the same blocks."""
        return self.proposer.beside if self.proposer is not None and self.proposer.wants_hidden else None

    def step(self) -> list[Delta]:
        """One round of the engine; what it added, sequence by sequence.

        Running ahead, the next round is launched before this one's tokens are read, so that the device never waits for
        the host. What a sequence had in that round when it turns out to be finished is dropped: it costs a row.
        """
        if not self._flights:
            self._launch()
        if self._flights and self._may_run_ahead():
            self._launch()
        if not self._flights:
            assert not self.has_work, f"nothing scheduled, and {self.stats()}"
            return []
        batch, read, results = self._flights.popleft()
        tokens = read()
        found = [delta for chunk in batch.chunks if (delta := self._finish(chunk, tokens.get(chunk))) is not None]
        if self.proposer is not None:
            self.proposer.observe(results)
        return found

    # ---- requests

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        contents: Iterable[Content] = (),
        media: List[MediaItem] = (),
    ) -> list[Sequence]:
        """Queue a prompt; one sequence for each of `params.n`. Refuses what could never run with a ValueError.

        contents: what stands behind placeholder tokens; blocks are shared where it is the same. media: pictures and
        videos in the order of their placeholders, of which the prompt has one for each feature.
        """
        params = params or SamplingParams()
        prompt_ids = self._encode(prompt)
        behind = list(contents)
        self._check(prompt_ids, params)
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
                    contents=behind,
                    placement=placement,
                    eos_ids=self.eos_ids,
                    detokenizer=self.tokenizer.detokenizer() if self.tokenizer is not None else None,
                    after=copies[0] if copies and self.pool.use_prefix_cache else None,
                )
            )
        for seq in copies:
            self.scheduler.add(seq)
        return copies

    def place(self, prompt_ids: List[int], media: List[MediaItem]) -> Placement | None:
        """Where a prompt's media stand; ValueError where they do not fit. Any thread may ask, before `add` does."""
        return place(prompt_ids, media, self.model, most=self.settings.encoder_cache)

    def abort(self, seq: Sequence) -> None:
        """Stop a sequence and free its blocks; nothing happens to one that is finished."""
        if not seq.is_finished:
            seq.finish(FinishReason.ABORT)
            self.scheduler.finish(seq)

    def forget(self) -> None:
        """Keys and values of old weights: prefixes are no longer known, and running sequences are computed again.

        `add` and `generate` call it when weights were changed in place. Call it after a change that torch does not
        count, one through `.data`.
        """
        self.scheduler.preempt_all()
        self.pool.forget()
        if self.encoder is not None:
            self.encoder.forget()

    def close(self) -> None:
        """End the other ranks, where there are any. The end of the program does it, too."""
        if self._lead is not None:
            self._lead.close()

    @property
    def sp_report(self) -> "Report | None":
        """What sequence parallelism has made of the model; None where it is off."""
        return None if self.runner.prompts is None else self.runner.prompts.report

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def generate(
        self,
        prompts: Prompt | List[Prompt],
        params: SamplingParams | List[SamplingParams] | None = None,
        *,
        media: List[List[MediaItem]] | None = None,
        progress: bool = True,
    ) -> list[Output]:
        """Outputs in the order of the prompts, the `n` of a prompt side by side. AllowError: an `allow` gave up.

        media: pictures and videos of each prompt.
        """
        sequences = self._add_all(_as_prompts(prompts), params, media)
        try:
            self._run(sequences, progress)
        finally:  # after an error or Ctrl-C nothing of this call stays behind
            for seq in sequences:
                self.abort(seq)
        return [Output.of(seq) for seq in sequences]

    def warm_up(self, kind: Kind | None = None, *, progress: bool = True) -> Warmed:
        """Compile, try and record before the first request; see `warmup`. kind: default: as the settings say."""
        work = WarmUp(self, kind or kind_for(self.settings.warmup, self.runner.device, is_server=False))
        for _ in work.run() if work.kind == "off" else shown(work.run(), progress=progress):
            pass
        return work.report

    @property
    def max_prompt_tokens(self) -> int:
        """Of one step, as things stand."""
        return self._budget.tokens

    def measure_cost(self, max_rows: int = 16, *, seconds: float = math.inf) -> dict[int, float]:
        """Seconds of a decode step by number of rows, for `DraftLength`. It ends after about `seconds`, with a shorter
        table; nothing is written to the cache."""
        counts = sorted({1, 2, 3, 4, 6, 8, 12, 16, *range(16, max_rows, 16), max_rows})
        return measure_cost(self.runner, [count for count in counts if count <= max_rows], seconds)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is held now."""
        encoder, pictures = self.encoder, {}
        if encoder is not None:
            pictures = {"num_encoded": encoder.num_encoded, "num_encoder_hits": encoder.num_hit}
            pictures["num_encoder_tokens"] = encoder.num_held
        return {
            **pictures,
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

    # ---- the parts of a step

    def _may_run_ahead(self) -> bool:
        """Drafts, penalties, masks and log-probabilities look at the tokens so far: these must have been read."""
        return self.run_ahead and self.proposer is None and all(seq.is_plain for seq in self.scheduler.running)

    def _launch(self) -> None:
        """Schedule a round and start it on the device; sequences stand as they will when it has run."""
        lookahead = self.proposer.k if self.proposer else 0
        chunks = self.scheduler.schedule(lookahead=lookahead, max_prompt_tokens=self._budget.tokens)
        work = NO_WORK if self.encoder is None else self.encoder.take()
        if not chunks and not work.jobs:
            return
        started = time.perf_counter()
        if work.jobs or work.dropped:
            self.runner.encode(work)
        batch = Batch(chunks)
        if self.proposer is not None:
            self._propose(self.proposer, batch)
        results = self.runner.run(batch)
        wanted = results if self._beside is not None else []
        self._flights.append((batch, self.sampler.start(results), wanted))
        if num_filled := sum(chunk.length for chunk in chunks if not chunk.is_decode) + work.num_tokens:
            self._budget.observe(num_filled, time.perf_counter() - started)
        for chunk in chunks:
            seq = chunk.sequence
            seq.num_computed = chunk.start + chunk.length
            seq.num_unread += chunk.is_last
            if not chunk.is_decode:  # a generated token's block is published when the host knows the token
                self.pool.publish(seq)
                if self.encoder is not None:
                    self.encoder.passed(seq)
        self.num_steps += 1

    def _propose(self, proposer: Proposer, batch: Batch) -> None:
        chunks = [chunk for chunk in batch.chunks if chunk.room > 0]
        k = self._draft_len(proposer, len(chunks))
        if k == 0 or not chunks:
            return
        for chunk, draft in zip(chunks, proposer.propose([chunk.sequence for chunk in chunks], k), strict=True):
            token_ids = draft.token_ids[: chunk.room]
            # Not of a draft that was drawn: to let a token decide whether it is tried would change the odds.
            if draft.probs is None:
                token_ids = cut(token_ids, self._special_ids)
            # A draft takes free blocks; it preempts nobody.
            while token_ids and not self.pool.grow(chunk.sequence, len(chunk.sequence.token_ids) + len(token_ids)):
                token_ids.pop()
            if not token_ids:
                self.pool.shrink(chunk.sequence)  # a proposer may have needed blocks itself
            chunk.draft = token_ids
            chunk.probs = None if draft.probs is None else draft.probs[: len(token_ids)]

    def _draft_len(self, proposer: Proposer, num_sequences: int) -> int:
        if self.num_drafted:  # a text without drafts does not wait for this
            self.measure_drafts(proposer)
        return proposer.k if self.draft_length is None else self.draft_length.choose(proposer.k, num_sequences)

    def measure_drafts(self, proposer: Proposer) -> None:
        """Once: what checking a draft costs, and what drafting does, where lengths are to follow from that."""
        if self._is_unmeasured:
            self._is_unmeasured = False
            rows = min(_COST_ROWS, self.scheduler.max_num_seqs * (proposer.k + 1))
            cost = self.measure_cost(rows, seconds=_COST_SECONDS)
            self.draft_length = DraftLength(cost, drafting=proposer.cost(seconds=_COST_SECONDS))

    def _finish(self, chunk: Chunk, tokens: list[Token] | None) -> Delta | None:
        """Take over the tokens that a chunk gave; None where it gave none, or too late."""
        seq = chunk.sequence
        if tokens is None or seq.is_finished:
            return None
        seq.num_unread -= 1
        first = len(seq.token_ids)
        if seq.error is not None:  # these tokens were sampled without a mask
            seq.finish(FinishReason.ERROR)
            tokens = []
        for token in tokens:
            seq.append(token.id, token.logprob)
            if seq.is_finished:  # what the draft holds behind the end was never generated
                break
        if chunk.draft:
            self._count(chunk, len(seq.token_ids) - first)
        if chunk.draft or seq.is_finished:
            # Rollback is this one number: all tokens but the last are in the cache, what is behind gets written over.
            seq.num_computed = min(seq.num_computed + len(chunk.draft), len(seq.token_ids) - 1)
            self.pool.shrink(seq)
        if self.settings.sp_quantize is None:  # else a prompt's tokens are rounded, and these were not
            self.pool.publish(seq)
        if seq.is_finished:
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
            raise ValueError("prompt is text, and this LLM has no tokenizer: give token ids")
        return self.tokenizer.encode(prompt)

    def _check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        limits = {"vocab_size": self.model.vocab_size, "limit": self.max_model_len}
        check_request(prompt_ids, params, **limits, has_tokenizer=self.tokenizer is not None)

    def _add_all(
        self,
        prompts: List[Prompt],
        params: SamplingParams | List[SamplingParams] | None,
        media: List[List[MediaItem]] | None,
    ) -> list[Sequence]:
        each = params if isinstance(params, list | tuple) else [params] * len(prompts)
        shown = [()] * len(prompts) if media is None else media
        if len(each) != len(prompts):
            raise ValueError(
                f"generate: {len(prompts)} prompts and {len(each)} params; give one for all or one for each"
            )
        if len(shown) != len(prompts):
            raise ValueError(f"generate: {len(prompts)} prompts and media of {len(shown)}; give a list for each prompt")
        sequences: list[Sequence] = []
        try:
            for prompt, asked, items in zip(prompts, each, shown, strict=True):
                sequences += self.add(prompt, asked, media=items)
        except ValueError:
            for seq in sequences:
                self.abort(seq)
            raise
        return sequences

    def _run(self, sequences: List[Sequence], progress: bool) -> None:
        with shown_progress(sequences, progress) as update:
            while not all(seq.is_finished for seq in sequences):
                self.step()
                update()


def _as_prompts(prompts: Prompt | List[Prompt]) -> List[Prompt]:
    """A string or a list of token ids is one prompt."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if is_one else prompts  # type: ignore[list-item, return-value]


def _at_most(asked: int | None, limit: int, what: str) -> int:
    if asked is not None and not 2 <= asked <= limit:
        raise ValueError(f"max_model_len is {asked}; {what} can hold 2 to {limit} tokens")
    return limit if asked is None else asked
