"""A smaller model of the same tokenizer drafts. It has a cache of its own, kept in step with the target's sequences.

Nothing here decides what is generated. A draft model that lags, runs out of blocks or guesses wrong costs time only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whorl.device import default_device, require
from whorl.engine.blocks import BlockPool
from whorl.engine.caches import block_size as cache_block_size
from whorl.engine.caches import cache_memory, token_bytes
from whorl.engine.runner import Runner
from whorl.engine.sequence import Sequence as Seq
from whorl.nn import Model

from . import Draft, Proposer
from .one_by_one import OneByOne, mirrored

if TYPE_CHECKING:
    from whorl.engine.llm import Tokenizer

_SHARE = 8  # of the memory that a cache would take, this part is the draft's


@dataclass(slots=True, eq=False)
class _Mirror:
    """A target's sequence as the draft model holds it: `own` has its tokens, then those drafted last."""

    target: Seq
    own: Seq
    num_known: int  # tokens of `own` that are the target's

    @classmethod
    def of(cls, target: Seq) -> "_Mirror":
        return cls(target, mirrored(target, target.token_ids[: target.prompt_len], target.contents), 0)

    def sync(self) -> None:
        """Take over what the target has. What was drafted and rejected is rolled back: computed tokens end before."""
        own, known, agreed = self.own, self.target.token_ids, self.num_known
        while agreed < min(len(own.token_ids), len(known)) and own.token_ids[agreed] == known[agreed]:
            agreed += 1
        own.token_ids[agreed:] = known[agreed:]
        if own.counts is not None:
            own.counts.cut(agreed)
        own.num_computed = min(own.num_computed, agreed, len(known) - 1)
        self.num_known = len(known)


class DraftModel(Proposer):
    """Drafts by running a small model, k tokens in k steps for all sequences at once.

    path: as `LLM` takes it; or hand in `model` and `tokenizer`. k: longest draft.
    num_blocks: of its cache; or memory, its bytes; or neither: an eighth of what a cache of its own would take. Where
    it is full, or more than `max_num_seqs` draft, sequences that are not drafting lose their blocks first, then some
    get no draft.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        model: Model | None = None,
        tokenizer: "Tokenizer | None" = None,
        k: int = 4,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        memory: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        use_graphs: bool | None = None,
    ) -> None:
        sizes = {"k": k, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"DraftModel: {name} is {value}, expected at least 1")
        device = require(device or default_device())
        if model is None:
            model, tokenizer = _load(path, device, dtype)
        self.k, self.model, self.tokenizer, self.max_num_seqs = k, model, tokenizer, max_num_seqs
        specs = model.cache_specs()
        block_size = cache_block_size(specs, device, block_size)
        if num_blocks is None:
            memory = cache_memory(device) // _SHARE if memory is None else memory
            num_blocks = memory // (block_size * token_bytes(specs))
        self.pool = BlockPool(num_blocks, block_size)
        self.max_len = min(model.max_length, num_blocks * block_size)
        self.vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, len(tokenizer))
        runner = Runner(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_len=self.max_len,
            device=device,
            use_graphs=use_graphs,
            max_num_seqs=max_num_seqs,
            max_rows=max(max_num_batched_tokens, max_num_seqs),
            vocab_size=self.vocab_size,
        )
        self._guesses = OneByOne(runner, max_rows=max_num_batched_tokens)
        self._lanes = list(range(max_num_seqs))[::-1]  # free ones
        self._mirrors: dict[int, _Mirror] = {}  # by the target's id

    def check(self, model: Model, tokenizer: "Tokenizer | None") -> None:
        difference = _difference(self, model, tokenizer)
        if difference is not None:
            raise ValueError(f"DraftModel: the tokenizers differ: {difference}. A draft model must share its target's")

    def cost(self, *, seconds: float) -> Mapping[int, float]:
        return self._guesses.cost(seconds=seconds)

    def warm_up(self, max_num_seqs: int) -> Iterable[tuple[str, Callable[[], None]]]:
        return self._guesses.warm_up(min(max_num_seqs, self.max_num_seqs), self.k, self.max_len)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[Seq], k: int) -> list[Draft]:
        self._forget_finished()
        for seq in sequences:
            if seq.id not in self._mirrors:
                self._mirrors[seq.id] = _Mirror.of(seq)
        mirrors = [self._mirrors[seq.id] for seq in sequences]
        busy = {seq.id for seq in sequences}
        rooms: dict[Seq, int] = {}
        for mirror in mirrors:
            self._sync(mirror)
            rooms[mirror.own] = self._make_room(mirror, k, busy)
        rooms = {own: room for own, room in rooms.items() if room > 0}
        self._guesses.catch_up(list(rooms))
        drafts = self._guesses.draft(rooms)
        return [drafts.get(mirror.own, Draft([])) for mirror in mirrors]

    # ---- the parts of a round

    def _sync(self, mirror: _Mirror) -> None:
        mirror.sync()
        if mirror.own.block_table:
            self.pool.publish(mirror.own)  # all that is computed now are the target's own tokens

    def _release(self, mirror: _Mirror) -> None:
        if mirror.own.block_table:
            self._lanes.append(mirror.own.lane)
            self.pool.release(mirror.own)

    def _forget_finished(self) -> None:
        for mirror in [m for m in self._mirrors.values() if m.target.is_finished]:
            self._sync(mirror)
            self._release(mirror)
            del self._mirrors[mirror.target.id]

    def _make_room(self, mirror: _Mirror, k: int, busy: set[int]) -> int:
        """How many tokens to draft: as many as the target could take and this cache can hold."""
        own, length = mirror.own, len(mirror.own.token_ids)
        room = min(k, mirror.target.max_len - 1 - length, self.max_len - length)
        if room < 1:
            return 0
        # The last token drafted is not computed and needs no slot.
        while not (self._admit(own) and self.pool.grow(own, length + room - 1)):
            idle = next((m for m in self._mirrors.values() if m.own.block_table and m.target.id not in busy), None)
            if idle is None:
                self._release(mirror)
                return 0
            self._release(idle)
        return room

    def _admit(self, own: Seq) -> bool:
        if own.block_table:
            return True
        if not self._lanes or not self.pool.admit(own):
            return False
        own.lane, own.is_new = self._lanes.pop(), True
        return True


def _difference(draft: DraftModel, model: Model, tokenizer: "Tokenizer | None") -> str | None:
    """What tells the draft's tokens from the target's; None where nothing does."""
    if tokenizer is None or draft.tokenizer is None:
        sizes = draft.model.vocab_size, model.vocab_size
        return None if sizes[0] == sizes[1] else f"{sizes[0]} tokens against {sizes[1]}"
    if tokenizer is draft.tokenizer:
        return None
    if len(tokenizer) != len(draft.tokenizer):
        return f"{len(draft.tokenizer)} tokens against {len(tokenizer)}"
    for token_id in range(len(tokenizer)):
        ours, theirs = _spelling(draft.tokenizer, token_id), _spelling(tokenizer, token_id)
        if ours != theirs:
            return f"token {token_id} is {ours!r} against {theirs!r}"
    return None


def _spelling(tokenizer: "Tokenizer", token_id: int) -> str | None:
    try:
        return tokenizer.token(token_id)
    except ValueError:  # a gap in the vocabulary
        return None


def _load(path: str | Path | None, device: str, dtype: torch.dtype | None) -> tuple[Model, Any]:
    from whorl.engine.tokenizer import Tokenizer
    from whorl.engine.weights import load_model, resolve

    folder = resolve(path)
    return load_model(folder, device=device, dtype=dtype), Tokenizer.from_path(folder)
