"""Drafts of models: a token a call for all sequences at once, through a runner like the target's.

Calls are laid out as the target's own. Tokens that are to be computed before the first guess go as a draft behind the
first of them, so that every row gives logits and the call may be recorded. Where nothing but the device needs to know
the guesses, the host reads them when all have been made.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from whorl.device import lasting
from whorl.engine.batch import Batch, Sample
from whorl.engine.contents import Content
from whorl.engine.runner import Result, Runner
from whorl.engine.sampler import Sampler
from whorl.engine.scheduler import Chunk
from whorl.engine.sequence import Sequence as Seq

from . import Draft, measure_cost

SHORT = 16  # tokens of a sequence that a decode call takes before the first guess
_COST_ROWS = (1, 4, 16, 64)
States = Mapping[Seq, Tensor]  # [tokens, C] of those to be computed


class OneByOne:
    """Guesses of one model. Its sequences are its own: lanes, blocks and how far they are computed."""

    def __init__(self, runner: Runner, *, max_rows: int) -> None:
        self.runner, self.max_rows = runner, max_rows
        self._sampler = Sampler(runner.model, runner.vocab_size)

    def catch_up(self, sequences: Sequence[Seq]) -> None:
        """Compute all but the last token, a budget at a time, of sequences that a decode call cannot take whole."""
        most = max(1, min(SHORT, self.max_rows // max(1, len(sequences))))
        self.fill({seq: seq.num_pending - 1 for seq in sequences if seq.num_pending > most})

    def fill(self, lengths: Mapping[Seq, int], states: States | None = None) -> None:
        """Compute so many tokens of each sequence without a guess."""
        left, at = {seq: length for seq, length in lengths.items() if length > 0}, dict.fromkeys(lengths, 0)
        while left:
            budget, chunks, given = self.max_rows, [], {}
            for seq, length in list(left.items()):
                taken = min(length, budget)
                if taken:
                    chunk = Chunk(seq, taken, is_new=True)  # tables are sent: blocks may have come since the last time
                    chunk.is_last = False
                    chunks.append(chunk)
                    if states is not None:
                        given[chunk] = states[seq][at[seq] : at[seq] + taken]
                    budget -= taken
                    at[seq] += taken
                    left[seq] -= taken
                    if not left[seq]:
                        del left[seq]
            self.runner.run(Batch(chunks), None if states is None else given)
            for chunk in chunks:
                chunk.sequence.num_computed += chunk.length
                chunk.sequence.is_new = False

    def draft(self, rooms: Mapping[Seq, int], states: States | None = None) -> dict[Seq, Draft]:
        """Up to `rooms` tokens behind each sequence, all of whose tokens are computed on the way.

        states: where the model takes hidden states; behind the first guess they are its own.
        """
        waits = not all(seq.is_plain for seq in rooms)  # penalties and masks look at the tokens before
        guesses: list[tuple[list[Seq], Tensor]] = []
        probs: dict[Seq, list[Tensor]] = {seq: [] for seq in rooms}
        for i in range(max(rooms.values(), default=0)):
            live = [seq for seq, room in rooms.items() if room > i]
            order, logits, ids, hidden = self._next(live, states)
            ids, drawn_from = self._choose(order, logits, ids)
            for row, seq in enumerate(order):
                seq.num_computed = seq.length
                if drawn_from is not None and seq.params.temperature > 0:
                    probs[seq].append(drawn_from[row])
            if waits:
                for seq, token_id in zip(order, ids.tolist(), strict=True):
                    seq.token_ids.append(token_id)
            else:
                self.runner.put([seq.lane for seq in order], ids)
                guesses.append((order, ids))
                for seq in order:
                    seq.num_unread += 1
            if states is not None:
                states = dict(zip(order, hidden.split(1), strict=True))
        for order, ids in guesses:
            for seq, token_id in zip(order, ids.tolist(), strict=True):
                seq.token_ids.append(token_id)
                seq.num_unread -= 1
        return {seq: _draft(seq, room, probs[seq]) for seq, room in rooms.items()}

    def _next(self, live: Sequence[Seq], states: States | None) -> tuple[list[Seq], Tensor, Tensor, Tensor]:
        """Sequences in the order of the rows; logits, sampled token and hidden state behind the last token of each."""
        chunks = [pending(seq) for seq in live]
        given = None if states is None else {chunk: states[chunk.sequence] for chunk in chunks}
        results = self.runner.run(Batch(chunks), given)
        order, found = [], []
        for result in results:
            rows = [row for row, each in enumerate(result.samples) if each.num_drafted == len(each.chunk.draft)]
            order += [result.samples[row].chunk.sequence for row in rows]
            found.append(_ends(result, rows))
        logits, ids, hidden = (each[0] if len(each) == 1 else torch.cat(each) for each in zip(*found, strict=True))
        return order, logits, ids, hidden

    def _choose(self, order: Sequence[Seq], logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """A token for each row, and the distributions where some are drawn; greedy ones are chosen in the call."""
        if all(seq.is_plain and seq.params.temperature == 0 for seq in order):
            return ids, None
        samples = [Sample(Chunk(seq, 1), 0, seq.length - seq.prompt_len) for seq in order]
        return self._sampler.draw(logits, samples)

    # ---- before the first draft

    def cost(self, *, seconds: float) -> Mapping[int, float]:
        return measure_cost(self.runner, _COST_ROWS, seconds)

    def warm_up(self, max_num_seqs: int, k: int, longest: int) -> Iterable[tuple[str, Callable[[], None]]]:
        """Calls of the sizes that drafts of up to `k` tokens for so many sequences need, and prompts."""
        sizes = self.runner.graph_sizes(max_num_seqs * (k + 1)) or [(1, 1), (max_num_seqs, 1)]
        for rows, keys in sizes:
            yield f"draft of {rows} rows, up to {keys} keys", partial(self.runner.warm_up, rows, keys)
        size = min(self.max_rows, longest)
        while size:
            yield f"prompt of {size} for drafts", partial(self.runner.warm_up_prompt, size)
            size //= 2


def mirrored(target: Seq, prompt: Sequence[int], contents: Iterable[Content] = ()) -> Seq:
    """A sequence of a draft's own: what the target's request asks of sampling, and its seed."""
    params = replace(target.params, n=1, logprobs=None, prompt_logprobs=None, embed=False)
    own = Seq(prompt, params, max_len=target.max_len, contents=contents, eos_ids=target.eos_ids)
    own.seed = target.seed
    return own


def pending(seq: Seq) -> Chunk:
    """All that is not computed. Of a prompt's end the last token gives logits, else every one does."""
    count, start = seq.num_pending, seq.num_computed
    is_prompt = start < seq.prompt_len
    chunk = Chunk(seq, count if is_prompt else 1, is_new=seq.is_new)
    if not is_prompt:
        chunk.is_last, chunk.draft = True, seq.token_ids[start + 1 :]
    seq.is_new = False
    return chunk


def _ends(result: Result, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Of the samples in `rows`, which are the last of their chunks."""
    assert result.hidden is not None
    ends = [each.row + each.chunk.length + len(each.chunk.draft) - 1 for each in result.placed]
    logits, ids, hidden = result.logits, result.token_ids, result.hidden
    if len(rows) < len(logits):
        at = _index(rows, logits.device)
        logits, ids = logits.index_select(0, at), ids.index_select(0, at)
    # A recorded call's are written over by the next one.
    return logits, ids.clone(), hidden.index_select(0, _index(ends, hidden.device))


def _index(rows: list[int], device: torch.device) -> Tensor:
    return lasting(torch.tensor(rows), device.type).to(device, non_blocking=True)


def _draft(seq: Seq, room: int, probs: list[Tensor]) -> Draft:
    return Draft(seq.token_ids[len(seq.token_ids) - room :], torch.stack(probs) if probs else None)
