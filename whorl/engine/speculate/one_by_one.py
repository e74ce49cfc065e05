"""Drafting with a model, autoregressively: each call drafts one token for all sequences, through a `Runner`.

The calls are built like the target's. The first call also computes the pending tokens: those of the sequence that are
not in this model's cache yet. It passes them as one token and a draft after it, because then it is a decode call, in
which every token has logits, and may be a recorded graph. If only the device needs the drafted tokens, the host reads
them once, after the last call.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from whorl.device import lasting
from whorl.engine.batch import Batch
from whorl.engine.call import Sample
from whorl.engine.runner import Result, Runner
from whorl.engine.sampler import Sampler
from whorl.engine.scheduler import Chunk
from whorl.engine.sequence import Content
from whorl.engine.sequence import Sequence as Seq

from . import Draft, measure_cost

SHORT = 16  # tokens of a sequence that a decode call computes before the first drafted one
_COST_TOKENS = (1, 4, 16, 64)  # of the calls that are timed
States = Mapping[Seq, Tensor]  # hidden states [tokens, C] of the tokens to be computed, by sequence


class OneByOne:
    """Drafts with one model. Its sequences have their own lanes, blocks and numbers of computed tokens.

    max_tokens: the most tokens of one call.
    """

    def __init__(self, runner: Runner, *, max_tokens: int) -> None:
        self.runner, self.max_tokens = runner, max_tokens
        self._sampler = Sampler(runner, runner.vocab_size)

    def catch_up(self, sequences: Sequence[Seq]) -> None:
        """Compute all tokens but the last of sequences that have too many pending tokens for a decode call."""
        most = max(1, min(SHORT, self.max_tokens // max(1, len(sequences))))
        self.fill({seq: seq.num_pending - 1 for seq in sequences if seq.num_pending > most})

    def fill(self, lengths: Mapping[Seq, int], states: States | None = None) -> None:
        """Compute the next `lengths[seq]` tokens of each sequence without drafting, in calls of up to `max_tokens`.

        states: the target's hidden states of these tokens, if the model takes them.
        """
        left, done = {seq: length for seq, length in lengths.items() if length > 0}, dict.fromkeys(lengths, 0)
        while left:
            budget, chunks, chunk_states = self.max_tokens, [], {}
            for seq, length in list(left.items()):
                count = min(length, budget)
                if count:
                    chunk = Chunk(seq, count, is_new=True)  # sends the block table, which may have grown since
                    chunk.is_last = False
                    chunks.append(chunk)
                    if states is not None:
                        chunk_states[chunk] = states[seq][done[seq] : done[seq] + count]
                    budget -= count
                    done[seq] += count
                    left[seq] -= count
                    if not left[seq]:
                        del left[seq]
            self.runner.run(Batch(chunks), None if states is None else chunk_states)
            for chunk in chunks:
                chunk.sequence.num_computed += chunk.length
                chunk.sequence.is_new = False

    def draft(self, rooms: Mapping[Seq, int], states: States | None = None) -> dict[Seq, Draft]:
        """Draft `rooms[seq]` tokens after each sequence, and compute all its pending tokens on the way. The drafted
        tokens are appended to the sequences; the caller takes them off again.

        states: the target's hidden states of the pending tokens, if the model takes them; after the first drafted token
        the model's own are used.
        """
        waits = not all(seq.is_plain for seq in rooms)  # penalties and masks depend on the tokens before
        unread: list[tuple[list[Seq], Tensor]] = []
        probs: dict[Seq, list[Tensor]] = {seq: [] for seq in rooms}
        most = max(rooms.values(), default=0)
        for i in range(most):
            live = [seq for seq, room in rooms.items() if room > i]
            order, logits, ids, hidden = self._next(live, states)
            ids, distributions = self._choose(order, logits, ids)
            for row, seq in enumerate(order):
                seq.num_computed = seq.length
                if distributions is not None and seq.params.temperature > 0 and seq.params.seed is None:
                    probs[seq].append(distributions[row])
            if waits:
                for seq, token_id in zip(order, ids.tolist(), strict=True):
                    seq.token_ids.append(token_id)
            else:
                if i + 1 < most:  # the next call reads them
                    self.runner.put([seq.lane for seq in order], ids)
                unread.append((order, ids))
                for seq in order:
                    seq.num_unread += 1
            if states is not None:
                states = dict(zip(order, hidden.split(1), strict=True))
        for order, ids in unread:
            for seq, token_id in zip(order, ids.tolist(), strict=True):
                seq.token_ids.append(token_id)
                seq.num_unread -= 1
        return {seq: _draft(seq, room, probs[seq]) for seq, room in rooms.items()}

    def _next(self, live: Sequence[Seq], states: States | None) -> tuple[list[Seq], Tensor, Tensor, Tensor]:
        """Run the pending tokens; return the sequences in the order of the calls, and logits, sampled token and hidden
        state of the last token of each."""
        chunks = [pending(seq) for seq in live]
        chunk_states = None if states is None else {chunk: states[chunk.sequence] for chunk in chunks}
        results = self.runner.run(Batch(chunks), chunk_states)
        order, ends = [], []
        for result in results:
            rows = [row for row, sample in enumerate(result.samples) if sample.num_drafted == len(sample.chunk.draft)]
            order += [result.samples[row].chunk.sequence for row in rows]
            ends.append(_ends(result, rows))
        logits, ids, hidden = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*ends, strict=True))
        return order, logits, ids, hidden

    def _choose(self, order: Sequence[Seq], logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a token for each row, and the distributions if some are sampled; greedy ones come from the call."""
        if all(seq.is_plain and seq.params.temperature == 0 for seq in order):
            return ids, None
        samples = [Sample(Chunk(seq, 1), 0, seq.length - seq.prompt_len) for seq in order]
        return self._sampler.draw(logits, samples)

    # ---- before the first draft

    def cost(self, *, seconds: float) -> Mapping[int, float]:
        """See `Proposer.cost`."""
        return measure_cost(self.runner, _COST_TOKENS, seconds)

    def warm_up(self, max_num_seqs: int, k: int, longest: int) -> Iterable[tuple[str, Callable[[], None]]]:
        """Yield calls of the sizes that drafts of up to `k` tokens for so many sequences need, and prompts."""
        sizes = self.runner.graphs.decoding_sizes(max_num_seqs * (k + 1)) or [(1, 1), (max_num_seqs, 1)]
        for count, keys in sizes:
            yield f"draft of {count} tokens, up to {keys} keys", partial(self.runner.warm_up, count, keys)
        size = min(self.max_tokens, longest)
        while size:
            yield f"prompt of {size} for drafts", partial(self.runner.warm_up_prompt, size)
            size //= 2


def mirrored(target: Seq, prompt: Sequence[int], contents: Iterable[Content] = ()) -> Seq:
    """Return a sequence for drafting with the sampling parameters and the seed of the target's."""
    params = replace(target.params, n=1, logprobs=None, prompt_logprobs=None, embed=False)
    copy = Seq(prompt, params, max_len=target.max_len, contents=contents, eos_ids=target.eos_ids)
    copy.seed = target.seed
    return copy


def pending(seq: Seq) -> Chunk:
    """Return a chunk of all tokens that are not computed. In a prompt only the last token has logits; after the prompt
    every token has, because all but the first are passed as a draft."""
    count, start = seq.num_pending, seq.num_computed
    is_prompt = start < seq.prompt_len
    chunk = Chunk(seq, count if is_prompt else 1, is_new=seq.is_new)
    if not is_prompt:
        chunk.is_last, chunk.draft = True, seq.token_ids[start + 1 :]
    seq.is_new = False
    return chunk


def _ends(result: Result, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, ids and hidden states of the samples in `rows`, which are the last of their chunks."""
    assert result.hidden is not None
    ends = [placed.first_token + placed.chunk.length + len(placed.chunk.draft) - 1 for placed in result.placed]
    logits, ids, hidden = result.logits, result.token_ids, result.hidden
    if len(rows) < len(logits):
        index = _index(rows, logits.device)
        logits, ids = logits.index_select(0, index), ids.index_select(0, index)
    # Copies, because the next replay overwrites the outputs of a recorded call.
    return logits, ids.clone(), hidden.index_select(0, _index(ends, hidden.device))


def _index(rows: list[int], device: torch.device) -> Tensor:
    return lasting(torch.tensor(rows), device.type).to(device, non_blocking=True)


def _draft(seq: Seq, room: int, probs: list[Tensor]) -> Draft:
    return Draft(seq.token_ids[len(seq.token_ids) - room :], torch.stack(probs) if probs else None)
