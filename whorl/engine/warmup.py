"""Warm-up before the first request: compile kernels, tune matrix products and record decode steps as graphs.

It runs steps of dummy sequences through the runner and the sampler, for all sizes that the settings allow. The dummies
use the spare lane and write to no slot, so they leave nothing: no block, prefix, sequence, counter or random number.
A step has several sizes: tokens, sequences, samples and the longest context. Kernels depend on one of them each, so it
is enough to run through the classes of each size by itself (`class_sizes`); tests/engine/test_ready.py checks that
nothing is left.
"""

import itertools
import logging
import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from whorl.device import HOST, synchronize

from . import graph_sizes
from .batch import Batch
from .call import Call, Sample
from .dummy_calls import STRIDE
from .runner import Result
from .sampler import Sampler
from .sampling_params import SamplingParams
from .scheduler import Chunk
from .sequence import Sequence

if TYPE_CHECKING:
    from .llm import LLM

log = logging.getLogger(__name__)
Kind = Literal["full", "short", "off"]
_FEW, _SOME = 8, 512  # new tokens after a cached prefix: attention has a kernel for each case
_LONGER = 17  # tokens of each of several prompts from which the prompt kernel of attention runs
_NUM_LOGPROBS = 5  # log-probabilities to report
_SCORED = (2, 9, 33, 100, 200)  # tokens of prompts that are scored: the head multiplies up to 256 of them at once


@dataclass(frozen=True, slots=True)
class Warming:
    """Progress of the warm-up: task number `done` of `total` has just finished."""

    done: int
    total: int
    description: str


@dataclass(frozen=True, slots=True)
class Warmed:
    """Report of a warm-up. kind: the kind that ran; num_steps: steps that ran; seconds: time by phase."""

    kind: Kind
    num_steps: int
    seconds: dict[str, float]


class Task(NamedTuple):
    """One task of the warm-up. phase: record, compile, sample or draft."""

    phase: str
    description: str
    run: Callable[[], None]


def kind_for(kind: Kind | None, device: str, *, is_server: bool) -> Kind:
    """Return `kind`, or the default for None: "full" for a server on an accelerator, else "off". A CPU has nothing to
    compile or record."""
    return kind or ("full" if is_server and device != HOST else "off")


class WarmUp:
    """The warm-up of one engine. Iterating over `run` does one task at a time, so that a server may stop in between."""

    def __init__(self, llm: "LLM", kind: Kind) -> None:
        self.llm, self.kind = llm, kind
        self.num_steps = 0
        self.seconds: dict[str, float] = {}
        self._is_full = kind == "full"
        self._slot = -1  # of the adapter of dummy sequences
        self._lane = llm.scheduler.max_num_seqs  # the runner's spare lane
        self._most_seqs = llm.scheduler.max_num_seqs
        self._num_drafted = llm.proposer.k if llm.proposer else 0
        self._sampler = Sampler(llm.runner, llm.vocab_size)  # the engine's sampler holds the state of requests
        self._longest = llm.max_model_len - 1  # a prompt leaves room for one generated token
        most_tokens = min(llm.max_prompt_tokens, llm.settings.step_tokens)
        self._most_tokens = min(most_tokens, self._most_seqs * self._longest)
        lengths = contexts(llm.max_model_len, llm.pool.block_size)
        self._contexts = lengths if self._is_full else lengths[-1:]

    def run(self) -> Iterator[Warming]:
        """Run the tasks; yield the progress after each."""
        tasks = [] if self.kind == "off" else list(self.tasks())
        if tasks and self.llm.has_work:
            raise ValueError("warm-up: requests are running; warm up before the first request")
        for number, task in enumerate(tasks, 1):
            start = time.perf_counter()
            task.run()
            synchronize(self.llm.runner.device)
            self.seconds[task.phase] = self.seconds.get(task.phase, 0.0) + time.perf_counter() - start
            yield Warming(number, len(tasks), task.description)
        if tasks:
            self.llm.warmed = self.report

    @property
    def report(self) -> Warmed:
        return Warmed(self.kind, self.num_steps, dict(self.seconds))

    def tasks(self) -> Iterator[Task]:
        yield from self._decoding()
        yield from self._recorded_prompts()
        yield from self._prompts()
        yield from self._mixed()
        yield from self._sampling()
        yield from self._drafting()
        yield from self._adapted() if self.llm.adapters.by_name else ()

    # ---- the tasks

    def _decoding(self) -> Iterator[Task]:
        """Decode steps: every size that is recorded, and one size of each class of those that are not."""
        most_tokens = min(self._most_seqs * (self._num_drafted + 1), self.llm.settings.step_tokens)
        sizes = self.llm.runner.graphs.decoding_sizes(most_tokens)
        lengths = sorted({keys for _, keys in sizes}) or self._contexts
        largest = max((count for count, _ in sizes), default=0)
        larger = [count for count in counts(most_tokens, is_full=self._is_full) if count > largest]
        sizes += [(count, keys) for keys in lengths for count in larger]
        for count, keys in sizes:
            if self._is_full or keys == lengths[0]:
                description = f"decode {count} of up to {keys} keys"
                yield Task("record", description, partial(self._decode, count, keys, self._num_drafted))

    def _recorded_prompts(self) -> Iterator[Task]:
        """Prompts for every graph that is recorded for them, alone and beside decoding sequences."""
        sizes, step_tokens = self.llm.runner.graphs.prompt_sizes(), self.llm.settings.step_tokens
        most_decoding = min((self._most_seqs - 1) * (self._num_drafted + 1), step_tokens - 1)
        for beside in smallest_beside(most_decoding):
            most_tokens, most_prompts = min(self._most_tokens, step_tokens - beside), self._most_seqs - (beside > 0)
            for lengths in recorded_prompts(sizes, most_tokens, most_prompts, self._longest):
                chunks = self._filling((0, length) for length in lengths) + self._chunks(beside, 2, 1)
                yield Task("record", f"prompts of {sum(lengths)} beside {beside}", partial(self._step, chunks))

    def _prompts(self) -> Iterator[Task]:
        """Prompts that are not recorded, by tokens and by sequences; and the ends of prompts with a cached prefix."""
        max_tokens = self._most_tokens
        for size in counts(max_tokens, is_full=self._is_full):
            yield self._fill(f"prompt of {size}", split(size, self._longest))
        for count in counts(self._most_seqs, is_full=self._is_full)[1:]:
            for length in (1, 2) if self._is_full else (2,):
                if count * length <= max_tokens and length <= self._longest:
                    yield self._fill(f"{count} prompts of {length}", [(0, length)] * count)
        for count in sequence_classes(self._most_seqs)[1:] if self._is_full else []:
            if count * _LONGER <= max_tokens and self._longest >= _LONGER:
                yield self._fill(f"{count} longer prompts", [(0, _LONGER)] * count)
        for context in self._contexts:
            for size in (_FEW, min(_SOME, max_tokens)) if self._is_full else (_FEW,):
                if context > size and size <= max_tokens:
                    yield self._fill(f"prompt of {context}, all but {size} cached", [(context - size, size)])

    def _mixed(self) -> Iterator[Task]:
        """Steps with both prompts and decoding sequences."""
        pairs = [(1, 1), (self._most_seqs, self._most_tokens)]
        if self._is_full:
            pairs += [(self._most_seqs, 1), (1, self._most_tokens)]
        step_tokens = self.llm.settings.step_tokens
        for count, size in dict.fromkeys((count, min(size, step_tokens - count)) for count, size in pairs):
            if size > 0:
                yield Task("compile", f"decode {count} beside a prompt of {size}", partial(self._mix, count, size, 2))
        for count in sequence_classes(self._most_seqs) if self._is_full else []:
            if count < step_tokens:
                description = f"decode {count} of {self._contexts[-1]} keys beside a prompt"
                yield Task("compile", description, partial(self._mix, count, 1, self._contexts[-1]))

    def _sampling(self) -> Iterator[Task]:
        """What the sampler does after a call; greedy and filtered sampling are part of the call itself."""
        variants = {
            "penalties": SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
            "biases": SamplingParams(logit_bias={0: 1.0}, min_tokens=1, stop_token_ids=(0,)),
            "masks": SamplingParams(allow=lambda ids: torch.ones(self.llm.vocab_size, dtype=torch.bool)),
            "log-probabilities": SamplingParams(logprobs=_NUM_LOGPROBS),
        }
        sizes = class_sizes(self._most_seqs, odd=True) if self._is_full else sorted({1, self._most_seqs})
        for name, params in variants.items():
            for count in sizes:
                yield Task("sample", f"{name} of {count}", partial(self._sample, count, params))
        params, longest = SamplingParams(prompt_logprobs=_NUM_LOGPROBS), min(self._most_tokens, self._longest)
        for size in sorted({min(size, longest) for size in (_SCORED if self._is_full else (_LONGER,))}):
            if size > 1:
                yield Task("sample", f"scores of a prompt of {size}", partial(self._score, size, params))

    def _drafting(self) -> Iterator[Task]:
        """The calls that a proposer makes, and the measurement of the cost of verifying a draft."""
        proposer = self.llm.proposer
        if proposer is None:
            return
        for description, run in proposer.warm_up(self._most_seqs):
            yield Task("draft", description, run)
        count = min(self._most_seqs, self.llm.settings.step_tokens // (proposer.k + 1))
        if count and self.llm.max_model_len > proposer.k + 2:  # may be more tokens than any recorded graph has
            chunks = self._chunks(count, 2, 1, draft=proposer.k)
            yield Task("draft", f"check {count} drafts", partial(self._step, chunks))
        yield Task("draft", "cost of drafts", partial(self.llm.measure_drafts, proposer))

    def _adapted(self) -> Iterator[Task]:
        """What is recorded once more for steps in which sequences have adapters, and a prompt that is not recorded."""
        prompt = self._fill(f"prompt of {self._most_tokens}", split(self._most_tokens, self._longest))
        for task in (*self._decoding(), *self._recorded_prompts(), prompt):
            yield task._replace(description=f"{task.description}, adapters", run=partial(self._with_adapter, task.run))

    def _with_adapter(self, run: Callable[[], None]) -> None:
        """Run a task with sequences that have an adapter, in a lane that has none."""
        self._slot = 0
        try:
            run()
        finally:
            self._slot = -1

    # ---- running dummy sequences

    def _fill(self, description: str, prompts: abc.Sequence[tuple[int, int]]) -> Task:
        """Return a task that computes prompts. prompts: for each, how many tokens are cached and how many are new."""
        return Task("compile", description, partial(self._prompt, prompts))

    def _prompt(self, prompts: abc.Sequence[tuple[int, int]]) -> None:
        """Run a step with these prompts, see `_fill`, as if its size were not recorded."""
        self._step(self._filling(prompts), is_eager=True)

    def _decode(self, num_tokens: int, keys: int, num_drafted: int) -> None:
        """Run a decode step of `num_tokens` sequences of `keys` tokens; with drafts also one that verifies drafts."""
        self._step(self._chunks(num_tokens, keys, 1))
        if num_drafted and keys > num_drafted and (count := num_tokens // (num_drafted + 1)):
            self._step(self._chunks(count, keys - num_drafted, 1, draft=num_drafted))

    def _mix(self, count: int, size: int, keys: int) -> None:
        """Run a step of `count` decoding sequences of `keys` tokens and of prompts of `size` tokens together."""
        self._step(self._chunks(count, keys, 1) + self._filling(split(size, self._longest)), is_eager=True)

    def _filling(self, prompts: Iterable[tuple[int, int]]) -> list[Chunk]:
        """Return a chunk for each prompt, see `_fill`."""
        groups = [self._chunks(1, num_cached + new, new, is_prompt=True) for num_cached, new in prompts]
        return [chunk for chunks in groups for chunk in chunks]

    def _chunks(
        self,
        count: int,
        length: int,
        num_new: int,
        *,
        is_prompt: bool = False,
        draft: int = 0,
        params: SamplingParams | None = None,
    ) -> list[Chunk]:
        """Return `count` chunks, each of the last `num_new` tokens of a sequence of `length` tokens and a draft of
        `draft`. All share one sequence, in the spare lane; its last token is generated unless is_prompt."""
        if (states := self.llm.pool.states) is not None and (is_prompt or draft):  # these start on the grid
            length -= (length - num_new) % states.grid
            draft = min(draft, states.draft_room(length - num_new))
        tokens = (np.arange(length) * STRIDE % self.llm.vocab_size).tolist()
        prompt_len = length if is_prompt else length - 1
        seq = Sequence(tokens[:prompt_len] or tokens, params or SamplingParams(), max_len=length + draft + 1)
        seq.token_ids, seq.lane, seq.slot = tokens, self._lane, self._slot
        seq.block_table = [0] * self.llm.pool.blocks_for(length + draft)
        seq.num_computed = length - num_new
        chunks = [Chunk(seq, num_new) for _ in range(count)]
        for chunk in chunks:
            chunk.draft = tokens[:1] * draft
        return chunks

    def _step(self, chunks: abc.Sequence[Chunk], *, is_eager: bool = False) -> None:
        """Run a step through the runner and the sampler until its tokens are on the host. is_eager: as in `Batch`."""
        self.num_steps += 1
        self._sampler.start(self.llm.runner.run(_Unwritten(chunks, is_eager=is_eager)))()

    def _sample(self, count: int, params: SamplingParams) -> None:
        """Sample from logits of zeros; the tokens are discarded."""
        device, chunks = self.llm.runner.device, self._chunks(count, 2, 1, params=params)
        logits = torch.zeros(count, self.llm.model.vocab_size, dtype=self.llm.model.dtype, device=device)
        ids = torch.zeros(count, dtype=torch.int64, device=device)
        self.num_steps += 1
        self._sampler.start([Result([Sample(chunk, 0, 1) for chunk in chunks], logits, ids, [], logits)])()

    def _score(self, size: int, params: SamplingParams) -> None:
        self._step(self._chunks(1, size, size, is_prompt=True, params=params))


def shown(
    steps: Iterator[Warming], *, progress: bool = True, say: Callable[[str], None] = log.info
) -> Iterator[Warming]:
    """Yield the items of `steps`, and show a progress bar on a terminal, else say a line for every quarter of them."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    is_bar = progress and console.is_terminal
    columns = (TextColumn("warming up"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    text = TextColumn("{task.description}")
    with Progress(*columns, text, console=console, transient=True, disable=not is_bar) as bar:
        task = bar.add_task("", total=None)
        for step in steps:
            bar.update(task, completed=step.done, total=step.total, description=step.description)
            if not is_bar and 4 * step.done // step.total > 4 * (step.done - 1) // step.total:
                say(f"warming up: {step.done} of {step.total} steps ({step.description})")
            yield step


class _Unwritten(Batch):
    """A batch whose calls write nothing to the cache."""

    def calls(self, block_size: int, table_width: int, *, is_joined: bool = False) -> list[Call]:
        calls = super().calls(block_size, table_width, is_joined=is_joined)
        for call in calls:
            call.arrays = {**call.arrays, "slots": np.full(call.size[0], -1)}
        return calls


# ---- sizes that represent all others

# Triton compiles a kernel for classes of sizes: one, multiples of 16 and other numbers; launch plans change at powers
# of two. So for every power of two, that power and a larger odd number represent all sizes up to the next.
_PRODUCT_ROWS = 128  # torch's matrix products are tuned for every multiple of it, see `ops.linear_library`
# Attention of prompts has a kernel for few sequences, one for many, and one for each power of two above.
_FEW_SEQUENCES, _MANY_SEQUENCES = 32, 256


def class_sizes(limit: int, *, odd: bool = True) -> list[int]:
    """Return counts up to `limit` that represent all of them: powers of two and the limit. With `odd` also a count
    between two powers, the largest multiple of 16 and the limit less one."""
    powers = [1 << i for i in range(limit.bit_length())]
    between = [*(p + p // 2 + 1 for p in powers), limit - 1, limit // 16 * 16] if odd else []
    return sorted({size for size in (*powers, *between, limit) if 1 <= size <= limit})


def counts(limit: int, *, is_full: bool) -> list[int]:
    """Return numbers of tokens or samples up to `limit` that represent all: `class_sizes`, in a full warm-up with all
    sizes of products."""
    products = range(_PRODUCT_ROWS, limit + 1, _PRODUCT_ROWS) if is_full else ()
    return sorted({*class_sizes(limit, odd=is_full), *products})


def sequence_classes(limit: int) -> list[int]:
    """Return the smallest number of sequences up to `limit` for each kernel of attention of prompts."""
    powers = [1 << i for i in range(limit.bit_length()) if 1 << i >= _MANY_SEQUENCES]
    return [size for size in (1, _FEW_SEQUENCES + 1, *(p + 1 for p in powers)) if size <= limit]


def contexts(max_model_len: int, block_size: int) -> list[int]:
    """Return lengths of sequences that represent all. A call's block tables are as wide as its longest sequence."""
    widths = class_sizes(-(-max_model_len // block_size))
    return [min(width * block_size, max_model_len) for width in widths]


def split(size: int, longest: int) -> list[tuple[int, int]]:
    """Return prompts of `size` tokens together, as few as their longest length allows; for each, how many tokens are
    cached (none) and how many are new."""
    full, rest = divmod(size, longest)
    return [(0, longest)] * full + [(0, rest)] * (rest > 0)


def recorded_prompts(sizes: list[tuple[int, int]], most_tokens: int, most_seqs: int, longest: int) -> list[list[int]]:
    """Return the lengths of prompts that need each graph that can occur. sizes: tokens and sequences of each graph.

    A call takes the smallest graph with room for its tokens and its sequences, so one is needed by more tokens or by
    more sequences than the graph before it has room for.
    """
    calls, smaller = [], (0, 0)
    for tokens, sequences in sizes:
        count = min(tokens, most_tokens, min(sequences, most_seqs) * longest)
        if count > smaller[0]:
            calls.append([new for _, new in split(count, longest)])
        elif smaller[1] < sequences and smaller[1] < min(most_seqs, most_tokens):
            calls.append([1] * (smaller[1] + 1))
        smaller = tokens, sequences
    return calls


def smallest_beside(most_tokens: int) -> list[int]:
    """Return the smallest number of decoding tokens, up to `most_tokens`, for each size of graphs that prompts share
    with them; 0 is for prompts alone."""
    return [0, *(size + 1 for size, _ in itertools.pairwise(graph_sizes.BESIDE) if size < most_tokens)]
