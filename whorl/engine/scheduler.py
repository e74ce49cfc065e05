"""Which tokens run in the next step: decoding first, then what is left of the budget for everything else.

Only decoding sequences ever ask for new blocks: a sequence gets blocks for all its known tokens when it is admitted.
So when the cache is full the sequence admitted last gives way before it has a place in the step.
"""

from collections import deque
from typing import TYPE_CHECKING

from .blocks import BlockPool
from .encoder import Encoder
from .sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class Chunk:
    """`length` tokens from `start` on, and a draft of up to `room` behind them.

    is_last: it reaches the sequence's last token, so that its logits give the next one; is_new: the sequence's first
    since it was admitted. All is said when the chunk is made: later the sequence may be further.
    """

    __slots__ = ("draft", "is_last", "is_new", "length", "probs", "room", "sequence", "start")

    def __init__(self, sequence: Sequence, length: int, *, is_new: bool = False) -> None:
        self.sequence, self.length, self.is_new = sequence, length, is_new
        self.start = sequence.num_computed
        self.is_last = length == sequence.num_pending
        self.room = 0
        self.draft: list[int] = []
        self.probs: Tensor | None = None  # [draft, V] that the draft's tokens were drawn from, see `speculate.Draft`

    @property
    def is_decode(self) -> bool:
        """Whether it computes the last token alone, one that was generated, and what is drafted behind it."""
        return self.is_last and self.length == 1 and self.start >= self.sequence.prompt_len


class Scheduler:
    def __init__(
        self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int, encoder: Encoder | None = None
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}, expected at least 1")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs {max_num_seqs}: "
                "every running sequence decodes a token in each step"
            )
        self.pool, self.encoder = pool, encoder
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._lanes = list(range(max_num_seqs))[::-1]  # free ones; every running sequence has its own
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self, *, lookahead: int = 0, max_prompt_tokens: int | None = None) -> list[Chunk]:
        """The next step's chunks; each sequence has at most one. lookahead: the longest draft wanted.

        max_prompt_tokens: of all that do more than decode one token, and of the encoder's work, which waits there to be
        taken; None: what the step has room for.
        """
        decoding = self._decode()
        budget = self.max_num_batched_tokens - len(decoding)
        if max_prompt_tokens is not None:
            budget = min(budget, max_prompt_tokens)
        filling: list[Chunk] = []
        for seq in self.running:
            if seq.num_pending > 1 or not seq.is_decoding:
                budget -= self._fill(seq, budget, filling)
        self._admit(budget, filling)
        if lookahead:
            budget = self.max_num_batched_tokens - sum(chunk.length for chunk in (*decoding, *filling))
            for i, chunk in enumerate(decoding):
                left = chunk.sequence.max_len - chunk.sequence.length
                # One token comes without a draft. Drafts take what useful work leaves, in equal parts.
                chunk.room = max(0, min(lookahead, left - 1, -(-budget // (len(decoding) - i))))
                budget -= chunk.room
        return decoding + filling

    def finish(self, seq: Sequence) -> None:
        """Take a finished or aborted sequence out; what it computed stays shareable."""
        if seq.lane < 0:
            self.waiting.remove(seq)
        else:
            self._stop(seq)

    def preempt_all(self) -> None:
        for seq in reversed(list(self.running)):  # so that they wait in the order of their admission
            self._preempt(seq)

    def _decode(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for seq in list(self.running):
            # One that another has just preempted has no lane. Where the last token it may have is under way, wait.
            if seq.lane < 0 or seq.num_pending != 1 or not seq.is_decoding or seq.length >= seq.max_len:
                continue
            if self._make_room(seq):
                chunks.append(Chunk(seq, 1))
        return chunks

    def _make_room(self, seq: Sequence) -> bool:
        while not self.pool.grow(seq, seq.length):
            last = self.running[-1]
            self._preempt(last)
            if last is seq:
                return False
        return True

    def _stop(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq)
        if self.encoder is not None:
            self.encoder.release(seq)
        self._lanes.append(seq.lane)
        seq.lane = -1

    def _preempt(self, seq: Sequence) -> None:
        self._stop(seq)
        self.waiting.appendleft(seq)
        seq.num_preempted += 1
        self.num_preemptions += 1

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        if not self.waiting or budget <= 0 or not self._lanes:
            return
        for seq in self._admissible():
            if budget <= 0 or not self._lanes or seq.num_unread:  # preempted with a token under way: not known here yet
                break
            # A block for each running sequence, so that admitting does not preempt in the next step.
            if not self.pool.admit(seq, reserve=len(self.running)):
                break
            self.waiting.remove(seq)
            self.running.append(seq)
            seq.lane, seq.is_new = self._lanes.pop(), True
            if not seq.num_preempted:
                seq.num_cached = seq.num_computed
            budget -= self._fill(seq, budget, chunks)

    def _fill(self, seq: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """What of the budget the sequence takes: tokens, and pictures that are encoded for it."""
        if budget <= 0:
            return 0
        room, cost = (budget, 0) if self.encoder is None else self.encoder.reach(seq, budget)
        length = min(seq.num_pending, room)
        if length > 0:
            chunks.append(Chunk(seq, length, is_new=seq.is_new))
            seq.is_new = False
        return length + cost

    def _admissible(self) -> list[Sequence]:
        """In order of arrival; copies of a prompt wait until the first has it in the cache, then share it."""
        return [
            seq
            for seq in self.waiting
            if seq.after is None or seq.after.is_finished or seq.after.num_computed >= seq.prompt_len
        ]
