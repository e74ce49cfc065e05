"""The drafts of an engine's steps: how long they are, and what becomes of them."""

from typing import TYPE_CHECKING, Literal

from .batch import Batch
from .scheduler import Chunk
from .speculate import DraftLength, Proposer, cut

if TYPE_CHECKING:
    from .llm import LLM

_COST_TOKENS = 64  # the largest decode step that is timed for `DraftLength`
_COST_SECONDS = 0.2  # time to measure the cost of verifying drafts, and again of drafting


class Drafts:
    """Adds the proposer's drafts to the steps of an engine. length: `draft_length` of `LLM`.

    Attributes length: chooses how many tokens to draft; None: always the proposer's k. num_drafted, num_accepted:
    tokens since the start.
    """

    def __init__(self, llm: "LLM", length: DraftLength | Literal["measured", "fixed"]) -> None:
        self._llm, self._is_unmeasured = llm, length == "measured"
        self.length = length if isinstance(length, DraftLength) else None
        tokenizer = llm.tokenizer
        self._special_ids = frozenset() if tokenizer is None else tokenizer.special_ids | tokenizer.added_ids
        self.num_drafted = self.num_accepted = 0

    def propose(self, proposer: Proposer, batch: Batch) -> None:
        """Add drafts to the chunks that have room for one. A draft uses free blocks only; it preempts no sequence."""
        pool = self._llm.pool
        chunks = [chunk for chunk in batch.chunks if chunk.room > 0 and chunk.sequence.params.drafts]
        if self.num_drafted:  # an output without any draft need not wait for the measurement
            self.measure(proposer)
        k = proposer.k if self.length is None else self.length.choose(proposer.k, len(chunks))
        if k == 0 or not chunks:
            return
        for chunk, draft in zip(chunks, proposer.propose([chunk.sequence for chunk in chunks], k), strict=True):
            token_ids = draft.token_ids[: chunk.room]
            # A sampled draft is not cut: leaving tokens unverified because of their value would bias the output.
            if draft.probs is None:
                token_ids = cut(token_ids, self._special_ids)
            while token_ids and not pool.grow(chunk.sequence, len(chunk.sequence.token_ids) + len(token_ids)):
                token_ids.pop()
            if not token_ids:
                pool.shrink(chunk.sequence)  # a proposer may have taken blocks to draft in
            chunk.draft = token_ids
            chunk.probs = None if draft.probs is None else draft.probs[: len(token_ids)]

    def measure(self, proposer: Proposer) -> None:
        """Measure, once, the costs of verifying and of drafting, if draft lengths are to be chosen by them."""
        if self._is_unmeasured:
            self._is_unmeasured = False
            max_tokens = min(_COST_TOKENS, self._llm.scheduler.max_num_seqs * (proposer.k + 1))
            cost = self._llm.measure_cost(max_tokens, seconds=_COST_SECONDS)
            self.length = DraftLength(cost, drafting=proposer.cost(seconds=_COST_SECONDS))

    def count(self, chunk: Chunk, num_new: int) -> None:
        """Count what became of a chunk's draft: its sequence got `num_new` tokens."""
        num_drafted, num_accepted = len(chunk.draft), max(0, min(num_new - 1, len(chunk.draft)))
        for counts in (self, chunk.sequence):
            counts.num_drafted += num_drafted
            counts.num_accepted += num_accepted
        if self.length is not None:
            self.length.observe(num_drafted, num_accepted)
