"""The scheduler chooses the tokens of the next step: decoding sequences first, then prompts within the budget.

A sequence gets blocks for all its known tokens when it is admitted, so only decoding sequences need further ones. If
none is free, a running sequence is preempted: it gives up its blocks and waits again. It is the one that was admitted
last of the client with most of them, so the oldest sequence of each client always goes on. In the same way a client of
which nothing runs gets the lane and the blocks of a client that has several, and work that yields (see `fair_queue`)
makes way for work that does not. Which sequences run together changes no bit of their output.
"""

import math
from collections import Counter, deque
from collections.abc import Collection
from typing import TYPE_CHECKING

from whorl.device import HOST
from whorl.ops.attention.tiles import ROWS as TILE

from .blocks import BlockPool
from .encoder import Encoder
from .fair_queue import Client, FairQueue, level
from .sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

_SECONDS = 0.5  # about how long a step with prompts should take on a slow device
_FASTEST_GROWTH = 4  # from one step to the next, because one step may have been fast by accident


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

    max_num_seqs: running sequences at once; max_num_batched_tokens: tokens of one step. max_shared: where a step takes
    longer the more it computes, the decoding sequences of a step that several clients share, in equal parts, and the
    prompt tokens beside them; the others have their turn in the next steps. None: no limit. Raises ValueError if a step
    could not hold one token of every running sequence.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_shared: int | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}, expected at least 1")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs {max_num_seqs}: "
                "every running sequence decodes a token in each step"
            )
        self._least = 1 if pool.states is None else pool.states.grid  # tokens of a chunk that does not end a prompt
        if pool.states is not None and max_num_batched_tokens < (most := max_num_seqs - 1) + self._least:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, expected at least {most + self._least}: beside "
                f"{most} sequences that decode, prompts of this model need chunks of {self._least} tokens"
            )
        self.pool, self.encoder = pool, encoder
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: FairQueue[Sequence] = FairQueue()
        self.running: list[Sequence] = []  # in order of admission
        self._lanes = list(range(max_num_seqs))[::-1]  # the free ones; every running sequence has one
        self._max_shared, self._num_shared = max_shared, 0  # how many steps have been shared
        self._num_yielding = 0  # running sequences that yield to others
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting.lines or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self.pool.read_ahead(seq)
        self.waiting.add(seq)

    def schedule(self, *, lookahead: int = 0, max_prompt_tokens: int | None = None) -> list[Chunk]:
        """Return the chunks of the next step, decoding ones first, at most one for each sequence.

        lookahead: the longest draft to allow after a decoded token. max_prompt_tokens: limit on the prompt tokens of
        the step, in which the vision tower's work counts as well; None: whatever fits into the step. The tower's work
        is planned in the encoder; the caller gets it from `Encoder.take`.
        """
        if (beyond := self.pool.beyond) is not None:
            beyond.begin(is_decoding=any(seq.is_decoding and not seq.is_new for seq in self.running))
        self._make_way()
        decoding = self._decode()
        budget = self.max_num_batched_tokens - len(decoding)
        if max_prompt_tokens is not None:
            budget = min(budget, max(max_prompt_tokens, self._least))
        if self._is_shared and decoding:
            assert self._max_shared is not None
            budget = min(budget, max(self._max_shared, self._least))
        prompts = self._compute_prompts(budget, {chunk.sequence.client for chunk in decoding})
        if lookahead:
            budget = self.max_num_batched_tokens - sum(chunk.length for chunk in (*decoding, *prompts))
            for i, chunk in enumerate(decoding):
                num_left = chunk.sequence.max_len - chunk.sequence.length
                # One token is sampled in any case. Drafts get the remaining budget in equal parts.
                chunk.room = max(0, min(lookahead, num_left - 1, -(-budget // (len(decoding) - i))))
                if self.pool.states is not None:
                    chunk.room = min(chunk.room, self.pool.states.draft_room(chunk.start))
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
        counts: Counter[Client] = Counter()
        order, most = list(self.running), math.inf
        clients_of_prompts: Collection[Client] = ()
        if self._is_shared:
            assert self._max_shared is not None
            self._num_shared += 1
            order.sort(key=lambda seq: seq.last_shared)
            most = max(1, self._max_shared // len(self.waiting.running))
            clients_of_prompts = self._lines() if self._num_shared % 2 else ()
        for seq in order:
            # A sequence just preempted for another has no lane. One whose last possible token is in flight must wait.
            is_decoding = seq.num_pending == 1 and seq.is_decoding and not seq.is_new
            if seq.lane < 0 or not is_decoding or seq.length >= seq.max_len:
                continue
            if counts[seq.client] < (1 if seq.client in clients_of_prompts else most) and self._make_room(seq):
                chunks.append(Chunk(seq, 1))
                counts[seq.client] += 1
                seq.last_shared = self._num_shared
        for client, count in counts.items():
            self.waiting.charge(client, count)
        return [chunk for chunk in chunks if chunk.sequence.lane >= 0]  # one may have been preempted for a later one

    @property
    def _is_shared(self) -> bool:
        """Whether the work of a step is limited because several clients share it. A client's prompts and its decoding
        sequences then take turns, so that they do not make the step long together."""
        return self._max_shared is not None and len(self.waiting.running) > 1

    def _make_room(self, seq: Sequence) -> bool:
        """Get a block for the next token, by preemption if necessary; False if `seq` itself was preempted."""
        while not self.pool.grow(seq, seq.length):
            victim = self._victim()
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _victim(self) -> Sequence:
        """Return the sequence to preempt: work that yields, else of the client with most; the one admitted last."""
        shares = self.waiting.running
        if len(shares) == 1 and not self._num_yielding:
            return self.running[-1]
        return max(reversed(self.running), key=lambda seq: (level(seq), shares[seq.client]))

    def _make_way(self) -> None:
        """Preempt for sequences that wait and should not: those of clients of which nothing runs while another has
        several, and those behind which other work yields. They are admitted here, so that nobody else is."""
        shares = self.waiting.running
        while self.running and (seq := self.waiting.next()) is not None:
            may_come = self._is_admissible(seq) and not seq.num_unread
            if not may_come or (seq.client in shares and not self._num_yielding):
                break
            victim = self._victim()
            is_left_out = seq.client not in shares and shares[victim.client] > 1
            if level(victim) < level(seq) or (level(victim) == level(seq) and not is_left_out):
                break
            if not self._enter(seq):
                self._preempt(victim)

    def _stop(self, seq: Sequence) -> None:
        """Take a sequence out of the running ones and free its blocks, its image features and its lane."""
        self.running.remove(seq)
        self._num_yielding -= level(seq) > 0
        self.waiting.stop(seq)
        self.pool.release(seq)
        if self.encoder is not None:
            self.encoder.release(seq)
        self._lanes.append(seq.lane)
        seq.lane = -1

    def _preempt(self, seq: Sequence) -> None:
        self._stop(seq)
        self.waiting.add(seq, first=True)
        seq.num_preempted += 1
        self.num_preemptions += 1

    def _compute_prompts(self, budget: int, decoding: Collection[Client]) -> list[Chunk]:
        """Return the next chunks of prompts: clients take turns, each with those that run, then those that wait while
        lanes and blocks are left. decoding: clients whose sequences decode in this step."""
        chunks: list[Chunk] = []
        lines = self._lines() if budget > 0 else {}
        if self._is_shared and not self._num_shared % 2:
            lines = {client: line for client, line in lines.items() if client not in decoding}
        while lines and budget > 0:
            client = min(lines, key=lambda client: self.waiting.turn(lines[client][0]))
            seq = lines[client].popleft()
            if seq.lane >= 0 or (budget >= self._least and self._enter(seq)):
                budget -= self._fill(seq, budget, chunks)
            else:  # what it waits for must not go to others, but prompts that have begun go on
                lines = {name: deque(other for other in line if other.lane >= 0) for name, line in lines.items()}
            lines = {name: line for name, line in lines.items() if line}
        return chunks

    def _lines(self) -> dict[Client, deque[Sequence]]:
        """Return what may be computed of each client, in order: prompts that have begun, then, if there is a lane, what
        waits. Copies of a prompt wait until the first has computed it, then they share its blocks."""
        lines: dict[Client, deque[Sequence]] = {}
        for seq in self.running:
            if seq.num_pending > 1 or not seq.is_decoding or seq.is_new:
                lines.setdefault(seq.client, deque()).append(seq)
        for client, line in self.waiting.lines.items() if self._lanes else ():
            lines.setdefault(client, deque()).extend(seq for seq in line if self._is_admissible(seq))
        return {client: line for client, line in lines.items() if line}

    def _enter(self, seq: Sequence) -> bool:
        """Admit a sequence if a lane and blocks are left; not one preempted while its last token is still unread."""
        # Reserve a block for each running sequence, so that the admission does not cause a preemption right after.
        if not self._lanes or seq.num_unread or not self.pool.admit(seq, reserve=len(self.running)):
            return False
        self.waiting.start(seq)
        self.running.append(seq)
        self._num_yielding += level(seq) > 0
        seq.lane, seq.is_new = self._lanes.pop(), True
        if self.pool.states is not None:
            self.pool.states.begin(seq)
        if not seq.num_preempted:
            seq.num_cached = seq.num_computed
        return True

    def _is_admissible(self, seq: Sequence) -> bool:
        """Return whether a sequence waits neither for the first copy of its prompt nor for files."""
        if self.pool.beyond is not None and not self.pool.beyond.is_read(seq.reads):
            return False
        return seq.after is None or seq.after.is_finished or seq.after.num_computed >= seq.prompt_len

    def _fill(self, seq: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Append to `chunks` as many pending tokens of the sequence as the budget allows; return how much of the budget
        they and the encoding of their images take."""
        if budget <= 0 or not (self.pool.beyond is None or self.pool.beyond.has_come(seq)):
            return 0
        room, cost = (budget, 0) if self.encoder is None else self.encoder.plan(seq, budget)
        length = min(seq.num_pending, room)
        if self.pool.states is not None:
            length = self.pool.states.chunk_length(seq, length)
        if length > 0:
            chunks.append(Chunk(seq, length, is_new=seq.is_new))
            seq.is_new = False
        self.waiting.charge(seq.client, length + cost)
        return length + cost


class StepBudget:
    """How many prompt tokens a step may compute; on a slow device they are chosen to keep steps short.

    Decoding sequences wait for a step to end, and so does Ctrl-C. How a prompt is cut into chunks changes no bit of the
    output. most: upper limit; fixed: always this number; None: `most`, or on a CPU as many as the measured time of
    steps allows. Raises ValueError if `fixed` is above `most`.
    """

    def __init__(self, most: int, *, device: str, fixed: int | None = None) -> None:
        if fixed is not None and not 1 <= fixed <= most:
            raise ValueError(f"max_prompt_tokens is {fixed}, expected 1 to max_num_batched_tokens, which is {most}")
        self._most, self._is_timed = most, fixed is None and device == HOST
        # The first step shows how fast the model is; a tile of tokens costs as much as one token.
        self.tokens = fixed or (min(TILE, most) if self._is_timed else most)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Note the seconds of a step that computed `num_tokens` of prompts."""
        # The time of a small step says little about a large one: reading the weights has a fixed cost.
        if not self._is_timed or (2 * num_tokens < self.tokens and seconds < _SECONDS):
            return
        target = min(num_tokens * _SECONDS / max(seconds, 1e-9), _FASTEST_GROWTH * self.tokens)
        self.tokens = min(self._most, max(TILE, int(target) // TILE * TILE))
