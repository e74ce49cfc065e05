"""Multi-token prediction: the target's own further layer drafts, from the target's hidden states.

Its cache lies in the target's blocks: slot t holds what token t's hidden state and token t + 1 give. So whatever
happens to a sequence, a shared beginning, preemption, its end, happens to both caches at once. Every token that the
target computes is computed here too: prompts at once, generated tokens with the next draft, or when their block is
full. Where a block is shared, its last slot has been computed with the next token of whoever came first: a guess may be
worse for it, and no output changes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.engine.batch import Placed
from whorl.engine.blocks import BlockPool
from whorl.engine.runner import Result, Runner
from whorl.engine.sequence import Sequence as Seq
from whorl.nn import Model

from . import Draft, Proposer
from .one_by_one import SHORT, OneByOne, mirrored


@dataclass(slots=True, eq=False)
class _Behind:
    """A target's sequence one token on: `own` begins with its second token. Behind `num_computed` there are hidden
    states of tokens that are not computed here."""

    target: Seq
    own: Seq
    states: Tensor | None = None

    @classmethod
    def of(cls, target: Seq, start: int) -> "_Behind":
        own = mirrored(target, target.token_ids[1 : target.prompt_len])
        own.num_computed = start
        return cls(target, own)

    @property
    def end(self) -> int:
        """Tokens that are computed, and those that could be."""
        return self.own.num_computed + (0 if self.states is None else len(self.states))

    def take(self, placed: Placed, hidden: Tensor) -> None:
        """hidden: of the target's tokens from `placed.chunk.start` on."""
        own = self.own
        assert self.end == placed.chunk.start, f"{self.target!r}: {self.end} of {placed.chunk.start} hidden states"
        own.lane, own.block_table = placed.lane, placed.block_table
        own.token_ids += self.target.token_ids[len(own.token_ids) + 1 :]
        self.states = hidden if self.states is None else torch.cat((self.states, hidden))

    def num_due(self, block_size: int) -> int:
        """Tokens to compute now. The last one waits for a draft, unless there will be none."""
        if self.states is None or self.target.is_finished:
            return 0 if self.states is None else len(self.states)
        count, first = len(self.states) - 1, self.own.num_computed
        is_full = (first + count) // block_size > first // block_size  # others may share the block
        return count if is_full or count >= SHORT or first < self.own.prompt_len else 0

    def keep(self, count: int) -> None:
        """The last `count` states, as a copy: a recorded call's are written over by the next one."""
        assert self.states is not None
        self.states = self.states[len(self.states) - count :].clone() if count else None


class MTP(Proposer):
    """Drafts by the target's layer of multi-token prediction, `k` tokens by running it again on its own hidden state.

    path: of the target's checkpoint; default: the one that the engine loads. layer: hand it in instead.
    """

    wants_hidden = True

    def __init__(self, path: str | Path | None = None, *, layer: Model | None = None, k: int = 1) -> None:
        if k < 1:
            raise ValueError(f"MTP: k is {k}, expected at least 1")
        self.path, self.k, self.beside = path, k, layer
        self._behind: dict[int, _Behind] = {}  # by the target's id
        self._pool: BlockPool | None = None
        self._guesses: OneByOne | None = None

    def load(self, path: str | Path | None, model: Any) -> None:
        count = getattr(getattr(model, "config", None), "num_nextn_predict_layers", 0)
        if self.beside is not None:
            return
        if not count:
            raise ValueError(
                f"MTP: {type(model).__name__} has no layer of multi-token prediction (num_nextn_predict_layers is "
                f"{count}): draft in another way, or with none"
            )
        if self.path is None and path is None:
            raise ValueError("MTP: the model was handed in: give the path of its checkpoint, or its layer")
        from whorl.engine.weights import load_prediction

        self.beside = load_prediction(path if self.path is None else self.path, model)

    def attach(self, pool: BlockPool, runner: Runner, *, max_rows: int) -> None:
        if self._guesses is not None:
            raise ValueError("MTP: it drafts for another engine: make one for each")
        self._pool, self._guesses = pool, OneByOne(runner, max_rows=max_rows)

    @property
    def guesses(self) -> OneByOne:
        assert self._guesses is not None, "it belongs to no engine"
        return self._guesses

    def cost(self, *, seconds: float) -> Mapping[int, float]:
        return self.guesses.cost(seconds=seconds)

    def warm_up(self, max_num_seqs: int) -> Iterable[tuple[str, Callable[[], None]]]:
        return self.guesses.warm_up(max_num_seqs, self.k, self.guesses.runner.max_len)

    @torch.inference_mode()
    def observe(self, results: Sequence[Result]) -> None:
        assert self._pool is not None
        touched = [found for result in results for found in self._take(result)]
        due = {each.own: count for each in touched if (count := each.num_due(self._pool.block_size))}
        self.guesses.fill(due, {each.own: each.states for each in touched if each.states is not None})
        for each in touched:
            if each.states is not None:
                each.keep(len(each.states) - due.get(each.own, 0))
        self._behind = {key: each for key, each in self._behind.items() if not each.target.is_finished}

    def _take(self, result: Result) -> Iterable[_Behind]:
        assert result.hidden is not None
        for placed in result.placed:
            chunk, seq = placed.chunk, placed.chunk.sequence
            if chunk.is_new:
                self._behind[seq.id] = _Behind.of(seq, chunk.start)
            # Of a draft, those before the last token stand.
            count = min(chunk.length + len(chunk.draft), len(seq.token_ids) - 1 - chunk.start)
            if count > 0:
                self._behind[seq.id].take(placed, result.hidden[placed.row : placed.row + count])
                yield self._behind[seq.id]

    @torch.inference_mode()
    def propose(self, sequences: Sequence[Seq], k: int) -> list[Draft]:
        behind = [self._behind[seq.id] for seq in sequences]
        rooms = {each.own: room for each in behind if (room := self._make_room(each.target, k)) > 0}
        states = {each.own: each.states for each in behind if each.own in rooms and each.states is not None}
        drafts = self.guesses.draft(rooms, states)
        for each in behind:
            if each.own in rooms:
                self._forget_guesses(each)
        return [drafts.get(each.own, Draft([])) for each in behind]

    def _make_room(self, seq: Seq, k: int) -> int:
        """How many tokens to draft: the last two need no slot here, and there is one for the token sampled last."""
        assert self._pool is not None
        room = min(k, seq.max_len - 1 - len(seq.token_ids))
        while room > 2 and not self._pool.grow(seq, len(seq.token_ids) + room - 2):
            room -= 1
        return room

    @staticmethod
    def _forget_guesses(each: _Behind) -> None:
        """The target's next hidden states take the place of those guessed here."""
        own = each.own
        del own.token_ids[len(each.target.token_ids) - 1 :]
        if own.counts is not None:
            own.counts.cut(len(own.token_ids))
        own.num_computed, each.states = len(own.token_ids), None
