"""From logits to accepted tokens. Acceptance is here and nowhere else.

The noise of a sampled token is a function of its sequence's seed and its place in the output alone. So every row of a
draft is sampled as plain decoding would sample it, and the draft is accepted as far as it is equal. What comes out is
plain decoding's output bit for bit, greedy or not, whoever drafted: a drafted token x stays with the probability p(x)
that the target gives it, and where it does not, the token in its place is the target's own.
"""

import math
from collections import Counter
from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from whorl import ops
from whorl.nn import Model

from .batch import Batch, Sample
from .scheduler import Chunk
from .sequence import Logprob, SamplingParams

_SCORE_ROWS = 256  # of logits held at once while a prompt is scored


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    logprob: Logprob | None = None


class Sampler:
    """vocab_size: ids from here on are padding of the model's vocabulary and are never sampled."""

    def __init__(self, model: Model, vocab_size: int) -> None:
        self.model, self.vocab_size = model, vocab_size

    @torch.inference_mode()
    def accept(self, batch: Batch, sampled: Tensor, scored: Tensor) -> dict[Chunk, list[Token]]:
        """New tokens of each chunk that has any, from the hidden rows of `batch.samples`; scores prompts on the way."""
        self._score(batch, scored)
        if not batch.samples:
            return {}
        logits = self.model.logits(sampled)
        ids = self.sample(logits, batch.samples)
        found = self._logprobs(logits, ids, [sample.chunk.sequence.params.logprobs for sample in batch.samples])
        tokens: dict[Chunk, list[Token]] = {}
        for sample, token_id, logprob in zip(batch.samples, ids.tolist(), found, strict=True):
            tokens.setdefault(sample.chunk, []).append(Token(token_id, logprob))
        return {chunk: each[: 1 + _num_equal(chunk.draft, each)] for chunk, each in tokens.items()}

    def sample(self, logits: Tensor, samples: List[Sample]) -> Tensor:
        """One id for each row, by the parameters of its sequence."""
        params = [sample.chunk.sequence.params for sample in samples]
        logits = _allow(_penalize(logits[:, : self.vocab_size], samples), samples)
        return ops.sample(
            logits,
            _column([p.temperature for p in params], logits.device),
            _column([p.top_k for p in params], logits.device, torch.int64),
            _column([p.top_p for p in params], logits.device),
            _column([p.min_p for p in params], logits.device),
            _column([sample.chunk.sequence.seed for sample in samples], logits.device, torch.int64),
            _column([sample.place for sample in samples], logits.device, torch.int64),
        )

    def _score(self, batch: Batch, hidden: Tensor) -> None:
        for start in range(0, len(batch.scores), _SCORE_ROWS):
            scores = batch.scores[start : start + _SCORE_ROWS]
            logits = self.model.logits(hidden[start : start + _SCORE_ROWS], rows="prompt")
            ids = [score.sequence.token_ids[score.position + 1] for score in scores]
            wanted = [score.sequence.params.prompt_logprobs for score in scores]
            found = self._logprobs(logits, torch.tensor(ids, device=logits.device), wanted)
            for score, logprob in zip(scores, found, strict=True):
                assert logprob is not None
                score.sequence.prompt_logprobs.append(logprob)

    def _logprobs(self, logits: Tensor, ids: Tensor, wanted: List[int | None]) -> list[Logprob | None]:
        """Of the model's own distribution, before temperature, penalties and filters."""
        rows = [row for row, count in enumerate(wanted) if count is not None]
        found: list[Logprob | None] = [None] * len(wanted)
        if not rows:
            return found
        all_logprobs = logits[rows].log_softmax(-1)
        own, own_ids = all_logprobs.gather(1, ids[rows, None]).squeeze(1).tolist(), ids.tolist()
        count = min(max(wanted[row] or 0 for row in rows), self.vocab_size)
        values, tops = (t.tolist() for t in all_logprobs[:, : self.vocab_size].topk(count))
        for i, row in enumerate(rows):
            top = tuple(zip(tops[i], values[i], strict=True))[: wanted[row]]
            found[row] = Logprob(own_ids[row], own[i], top)
        return found


def _num_equal(draft: List[int], tokens: List[Token]) -> int:
    """How many tokens of the draft stay; where draft and target part, the target's own token comes behind them."""
    pairs = enumerate(zip(draft, tokens, strict=False))
    return next((i for i, (guess, token) in pairs if guess != token.id), len(draft))


def _penalize(logits: Tensor, samples: List[Sample]) -> Tensor:
    """Penalties and biases; each row's penalties see the output and the part of the draft before it."""
    wanted = [_adjustments(sample, logits.shape[1]) for sample in samples]
    width = max(map(len, wanted))
    if width == 0:
        return logits
    params, device = [sample.chunk.sequence.params for sample in samples], logits.device

    def rows(part: int, empty: float, dtype: torch.dtype) -> Tensor:
        padded = [[each[part] for each in row] + [empty] * (width - len(row)) for row in wanted]
        return torch.tensor(padded, dtype=dtype).to(device, non_blocking=True)

    return ops.penalize(
        logits,
        rows(0, -1, torch.int64),
        rows(1, -1, torch.int64),
        repetition=_column([p.repetition_penalty for p in params], device),
        presence=_column([p.presence_penalty for p in params], device),
        frequency=_column([p.frequency_penalty for p in params], device),
        bias=rows(2, 0.0, torch.float32),
    )


def _adjustments(sample: Sample, vocab_size: int) -> list[tuple[int, int, float]]:
    """Token, how often it was generated (0: only in the prompt, -1: not at all) and its bias."""
    seq, params = sample.chunk.sequence, sample.chunk.sequence.params
    bias = dict(params.logit_bias)
    if sample.place < params.min_tokens:
        bias |= dict.fromkeys(seq.stop_ids, -math.inf)
    counts: dict[int, int] = {}
    if _has_penalties(params):
        counts = dict.fromkeys(seq.token_ids[: seq.prompt_len], 0)
        counts |= Counter(seq.output_ids + sample.chunk.draft[: sample.num_drafted])
    return [(t, counts.get(t, -1), bias.get(t, 0.0)) for t in counts.keys() | bias.keys() if t < vocab_size]


def _has_penalties(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def _allow(logits: Tensor, samples: List[Sample]) -> Tensor:
    if all(sample.chunk.sequence.params.allow is None for sample in samples):
        return logits
    keep = torch.ones_like(logits, dtype=torch.bool)
    for row, sample in enumerate(samples):
        seq = sample.chunk.sequence
        mask = seq.params.allow and seq.params.allow(seq.output_ids + sample.chunk.draft[: sample.num_drafted])
        if mask is not None:
            size = min(len(mask), keep.shape[1])
            keep[row, size:] = False
            keep[row, :size] = mask[:size].to(keep.device)
    return logits.masked_fill(~keep, -math.inf)


def _column(values: list[float] | list[int], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
