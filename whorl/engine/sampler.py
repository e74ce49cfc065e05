"""From logits to accepted tokens. Acceptance is here and nowhere else.

The noise of a sampled token is a function of its sequence's seed and its place in the output alone. So every row of a
draft is sampled as plain decoding would sample it, and the draft is accepted as far as it is equal. What comes out is
plain decoding's output bit for bit, greedy or not, whoever drafted: a drafted token x stays with the probability p(x)
that the target gives it, and where it does not, the token in its place is the target's own.

A token that was itself drawn, from a draft model's distribution q, stays with probability min(1, p(x) / q(x)), else one
drawn from max(p - q, 0) takes its place: more of the draft stays, and what comes out has the target's distribution,
though for one seed not the same text as without a draft.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import NamedTuple

import torch
from torch import Tensor

from whorl import ops
from whorl.device import HOST, lasting
from whorl.nn import Model
from whorl.ops.sample import gumbel

from .adjust import Adjuster
from .batch import Sample, Score
from .runner import Result
from .scheduler import Chunk
from .sequence import Logprob, SamplingParams
from .small_copy import fetch

_SCORE_ROWS = 256  # of logits held at once while a prompt is scored


class Token(NamedTuple):
    id: int
    logprob: Logprob | None = None


class Sampler:
    """vocab_size: ids from here on are padding of the model's vocabulary and are never sampled."""

    def __init__(self, model: Model, vocab_size: int) -> None:
        self.model, self.vocab_size = model, vocab_size
        self._adjuster = Adjuster(vocab_size)

    @torch.inference_mode()
    def start(self, results: List[Result]) -> Callable[[], dict[Chunk, list[Token]]]:
        """Sample what the runner has not; the function waits for the tokens, and gives the new ones of each chunk.

        Prompts are scored and log-probabilities read at once, which waits for the device.
        """
        for result in results:
            self._score(result.scores, result.scored)
        results = [result for result in results if result.samples]
        samples = [sample for result in results for sample in result.samples]
        ids, logprobs = [], []
        for result in results:
            is_plain = all(each.chunk.sequence.is_plain and each.chunk.probs is None for each in result.samples)
            ids.append(result.token_ids if is_plain else self.sample(result.logits, result.samples))
            wanted = [sample.chunk.sequence.params.logprobs for sample in result.samples]
            logprobs += self._logprobs(result.logits, ids[-1], wanted)
        if not ids:
            return dict
        read = fetch(ids[0] if len(ids) == 1 else torch.cat(ids))
        return lambda: _accept(samples, read().tolist(), logprobs)

    def sample(self, logits: Tensor, samples: List[Sample]) -> Tensor:
        """One id for each row, by the parameters of its sequence."""
        logits = self._adjuster.adjust(logits.float(), samples)
        drawn = [row for row, sample in enumerate(samples) if _is_drawn(sample)]
        if not drawn:
            return _sample(logits, samples)
        plain = [row for row, sample in enumerate(samples) if not _is_drawn(sample)]
        ids = logits.new_empty(len(samples), dtype=torch.int64)
        ids[plain] = _sample(logits[plain], [samples[row] for row in plain])
        ids[drawn] = _judge(logits[drawn], [samples[row] for row in drawn])
        return ids

    def draw(self, logits: Tensor, samples: List[Sample]) -> tuple[Tensor, Tensor]:
        """For a draft: an id for each row, and the distribution [N, V] it was drawn from; no draw where it is greedy.

        The noise is a stream of its own: with the target's, a token's draft would tell what replaces it.
        """
        logits = self._adjuster.adjust(logits.float(), samples)
        temperature, *cuts = _filters([sample.chunk.sequence.params for sample in samples], logits.device)
        probs = probabilities(logits, temperature, *cuts)
        is_drawn = temperature > 0
        chosen = torch.where(is_drawn[:, None], probs.log(), logits)
        return _pick(chosen, is_drawn.float(), samples, _DRAFT), probs

    def _score(self, all_scores: List[Score], hidden: Tensor) -> None:
        kept = [row for row, score in enumerate(all_scores) if score.position + 1 == score.sequence.prompt_len]
        for row in kept:
            all_scores[row].sequence.embedding = hidden[row].float().to(HOST, copy=True)
        if kept:
            rows = [row for row in range(len(all_scores)) if row not in set(kept)]
            all_scores, hidden = [all_scores[row] for row in rows], hidden[rows]
        for start in range(0, len(all_scores), _SCORE_ROWS):
            scores = all_scores[start : start + _SCORE_ROWS]
            logits = self.model.logits(hidden[start : start + _SCORE_ROWS])
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
        all_logprobs = ops.log_softmax(logits[rows])
        own, own_ids = all_logprobs.gather(1, ids[rows, None]).squeeze(1).tolist(), ids.tolist()
        count = min(max(wanted[row] or 0 for row in rows), self.vocab_size)
        values, tops = (t.tolist() for t in all_logprobs[:, : self.vocab_size].topk(count))
        for i, row in enumerate(rows):
            top = tuple(zip(tops[i], values[i], strict=True))[: wanted[row]]
            found[row] = Logprob(own_ids[row], own[i], top)
        return found


def _accept(samples: List[Sample], ids: List[int], logprobs: List[Logprob | None]) -> dict[Chunk, list[Token]]:
    tokens: dict[Chunk, list[Token]] = {}
    for sample, token_id, logprob in zip(samples, ids, logprobs, strict=True):
        tokens.setdefault(sample.chunk, []).append(Token(token_id, logprob))
    for chunk, each in tokens.items():
        if chunk.draft:
            del each[1 + _num_equal(chunk.draft, each) :]
    return tokens


def _num_equal(draft: List[int], tokens: List[Token]) -> int:
    """How many tokens of the draft stay; where draft and target part, the target's own token comes behind them."""
    pairs = enumerate(zip(draft, tokens, strict=False))
    return next((i for i, (guess, token) in pairs if guess != token.id), len(draft))


def _sample(logits: Tensor, samples: List[Sample]) -> Tensor:
    params = [sample.chunk.sequence.params for sample in samples]
    return ops.sample(logits, *_filters(params, logits.device), *_noise(samples, logits.device))


# ---- drafts that were drawn

# What a sequence's seed is changed by for the noise of its drafts and of their acceptance.
_DRAFT, _ACCEPT = 0x3C6EF372FE94F82B, 0x1F83D9ABFB41BD6B


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[N, V] fp32: the distribution that `ops.sample` draws from. Rows of temperature 0 are left as at 1."""
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1)[:, None]
    ordered = scaled.sort(descending=True).values
    k = torch.where((top_k > 0) & (top_k < ordered.shape[1]), top_k, ordered.shape[1])
    least = ordered.gather(1, k[:, None].long() - 1)
    weights = ordered.masked_fill(ordered < least, -math.inf).exp()
    above = weights.cumsum(1) - weights  # mass of what stands before each
    is_in = above < top_p[:, None] * weights.sum(1, keepdim=True)
    count = torch.where(top_p < 1, is_in.sum(1).clamp_min(1), k)
    least = torch.maximum(least, ordered.gather(1, count[:, None] - 1))
    is_cut = (scaled < least) | ((min_p[:, None] > 0) & (scaled.exp() < min_p[:, None]))
    return scaled.masked_fill(is_cut, -math.inf).softmax(-1)


def _is_drawn(sample: Sample) -> bool:
    """Whether the row's token is to be weighed against a drawn one; the row behind the whole draft has none."""
    return sample.chunk.probs is not None and sample.num_drafted < len(sample.chunk.draft)


def _judge(logits: Tensor, samples: List[Sample]) -> Tensor:
    """The drafted token of each row, or what takes its place: never the same one, since there p - q is not above 0."""
    p = probabilities(logits, *_filters([sample.chunk.sequence.params for sample in samples], logits.device))
    q = torch.stack([sample.chunk.probs[sample.num_drafted] for sample in samples])  # type: ignore[index]
    q = torch.nn.functional.pad(q, (0, p.shape[1] - q.shape[1]))  # a draft model's table may be longer or shorter
    drafted = _column([sample.chunk.draft[sample.num_drafted] for sample in samples], p.device, torch.int64)
    p_drafted, q_drafted = (x.gather(1, drafted[:, None]).squeeze(1) for x in (p, q))
    is_kept = _is_kept(p_drafted, q_drafted, _uniform(samples, p.device))
    replaced = _pick(_rest(p, q).log(), torch.ones_like(p_drafted), samples)
    return torch.where(is_kept, drafted, replaced)


def _is_kept(p: Tensor, q: Tensor, uniform: Tensor) -> Tensor:
    """True with probability min(1, p / q)."""
    return uniform * q < p


def _rest(p: Tensor, q: Tensor) -> Tensor:
    """What of p the accepted tokens do not make up, not normalised."""
    rest = (p - q).clamp_min(0)
    # Equal distributions leave no rest but rounding, and reject nothing.
    return torch.where(rest.sum(1, keepdim=True) > 0, rest, p)


def _pick(logits: Tensor, temperature: Tensor, samples: List[Sample], stream: int = 0) -> Tensor:
    """One id for each row, nothing left out."""
    none, all_of_it = torch.zeros_like(temperature), torch.ones_like(temperature)
    seeds, places = _noise(samples, logits.device, stream)
    return ops.sample(logits, temperature, none.long(), all_of_it, none, seeds, places)


def _uniform(samples: List[Sample], device: torch.device) -> Tensor:
    """[N] in (0, 1): token 0's noise of a stream of its own."""
    return torch.exp(-torch.exp(-gumbel(*_noise(samples, device, _ACCEPT), 1).squeeze(1)))


def _noise(samples: List[Sample], device: torch.device, stream: int = 0) -> tuple[Tensor, Tensor]:
    seeds = _column([sample.chunk.sequence.seed ^ stream for sample in samples], device, torch.int64)
    return seeds, _column([sample.place for sample in samples], device, torch.int64)


def _filters(params: List[SamplingParams], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        _column([p.temperature for p in params], device),
        _column([p.top_k for p in params], device, torch.int64),
        _column([p.top_p for p in params], device),
        _column([p.min_p for p in params], device),
    )


def _column(values: list[float] | list[int], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return lasting(torch.tensor(values, dtype=dtype), device.type).to(device, non_blocking=True)
