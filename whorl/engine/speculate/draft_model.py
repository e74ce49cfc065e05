"""A smaller model of the same tokenizer drafts. It has a cache of its own, kept in step with the target's sequences.

Nothing here decides what is generated. A draft model that lags, runs out of blocks or guesses wrong costs time only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whorl.device import default_device, require
from whorl.engine.batch import Sample
from whorl.engine.blocks import BlockPool
from whorl.engine.caches import block_size as cache_block_size
from whorl.engine.caches import cache_memory, token_bytes
from whorl.engine.sampler import Sampler
from whorl.engine.scheduler import Chunk
from whorl.engine.sequence import Sequence as Seq
from whorl.nn import Model

from . import Draft, Proposer, measure_cost
from .draft_forward import Forward, Span

if TYPE_CHECKING:
    from whorl.engine.llm import Tokenizer

_SHARE = 8  # of the memory that a cache would take, this part is the draft's
_COST_ROWS = (1, 4, 16, 64)


@dataclass(slots=True, eq=False)
class _Mirror:
    """A target's sequence as the draft model holds it: `own` has its tokens, then those drafted last."""

    target: Seq
    own: Seq
    num_known: int  # tokens of `own` that are the target's
    room: int = 0  # tokens to draft in this round

    @classmethod
    def of(cls, target: Seq) -> "_Mirror":
        params = replace(target.params, n=1, logprobs=None, prompt_logprobs=None)
        prompt = target.token_ids[: target.prompt_len]
        own = Seq(prompt, params, max_len=target.max_len, contents=target.contents, eos_ids=target.eos_ids)
        own.seed = target.seed
        return cls(target, own, 0)

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

    @property
    def is_short(self) -> bool:
        """Whether one short call takes all that is pending."""
        return self.own.num_pending <= Forward.max_rows


class DraftModel(Proposer):
    """Drafts by running a small model, k tokens in k steps for all sequences at once.

    path: as `LLM` takes it; or hand in `model` and `tokenizer`. k: longest draft.
    num_blocks: of its cache; or memory, its bytes; or neither: an eighth of what a cache of its own would take. Where
    it is full, sequences that are not drafting lose their blocks first, then some get no draft.
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
        max_num_batched_tokens: int = 2048,
        use_graphs: bool | None = None,
    ) -> None:
        for name, value in (("k", k), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise ValueError(f"DraftModel: {name} is {value}, expected at least 1")
        device = require(device or default_device())
        if model is None:
            model, tokenizer = _load(path, device, dtype)
        self.k, self.model, self.tokenizer = k, model, tokenizer
        specs = model.cache_specs()
        block_size = cache_block_size(specs, device, block_size)
        if num_blocks is None:
            memory = cache_memory(device) // _SHARE if memory is None else memory
            num_blocks = memory // (block_size * token_bytes(specs))
        self.pool = BlockPool(num_blocks, block_size)
        self.max_len = min(model.max_length, num_blocks * block_size)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, len(tokenizer))
        self._sampler = Sampler(model, self.vocab_size)
        self._forward = Forward(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_len=self.max_len,
            device=device,
            use_graphs=use_graphs,
        )
        self._mirrors: dict[int, _Mirror] = {}  # by the target's id

    def check(self, model: Model, tokenizer: "Tokenizer | None") -> None:
        difference = _difference(self, model, tokenizer)
        if difference is not None:
            raise ValueError(f"DraftModel: the tokenizers differ: {difference}. A draft model must share its target's")

    def cost(self, *, seconds: float) -> Mapping[int, float]:
        return measure_cost(self._forward, _COST_ROWS, seconds)

    def warm_up(self, max_num_seqs: int) -> Iterable[tuple[str, Callable[[], None]]]:
        for rows in self._forward.graph_rows(max_num_seqs):
            yield f"draft of {rows}", partial(self._forward.warm_up, rows)
        size = min(self.max_num_batched_tokens, self.max_len)
        while size:
            yield f"draft model's prompt of {size}", partial(self._forward.warm_up_prompt, size)
            size //= 2

    @torch.inference_mode()
    def propose(self, sequences: Sequence[Seq], k: int) -> list[Draft]:
        self._forget_finished()
        for seq in sequences:
            if seq.id not in self._mirrors:
                self._mirrors[seq.id] = _Mirror.of(seq)
        mirrors = [self._mirrors[seq.id] for seq in sequences]
        busy = {seq.id for seq in sequences}
        for mirror in mirrors:
            mirror.sync()
            mirror.room = self._make_room(mirror, k, busy)
        live = [mirror for mirror in mirrors if mirror.room > 0]
        self._catch_up(live)
        probs: dict[_Mirror, list[Tensor]] = {mirror: [] for mirror in mirrors}
        for i in range(k):
            self._step([mirror for mirror in live if mirror.room > i], probs)
        return [_draft(mirror, probs[mirror]) for mirror in mirrors]

    # ---- the parts of a round

    def _forget_finished(self) -> None:
        for mirror in [m for m in self._mirrors.values() if m.target.is_finished]:
            self.pool.release(mirror.own)
            del self._mirrors[mirror.target.id]

    def _make_room(self, mirror: _Mirror, k: int, busy: set[int]) -> int:
        """How many tokens to draft: as many as the target could take and this cache can hold."""
        own, length = mirror.own, len(mirror.own.token_ids)
        room = min(k, mirror.target.max_len - 1 - length, self.max_len - length)
        if room < 1:
            return 0
        # The last token drafted is not computed and needs no slot.
        while not ((own.block_table or self.pool.admit(own)) and self.pool.grow(own, length + room - 1)):
            idle = next((m for m in self._mirrors.values() if m.own.block_table and m.target.id not in busy), None)
            if idle is None:
                self.pool.release(own)
                return 0
            self.pool.release(idle.own)
        return room

    def _catch_up(self, live: Sequence[_Mirror]) -> None:
        """Compute prompts and whatever else one decode call cannot take, a budget of tokens at a time."""
        while behind := [mirror.own for mirror in live if not mirror.is_short]:
            budget, spans = self.max_num_batched_tokens, []
            for own in behind:
                length = min(own.num_pending - 1, budget)
                if length > 0:
                    spans.append(Span(own, length))
                    budget -= length
            self._forward(spans)
            for span in spans:
                span.sequence.num_computed += span.length
                self.pool.publish(span.sequence)  # all of it the target's own tokens

    def _step(self, live: Sequence[_Mirror], probs: dict[_Mirror, list[Tensor]]) -> None:
        """One more token for each."""
        if not live:
            return
        hidden = self._forward([Span(mirror.own, mirror.own.num_pending) for mirror in live])
        samples = [Sample(Chunk(mirror.own, 1), 0, mirror.own.num_outputs) for mirror in live]
        ids, drawn_from = self._sampler.draw(self.model.logits(hidden), samples)
        for mirror, token_id, row in zip(live, ids.tolist(), drawn_from, strict=True):
            own = mirror.own
            own.num_computed = len(own.token_ids)
            if own.num_computed == mirror.num_known:
                self.pool.publish(own)
            own.token_ids.append(token_id)
            probs[mirror].append(row)


def _draft(mirror: _Mirror, probs: list[Tensor]) -> Draft:
    is_drawn = mirror.target.params.temperature > 0 and probs
    return Draft(mirror.own.token_ids[mirror.num_known :], torch.stack(probs) if is_drawn else None)


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
