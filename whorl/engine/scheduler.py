"""Which tokens run in the next step: decoding first, then what is left of the budget for everything else.

Only decoding sequences ever ask for new blocks: a sequence gets blocks for all its known tokens when it is admitted.
So when the cache is full the sequence admitted last gives way before it has a place in the step.
"""

from collections import deque
from dataclasses import dataclass, field

from .blocks import BlockPool
from .sequence import Sequence


@dataclass(slots=True, eq=False)
class Chunk:
    """`length` tokens of one role from the sequence's first uncomputed one, and a draft of up to `room` behind them."""

    sequence: Sequence
    length: int
    room: int = 0
    draft: list[int] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.sequence.num_computed

    @property
    def is_last(self) -> bool:
        """Whether the chunk reaches the last known token, so that its logits give the next one."""
        return self.length == self.sequence.num_pending


class Scheduler:
    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}, expected at least 1")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs {max_num_seqs}: "
                "every running sequence decodes a token in each step"
            )
        self.pool = pool
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self, *, lookahead: int = 0) -> list[Chunk]:
        """The next step's chunks; each sequence has at most one. lookahead: the longest draft wanted."""
        decoding = self._decode()
        budget = self.max_num_batched_tokens - len(decoding)
        filling: list[Chunk] = []
        for seq in self.running:
            if seq.num_pending > 1 or not seq.is_decoding:
                budget -= self._fill(seq, budget, filling)
        for seq in self._admissible():
            if budget <= 0 or len(self.running) >= self.max_num_seqs:
                break
            # A block for each running sequence, so that admitting does not preempt in the next step.
            if not self.pool.admit(seq, reserve=len(self.running)):
                break
            self.waiting.remove(seq)
            self.running.append(seq)
            if not seq.num_preempted:
                seq.num_cached = seq.num_computed
            budget -= self._fill(seq, budget, filling)
        for i, chunk in enumerate(decoding):
            left = chunk.sequence.max_len - len(chunk.sequence.token_ids)
            # One token comes without a draft. Drafts take what useful work leaves, in equal parts.
            chunk.room = max(0, min(lookahead, left - 1, -(-budget // (len(decoding) - i))))
            budget -= chunk.room
        return decoding + filling

    def finish(self, seq: Sequence) -> None:
        """Take a finished or aborted sequence out; what it computed stays shareable."""
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self.pool.release(seq)

    def _decode(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for seq in list(self.running):
            if seq in self.running and seq.num_pending == 1 and seq.is_decoding and self._make_room(seq):
                chunks.append(Chunk(seq, 1))
        return chunks

    def _make_room(self, seq: Sequence) -> bool:
        while not self.pool.grow(seq, len(seq.token_ids)):
            last = self.running[-1]
            self._preempt(last)
            if last is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq)
        self.waiting.appendleft(seq)
        seq.num_preempted += 1
        self.num_preemptions += 1

    def _fill(self, seq: Sequence, budget: int, chunks: list[Chunk]) -> int:
        length = min(seq.run_len(), budget)
        if length > 0:
            chunks.append(Chunk(seq, length))
        return length

    def _admissible(self) -> list[Sequence]:
        """In order of arrival; copies of a prompt wait until the first has it in the cache, then share it."""
        return [
            seq
            for seq in self.waiting
            if seq.after is None or seq.after.is_finished or seq.after.num_computed >= seq.prompt_len
        ]
