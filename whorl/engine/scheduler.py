"""The scheduler chooses the tokens of the next step: decoding sequences first, then prompts within the budget.

A sequence gets blocks for all its known tokens when it is admitted, so only decoding sequences need further ones. If
none is free, the running sequence that was admitted last is preempted: it gives up its blocks and waits again.
Sequences are scheduled in order of admission, so it has no chunk in this step yet.
"""

from collections import deque
from typing import TYPE_CHECKING

from .blocks import BlockPool
from .encoder import Encoder
from .sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class Chunk:
    """The tokens of one sequence that a step computes: `length` tokens from index `start` on, then those of `draft`.

    room: the longest draft that the step allows. is_last: the chunk includes the sequence's last token, so the next
    token is sampled from its logits. is_new: it is the first chunk since the sequence was admitted, so the block table
    must be sent to the device. start, is_last and is_new are copied when the chunk is created, because the sequence may
    advance before the chunk's results are read.
    """

    __slots__ = ("draft", "is_last", "is_new", "length", "probs", "room", "sequence", "start")

    def __init__(self, sequence: Sequence, length: int, *, is_new: bool = False) -> None:
        self.sequence, self.length, self.is_new = sequence, length, is_new
        self.start = sequence.num_computed
        self.is_last = length == sequence.num_pending
        self.room = 0
        self.draft: list[int] = []
        self.probs: Tensor | None = None  # [draft, V] that the draft was sampled from, see `speculate.Draft`

    @property
    def is_decode(self) -> bool:
        """Whether it computes only the last token, a generated one, and the draft after it."""
        return self.is_last and self.length == 1 and self.start >= self.sequence.prompt_len


class Scheduler:
    """Queues sequences and chooses what each step computes.

    max_num_seqs: running sequences at once; max_num_batched_tokens: tokens of one step. Raises ValueError if a step
    could not hold one token of every running sequence.
    """

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
        self._lanes = list(range(max_num_seqs))[::-1]  # the free ones; every running sequence has one
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(seq)

    def schedule(self, *, lookahead: int = 0, max_prompt_tokens: int | None = None) -> list[Chunk]:
        """Return the chunks of the next step, decoding ones first, at most one for each sequence.

        lookahead: the longest draft to allow after a decoded token. max_prompt_tokens: limit on the prompt tokens of
        the step, in which the vision tower's work counts as well; None: whatever fits into the step. The tower's work
        is planned in the encoder; the caller gets it from `Encoder.take`.
        """
        decoding = self._decode()
        budget = self.max_num_batched_tokens - len(decoding)
        if max_prompt_tokens is not None:
            budget = min(budget, max_prompt_tokens)
        prompts: list[Chunk] = []
        for seq in self.running:
            if seq.num_pending > 1 or not seq.is_decoding:
                budget -= self._fill(seq, budget, prompts)
        self._admit(budget, prompts)
        if lookahead:
            budget = self.max_num_batched_tokens - sum(chunk.length for chunk in (*decoding, *prompts))
            for i, chunk in enumerate(decoding):
                num_left = chunk.sequence.max_len - chunk.sequence.length
                # One token is sampled in any case. Drafts get the remaining budget in equal parts.
                chunk.room = max(0, min(lookahead, num_left - 1, -(-budget // (len(decoding) - i))))
                budget -= chunk.room
        return decoding + prompts

    def finish(self, seq: Sequence) -> None:
        """Remove a finished or aborted sequence; its full blocks stay in the prefix cache."""
        if seq.lane < 0:
            self.waiting.remove(seq)
        else:
            self._stop(seq)

    def preempt_all(self) -> None:
        """Preempt all running sequences; they wait to be computed again."""
        for seq in reversed(list(self.running)):  # so that they queue in the order of their admission
            self._preempt(seq)

    def _decode(self) -> list[Chunk]:
        """Return a chunk of one token for each decoding sequence that has, or can get, a block for it."""
        chunks: list[Chunk] = []
        for seq in list(self.running):
            # A sequence just preempted for another has no lane. One whose last possible token is in flight must wait.
            if seq.lane < 0 or seq.num_pending != 1 or not seq.is_decoding or seq.length >= seq.max_len:
                continue
            if self._make_room(seq):
                chunks.append(Chunk(seq, 1))
        return chunks

    def _make_room(self, seq: Sequence) -> bool:
        """Get a block for the next token, by preemption if necessary; False if `seq` itself was preempted."""
        while not self.pool.grow(seq, seq.length):
            last = self.running[-1]
            self._preempt(last)
            if last is seq:
                return False
        return True

    def _stop(self, seq: Sequence) -> None:
        """Take a sequence out of the running ones and free its blocks, its image features and its lane."""
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
        """Admit waiting sequences while tokens of the budget, lanes and blocks are left; append their first chunks."""
        if not self.waiting or budget <= 0 or not self._lanes:
            return
        for seq in self._admissible():
            if budget <= 0 or not self._lanes or seq.num_unread:  # preempted while its last token is still unread
                break
            # Reserve a block for each running sequence, so that the admission does not cause a preemption right after.
            if not self.pool.admit(seq, reserve=len(self.running)):
                break
            self.waiting.remove(seq)
            self.running.append(seq)
            seq.lane, seq.is_new = self._lanes.pop(), True
            if not seq.num_preempted:
                seq.num_cached = seq.num_computed
            budget -= self._fill(seq, budget, chunks)

    def _fill(self, seq: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Append to `chunks` as many pending tokens of the sequence as the budget allows; return how much of the budget
        they and the encoding of their images take."""
        if budget <= 0:
            return 0
        room, cost = (budget, 0) if self.encoder is None else self.encoder.reach(seq, budget)
        length = min(seq.num_pending, room)
        if length > 0:
            chunks.append(Chunk(seq, length, is_new=seq.is_new))
            seq.is_new = False
        return length + cost

    def _admissible(self) -> list[Sequence]:
        """Return waiting sequences in order of arrival; copies of a prompt wait until the first has computed it, then
        they share its blocks."""
        return [
            seq
            for seq in self.waiting
            if seq.after is None or seq.after.is_finished or seq.after.num_computed >= seq.prompt_len
        ]
