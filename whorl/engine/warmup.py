"""Before the first request: kernels are compiled, products tried and decode steps recorded for all that settings allow.

Steps of sequences that nobody asked for are laid out as any others and go through the runner and the sampler. They live
in the spare lane and write to no slot, so that nothing of them is left: no block, no prefix, no sequence, no count, no
random number. Kernels are compiled for sizes by class: a count of one, multiples of 16 and other numbers are different
to Triton, and plans change at powers of two. So of every power of two it and a larger odd number stand for the rest.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from whorl.device import HOST, synchronize

from .batch import Batch, Call, Sample
from .runner import Result
from .sampler import Sampler
from .scheduler import Chunk
from .sequence import SamplingParams, Sequence

if TYPE_CHECKING:
    from .llm import LLM

log = logging.getLogger(__name__)
Kind = Literal["full", "short", "off"]
_STRIDE = 7919  # between the ids of tokens that only cost time: of a mixture of experts they read different weights
_PRODUCT_ROWS = 128  # torch's products are tried for every multiple of it, see `ops.linear_library`
_FEW, _SOME = 8, 512  # tokens behind a prefix that the cache holds: attention has a kernel for each
_LONGER = 33  # tokens each of several prompts that attention takes as prompts
_TOP = 5  # log-probabilities to report


@dataclass(frozen=True, slots=True)
class Warming:
    """How far it is: `what` has just been done, as number `done` of `total`."""

    done: int
    total: int
    what: str


@dataclass(frozen=True, slots=True)
class Warmed:
    """kind: as it was understood; num_steps: that ran; seconds: by what they were for."""

    kind: Kind
    num_steps: int
    seconds: dict[str, float]


class Task(NamedTuple):
    """phase: record, compile, sample or draft."""

    phase: str
    what: str
    run: Callable[[], None]


def kind_for(asked: Kind | None, device: str, *, is_server: bool) -> Kind:
    """None: a server on an accelerator warms up in full. A CPU has nothing to compile or record."""
    return asked or ("full" if is_server and device != HOST else "off")


def class_sizes(limit: int, *, odd: bool = True) -> list[int]:
    """Counts up to `limit` that stand for all of them: powers of two and the limit. With `odd` there is one above each
    power that 16 divides, and one that it does not."""
    powers = [1 << i for i in range(limit.bit_length())]
    between = [*(p + p // 2 + 1 for p in powers), limit - 1, limit // 16 * 16] if odd else []
    return sorted({size for size in (*powers, *between, limit) if 1 <= size <= limit})


class WarmUp:
    """The steps of one engine. Going through `run` does them, one at a time, so that a server may stop in between."""

    def __init__(self, llm: "LLM", kind: Kind) -> None:
        self.llm, self.kind = llm, kind
        self.num_steps = 0
        self.seconds: dict[str, float] = {}
        self._is_full = kind == "full"
        self._lane = llm.scheduler.max_num_seqs  # the runner's spare one
        self._most_seqs = llm.scheduler.max_num_seqs
        self._sampler = Sampler(llm.model, llm.vocab_size)  # the engine's own keeps what requests bring
        # A prompt leaves room for a token of the answer.
        self._most_tokens = min(llm.max_prompt_tokens, llm.max_model_len - 1)

    def run(self) -> Iterator[Warming]:
        tasks = [] if self.kind == "off" else list(self.tasks())
        if tasks and self.llm.has_work:
            raise ValueError("warm-up: requests are running; warm up before the first one")
        for number, task in enumerate(tasks, 1):
            start = time.perf_counter()
            task.run()
            synchronize(self.llm.runner.device)
            self.seconds[task.phase] = self.seconds.get(task.phase, 0.0) + time.perf_counter() - start
            yield Warming(number, len(tasks), task.what)
        if tasks:
            self.llm.warmed = self.report

    @property
    def report(self) -> Warmed:
        return Warmed(self.kind, self.num_steps, dict(self.seconds))

    def tasks(self) -> Iterator[Task]:
        yield from self._decoding()
        yield from self._prompts()
        yield from self._mixed()
        yield from self._sampling()
        yield from self._drafting()

    # ---- what runs

    def _decoding(self) -> Iterator[Task]:
        """All that are recorded; where nothing is recorded, classes of sizes."""
        runner, num_drafted = self.llm.runner, self.llm.proposer.k if self.llm.proposer else 0
        sizes = runner.graph_sizes(min(self._most_seqs * (num_drafted + 1), self.llm.settings.step_tokens))
        lengths = sorted({keys for _, keys in sizes})
        if not sizes:
            lengths = self._contexts()
            sizes = [(rows, keys) for keys in lengths for rows in class_sizes(self._most_seqs, odd=self._is_full)]
        for rows, keys in sizes:
            if self._is_full or keys == lengths[0]:
                what = f"decode {rows} of up to {keys} keys"
                yield Task("record", what, partial(self._decode, rows, keys, num_drafted))

    def _prompts(self) -> Iterator[Task]:
        """One prompt of each size; several; and ends of prompts whose beginning is in the cache."""
        most = self._most_tokens
        sizes = set(class_sizes(most, odd=self._is_full))
        if self._is_full:
            sizes |= set(range(_PRODUCT_ROWS, most + 1, _PRODUCT_ROWS))
        for size in sorted(sizes):
            yield self._fill(f"prompt of {size}", [(0, size)])
        for count in class_sizes(self._most_seqs, odd=self._is_full)[1:]:
            for each in (2, _LONGER) if self._is_full else (2,):
                if count * each <= most:
                    yield self._fill(f"{count} prompts of {each}", [(0, each)] * count)
        for context in self._contexts():
            for size in (_FEW, min(_SOME, most)) if self._is_full else (_FEW,):
                if context > size and size <= most:
                    yield self._fill(f"prompt of {context}, all but {size} cached", [(context - size, size)])

    def _mixed(self) -> Iterator[Task]:
        """Prompts beside sequences that decode."""
        pairs = [(1, 1), (self._most_seqs, self._most_tokens)]
        if self._is_full:
            pairs += [(self._most_seqs, 1), (1, self._most_tokens)]
        for rows, size in dict.fromkeys(
            (rows, min(size, self.llm.settings.step_tokens - rows)) for rows, size in pairs
        ):
            if size > 0:
                what = f"decode {rows} beside a prompt of {size}"
                yield Task("compile", what, partial(self._mix, rows, size))

    def _sampling(self) -> Iterator[Task]:
        """What the sampler does behind a call: greedy and filtered rows are part of the call itself."""
        variants = {
            "penalties": SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
            "biases": SamplingParams(logit_bias={0: 1.0}, min_tokens=1, stop_token_ids=(0,)),
            "masks": SamplingParams(allow=lambda ids: torch.ones(self.llm.vocab_size, dtype=torch.bool)),
            "log-probabilities": SamplingParams(logprobs=_TOP),
        }
        sizes = class_sizes(self._most_seqs, odd=True) if self._is_full else sorted({1, self._most_seqs})
        for name, params in variants.items():
            for count in sizes:
                yield Task("sample", f"{name} of {count}", partial(self._sample, count, params))
        size = min(self._most_tokens, _LONGER)
        if size > 1:
            params = SamplingParams(prompt_logprobs=_TOP)
            yield Task("sample", f"scores of a prompt of {size}", partial(self._score, size, params))

    def _drafting(self) -> Iterator[Task]:
        """What a proposer runs itself, and the table of what checking a draft costs."""
        proposer = self.llm.proposer
        if proposer is None:
            return
        for what, run in proposer.warm_up(self._most_seqs):
            yield Task("draft", what, run)
        count = min(self._most_seqs, self.llm.settings.step_tokens // (proposer.k + 1))
        if count and self.llm.max_model_len > proposer.k + 2:  # more rows than a recording has, it may be
            yield Task("draft", f"check {count} drafts", partial(self._check_drafts, count, proposer.k))
        yield Task("draft", "cost of drafts", partial(self.llm.measure_drafts, proposer))

    def _contexts(self) -> list[int]:
        """Lengths of sequences that stand for all. Tables of blocks are as wide as the longest sequence needs."""
        most, block = self.llm.max_model_len, self.llm.pool.block_size
        widths = class_sizes(-(-most // block), odd=self._is_full)
        return [min(width * block, most) for width in (widths if self._is_full else [widths[-1]])]

    # ---- how

    def _fill(self, what: str, prompts: List[tuple[int, int]]) -> Task:
        """prompts: tokens in the cache before, and new ones."""
        return Task("compile", what, partial(self._prompt, prompts))

    def _prompt(self, prompts: List[tuple[int, int]]) -> None:
        self._step(self._filling(prompts))

    def _decode(self, rows: int, keys: int, num_drafted: int) -> None:
        self._step(self._chunks(rows, keys, 1))
        if num_drafted and keys > num_drafted and (count := rows // (num_drafted + 1)):
            self._step(self._chunks(count, keys - num_drafted, 1, draft=num_drafted))

    def _check_drafts(self, count: int, num_drafted: int) -> None:
        self._step(self._chunks(count, 2, 1, draft=num_drafted))

    def _mix(self, rows: int, size: int) -> None:
        self._step(self._chunks(rows, 2, 1) + self._filling([(0, size)]))

    def _filling(self, prompts: Iterable[tuple[int, int]]) -> list[Chunk]:
        each = [self._chunks(1, before + new, new, is_prompt=True) for before, new in prompts]
        return [chunk for chunks in each for chunk in chunks]

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
        """`count` times the last `num_new` tokens of one sequence of `length`: in the spare lane all may be the same.
        Whoever decodes has a prompt of one token less."""
        tokens = (np.arange(length) * _STRIDE % self.llm.vocab_size).tolist()
        prompt_len = length if is_prompt else length - 1
        seq = Sequence(tokens[:prompt_len] or tokens, params or SamplingParams(), max_len=length + draft + 1)
        seq.token_ids, seq.lane = tokens, self._lane
        seq.block_table = [0] * self.llm.pool.blocks_for(length + draft)
        seq.num_computed = length - num_new
        chunks = [Chunk(seq, num_new) for _ in range(count)]
        for chunk in chunks:
            chunk.draft = tokens[:1] * draft
        return chunks

    def _step(self, chunks: List[Chunk]) -> None:
        """Through the runner and the sampler, to the tokens on the host."""
        self.num_steps += 1
        self._sampler.start(self.llm.runner.run(_Unwritten(chunks)))()

    def _sample(self, count: int, params: SamplingParams) -> None:
        """Rows of logits that no model has made: what is sampled from them is nobody's."""
        device, chunks = self.llm.runner.device, self._chunks(count, 2, 1, params=params)
        logits = torch.zeros(count, self.llm.model.vocab_size, dtype=torch.float32, device=device)
        ids = torch.zeros(count, dtype=torch.int64, device=device)
        self.num_steps += 1
        self._sampler.start([Result([Sample(chunk, 0, 1) for chunk in chunks], logits, ids, [], logits)])()

    def _score(self, size: int, params: SamplingParams) -> None:
        self._step(self._chunks(1, size, size, is_prompt=True, params=params))


def shown(steps: Iterator[Warming], *, progress: bool = True) -> Iterator[Warming]:
    """The same, under a bar on a terminal; elsewhere a line of the log for every quarter."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    is_bar = progress and console.is_terminal
    columns = (TextColumn("warming up"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    text = TextColumn("{task.description}")
    with Progress(*columns, text, console=console, transient=True, disable=not is_bar) as bar:
        task = bar.add_task("", total=None)
        for at in steps:
            bar.update(task, completed=at.done, total=at.total, description=at.what)
            if not is_bar and 4 * at.done // at.total > 4 * (at.done - 1) // at.total:
                log.info("warming up: %d of %d steps", at.done, at.total)
            yield at


class _Unwritten(Batch):
    """A step that leaves the cache as it is."""

    def calls(self, block_size: int, table_width: int) -> list[Call]:
        found = super().calls(block_size, table_width)
        for call in found:
            call.arrays = {**call.arrays, "slots": np.full(call.size[0], -1)}
        return found
