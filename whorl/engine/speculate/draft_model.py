"""Drafting with a smaller model of the same tokenizer. It has a separate cache, kept in sync with the target's.

Nothing here decides what is generated. A draft model that lags, runs out of blocks or drafts badly costs time only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whorl.device import default_device, require
from whorl.engine.blocks import BlockPool
from whorl.engine.memory import block_size as cache_block_size
from whorl.engine.memory import cache_memory, check_cache, token_bytes, without_states
from whorl.engine.runner import Runner
from whorl.engine.sequence import Sequence as Seq
from whorl.engine.settings import EngineSettings
from whorl.nn import Model

from . import Draft, Proposer
from .one_by_one import OneByOne, mirrored

if TYPE_CHECKING:
    from whorl.engine.sequence import Tokenizer

_MOST_SEQS = 256  # that draft at once
_SHARE = 8  # the draft model's cache takes one part in so many of the default cache memory


@dataclass(slots=True, eq=False)
class _Mirror:
    """The draft model's copy of a target's sequence: `copy` has its tokens, then those drafted last."""

    target: Seq
    copy: Seq
    num_known: int  # tokens of `copy` that are the target's

    @classmethod
    def of(cls, target: Seq) -> "_Mirror":
        return cls(target, mirrored(target, target.token_ids[: target.prompt_len], target.contents), 0)

    def sync(self) -> None:
        """Take over the target's tokens; rejected draft tokens are rolled back by lowering `num_computed`."""
        copy, known, agreed = self.copy, self.target.token_ids, self.num_known
        while agreed < min(len(copy.token_ids), len(known)) and copy.token_ids[agreed] == known[agreed]:
            agreed += 1
        copy.token_ids[agreed:] = known[agreed:]
        if copy.counts is not None:
            copy.counts.cut(agreed)
        copy.num_computed = min(copy.num_computed, agreed, len(known) - 1)
        self.num_known = len(known)


class DraftModel(Proposer):
    """Drafts by running a small model, k tokens in k steps for all sequences at once.

    path: as `LLM` takes it; or pass `model` and `tokenizer`. k: longest draft.
    num_blocks: blocks of its cache; or memory, its bytes; or neither: an eighth of the default cache memory. When the
    cache is full, or more than 256 sequences draft, sequences that are not drafting lose their blocks first,
    then some get no draft. Raises ValueError for sizes below 1. Example: `LLM(path, speculate=DraftModel(small, k=4))`
    """

    has_weights = True

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        model: Model | None = None,
        tokenizer: "Tokenizer | None" = None,
        k: int = 4,
        device: str | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        memory: int | None = None,
        max_num_batched_tokens: int = 2048,
    ) -> None:
        for name, value in {"k": k, "max_num_batched_tokens": max_num_batched_tokens}.items():
            if value < 1:
                raise ValueError(f"DraftModel: {name} is {value}, expected at least 1")
        device = require(device or default_device())
        if model is None:
            model, tokenizer = _load(path, device)
        self.k, self.model, self.tokenizer = k, model, tokenizer
        specs = without_states(model, "DraftModel")
        block_size = cache_block_size(specs, device, block_size)
        if num_blocks is None:
            memory = cache_memory(device) // _SHARE if memory is None else memory
            num_blocks = memory // (block_size * token_bytes(specs))
        check_cache(num_blocks, block_size * token_bytes(specs), device, memory=memory, name="cache of the draft model")
        self.pool = BlockPool(num_blocks, block_size)
        self.max_len = min(model.max_length, num_blocks * block_size)
        self.vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, len(tokenizer))
        most = max(max_num_batched_tokens, _MOST_SEQS)
        settings = EngineSettings(max_num_seqs=_MOST_SEQS, max_num_batched_tokens=most, prompt_graphs=0)
        sizes: dict[str, Any] = {"num_blocks": num_blocks, "block_size": block_size, "max_len": self.max_len}
        runner = Runner(model, settings, **sizes, device=device, vocab_size=self.vocab_size)
        self._drafter = OneByOne(runner, max_tokens=max_num_batched_tokens)
        self._lanes = list(range(_MOST_SEQS))[::-1]  # the free ones
        self._mirrors: dict[int, _Mirror] = {}  # by id of the target's sequence

    def check(self, model: Model, tokenizer: "Tokenizer | None") -> None:
        difference = _difference(self, model, tokenizer)
        if difference is not None:
            raise ValueError(f"DraftModel: the tokenizers differ: {difference}. Draft and target must share one")

    def cost(self, *, seconds: float) -> Mapping[int, float]:
        return self._drafter.cost(seconds=seconds)

    def warm_up(self, max_num_seqs: int) -> Iterable[tuple[str, Callable[[], None]]]:
        return self._drafter.warm_up(min(max_num_seqs, _MOST_SEQS), self.k, self.max_len)

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
            rooms[mirror.copy] = self._make_room(mirror, k, busy)
        rooms = {copy: room for copy, room in rooms.items() if room > 0}
        self._drafter.catch_up(list(rooms))
        drafts = self._drafter.draft(rooms)
        return [drafts.get(mirror.copy, Draft([])) for mirror in mirrors]

    # ---- the parts of a round

    def _sync(self, mirror: _Mirror) -> None:
        mirror.sync()
        if mirror.copy.block_table:
            self.pool.publish(mirror.copy)  # at this point only tokens of the target are computed

    def _release(self, mirror: _Mirror) -> None:
        if mirror.copy.block_table:
            self._lanes.append(mirror.copy.lane)
            self.pool.release(mirror.copy)

    def _forget_finished(self) -> None:
        for mirror in [m for m in self._mirrors.values() if m.target.is_finished]:
            self._sync(mirror)
            self._release(mirror)
            del self._mirrors[mirror.target.id]

    def _make_room(self, mirror: _Mirror, k: int, busy: set[int]) -> int:
        """Return how many tokens to draft: as many as the target could take and this cache can hold."""
        copy, length = mirror.copy, len(mirror.copy.token_ids)
        room = min(k, mirror.target.max_len - 1 - length, self.max_len - length)
        if room < 1:
            return 0
        # The last token drafted is not computed and needs no slot.
        while not (self._admit(copy) and self.pool.grow(copy, length + room - 1)):
            idle = next((m for m in self._mirrors.values() if m.copy.block_table and m.target.id not in busy), None)
            if idle is None:
                self._release(mirror)
                return 0
            self._release(idle)
        return room

    def _admit(self, seq: Seq) -> bool:
        if seq.block_table:
            return True
        if not self._lanes or not self.pool.admit(seq):
            return False
        seq.lane, seq.is_new = self._lanes.pop(), True
        return True


def _difference(draft: DraftModel, model: Model, tokenizer: "Tokenizer | None") -> str | None:
    """Return how the tokenizers of draft and target differ; None if they do not."""
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


def _load(path: str | Path | None, device: str) -> tuple[Model, Any]:
    from whorl.engine.tokenizer import Tokenizer
    from whorl.engine.weights import load_model, resolve

    folder = resolve(path)
    return load_model(folder, device=device), Tokenizer.from_path(folder)
