"""Multi-token prediction (MTP): an additional layer of the target's checkpoint drafts from the target's hidden states.

Its cache lies in the target's blocks: slot t holds the keys and values that it computes from token t's hidden state and
token t + 1. So a prefix hit, a preemption or the end of a sequence applies to both caches at once. Every token that the
target computes is computed here as well: prompts at once, generated tokens with the next draft, or when their block is
full. The last slot of a shared block was computed with the next token of the sequence that came first: a draft may be
worse for it, but no output changes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.engine.blocks import BlockPool
from whorl.engine.call import PlacedChunk
from whorl.engine.runner import Result, Runner
from whorl.engine.sequence import Sequence as Seq
from whorl.nn import Model

from . import Draft, Proposer
from .one_by_one import SHORT, OneByOne, mirrored


@dataclass(slots=True, eq=False)
class _Shifted:
    """A target's sequence shifted by one token: `shifted` begins with its second token.

    states: the target's hidden states of the tokens after `shifted.num_computed`, which the MTP layer has not computed.
    """

    target: Seq
    shifted: Seq
    states: Tensor | None = None

    @classmethod
    def of(cls, target: Seq, start: int) -> "_Shifted":
        shifted = mirrored(target, target.token_ids[1 : target.prompt_len])
        shifted.num_computed = start
        return cls(target, shifted)

    @property
    def end(self) -> int:
        """Number of tokens that are computed or whose hidden states are here."""
        return self.shifted.num_computed + (0 if self.states is None else len(self.states))

    def take(self, placed: PlacedChunk, hidden: Tensor) -> None:
        """Take the hidden states of the target's tokens from `placed.chunk.start` on."""
        shifted = self.shifted
        assert self.end == placed.chunk.start, f"{self.target!r}: {self.end} of {placed.chunk.start} hidden states"
        shifted.lane, shifted.block_table = placed.lane, placed.block_table
        shifted.token_ids += self.target.token_ids[len(shifted.token_ids) + 1 :]
        self.states = hidden if self.states is None else torch.cat((self.states, hidden))

    def num_due(self, block_size: int) -> int:
        """Return how many tokens to compute now. The last one waits for the next draft, unless there will be none."""
        if self.states is None or self.target.is_finished:
            return 0 if self.states is None else len(self.states)
        count, first = len(self.states) - 1, self.shifted.num_computed
        is_full = (first + count) // block_size > first // block_size  # others may share the block
        return count if is_full or count >= SHORT or first < self.shifted.prompt_len else 0

    def keep(self, count: int) -> None:
        """Keep a copy of the last `count` states: the next replay overwrites the outputs of a recorded call."""
        assert self.states is not None
        self.states = self.states[len(self.states) - count :].clone() if count else None


class MTP(Proposer):
    """Drafts with the target's MTP layer; for more than one token the layer runs again on its own hidden state.

    path: the target's checkpoint; default: the one that the engine loads. layer: the layer itself instead of a path. k:
    longest draft. Raises ValueError for k below 1 and for a model without such a layer.
    Example: `LLM(path, speculate=MTP(k=2))`
    """

    wants_hidden = has_weights = True

    def __init__(self, path: str | Path | None = None, *, layer: Model | None = None, k: int = 1) -> None:
        if k < 1:
            raise ValueError(f"MTP: k is {k}, expected at least 1")
        self.path, self.k, self.draft_head = path, k, layer
        self._pairs: dict[int, _Shifted] = {}  # by id of the target's sequence
        self._pool: BlockPool | None = None
        self._drafter: OneByOne | None = None

    def check(self, model: Any, tokenizer: Any) -> None:
        if self._drafter is not None:
            raise ValueError("MTP: it already drafts for another engine; create one for each engine")
        count = getattr(getattr(model, "config", None), "num_nextn_predict_layers", 0)
        if self.draft_head is None and not count:
            raise ValueError(
                f"MTP: {type(model).__name__} has no layer of multi-token prediction (num_nextn_predict_layers is "
                f"{count}); use another proposer, or none"
            )

    def load(self, path: str | Path | None, model: Any) -> None:
        if self.draft_head is not None:
            return
        if self.path is None and path is None:
            raise ValueError("MTP: the model was passed as an object; pass the path of its checkpoint, or its layer")
        from whorl.engine.weights import load_prediction

        self.draft_head = load_prediction(path if self.path is None else self.path, model)

    def shared_path(self, path: Path) -> Path:
        if self.draft_head is not None:
            raise ValueError("MTP: the layer was passed as an object; pass its path, so that every rank can load it")
        from whorl.engine.weights import resolve

        return path if self.path is None else resolve(self.path)

    def attach(self, pool: BlockPool, runner: Runner, *, max_rows: int) -> None:
        self._pool, self._drafter = pool, OneByOne(runner, max_tokens=max_rows)

    @property
    def drafter(self) -> OneByOne:
        assert self._drafter is not None, "attach has not been called"
        return self._drafter

    def cost(self, *, seconds: float) -> Mapping[int, float]:
        return self.drafter.cost(seconds=seconds)

    def warm_up(self, max_num_seqs: int) -> Iterable[tuple[str, Callable[[], None]]]:
        return self.drafter.warm_up(max_num_seqs, self.k, self.drafter.runner.max_len)

    @torch.inference_mode()
    def observe(self, results: Sequence[Result]) -> None:
        assert self._pool is not None
        updated = [pair for result in results for pair in self._take(result)]
        due = {pair.shifted: count for pair in updated if (count := pair.num_due(self._pool.block_size))}
        self.drafter.fill(due, {pair.shifted: pair.states for pair in updated if pair.states is not None})
        for pair in updated:
            if pair.states is not None:
                pair.keep(len(pair.states) - due.get(pair.shifted, 0))
        self._pairs = {key: pair for key, pair in self._pairs.items() if not pair.target.is_finished}

    def _take(self, result: Result) -> Iterable[_Shifted]:
        """Take the hidden states of a call's accepted tokens; yield each pair that got some."""
        assert result.hidden is not None
        for placed in result.placed:
            chunk, seq = placed.chunk, placed.chunk.sequence
            if chunk.is_new:
                self._pairs[seq.id] = _Shifted.of(seq, chunk.start)
            # Only accepted draft tokens are in the sequence; its last token is not computed yet.
            count = min(chunk.length + len(chunk.draft), len(seq.token_ids) - 1 - chunk.start)
            if count > 0:
                self._pairs[seq.id].take(placed, result.hidden[placed.first_token : placed.first_token + count])
                yield self._pairs[seq.id]

    @torch.inference_mode()
    def propose(self, sequences: Sequence[Seq], k: int) -> list[Draft]:
        pairs = [self._pairs[seq.id] for seq in sequences]
        rooms = {pair.shifted: room for pair in pairs if (room := self._make_room(pair.target, k)) > 0}
        states = {pair.shifted: pair.states for pair in pairs if pair.shifted in rooms and pair.states is not None}
        drafts = self.drafter.draft(rooms, states)
        for pair in pairs:
            if pair.shifted in rooms:
                self._forget_draft(pair)
        return [drafts.get(pair.shifted, Draft([])) for pair in pairs]

    def _make_room(self, seq: Seq, k: int) -> int:
        """Return how many tokens to draft. The last two need no slot here, and the token sampled last has one."""
        assert self._pool is not None
        room = min(k, seq.max_len - 1 - len(seq.token_ids))
        while room > 2 and not self._pool.grow(seq, len(seq.token_ids) + room - 2):
            room -= 1
        return room

    @staticmethod
    def _forget_draft(pair: _Shifted) -> None:
        """Roll drafted tokens back; the target's next hidden states replace those computed here."""
        shifted = pair.shifted
        del shifted.token_ids[len(pair.target.token_ids) - 1 :]
        if shifted.counts is not None:
            shifted.counts.cut(len(shifted.token_ids))
        shifted.num_computed, pair.states = len(shifted.token_ids), None
