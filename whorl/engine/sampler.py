"""The sampler turns logits into accepted tokens. Drafts are accepted here and nowhere else.

The noise of a sampled token depends only on its sequence's seed and its place in the output. So every position of a
draft is sampled exactly as plain decoding would sample it, and the draft is accepted up to the first token that
differs. The output equals that of plain decoding bit for bit, greedy or not, whatever the proposer: a drafted token x
is accepted with the probability p(x) that the target gives it; otherwise the target's own token takes its place.

A draft model samples its tokens, too. For a request with a seed it does so with the noise that the target has for the
same place, so that both mostly choose the same token, and the output remains that of plain decoding. Without a seed
nobody can tell, and more tokens are accepted in another way: a draft token x that was sampled from q is accepted with
probability min(1, p(x) / q(x)); otherwise a token sampled from max(p - q, 0) takes its place. The output then has the
target's distribution.
"""

from collections import abc
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from whorl import ops
from whorl.device import HOST, lasting
from whorl.ops.sample import gumbel, probabilities

from .adjust import Adjuster
from .call import Sample, Score
from .inputs import fetch
from .runner import Result
from .sampling_params import FILTERS, SamplingParams
from .scheduler import Chunk
from .sequence import Logprob

_SCORE_ROWS = 256  # rows of logits in memory at once while a prompt is scored


class Head(Protocol):
    """Computes the logits [N, V] of hidden states [N, C] of sequences whose adapters have these slots."""

    def logits(self, hidden: Tensor, slots: abc.Sequence[int]) -> Tensor: ...


class Token(NamedTuple):
    """A sampled token and, if requested, its log-probability."""

    id: int
    logprob: Logprob | None = None


class Sampler:
    """Samples the outputs of calls. Ids >= vocab_size pad the model's vocabulary and are never sampled.

    head: the runner or model whose `logits` scores prompts. mode: the setting `logprobs_mode`.
    """

    def __init__(self, head: Head, vocab_size: int, *, mode: str = "raw_logprobs") -> None:
        self.head, self.vocab_size, self.mode = head, vocab_size, mode
        self._adjuster = Adjuster(vocab_size)

    @torch.inference_mode()
    def start(self, results: abc.Sequence[Result]) -> Callable[[], dict[Chunk, list[Token]]]:
        """Start copying the sampled tokens to the host; return a function that waits for them and returns the accepted
        tokens of each chunk.

        Tokens of plain sequences were sampled by the runner; others, such as those with penalties, are sampled here.
        Log-probabilities of prompts and outputs are computed here as well, which waits for the device.
        """
        for result in results:
            self._score(result.scores, result.scored)
        results = [result for result in results if result.samples]
        samples = [sample for result in results for sample in result.samples]
        ids, logprobs = [], []
        for result in results:
            is_plain = all(sample.chunk.sequence.is_plain and sample.chunk.probs is None for sample in result.samples)
            ids.append(result.token_ids if is_plain else self.sample(result.logits, result.samples))
            counts = [sample.chunk.sequence.params.logprobs for sample in result.samples]
            logprobs += self._logprobs(self._reported(result.logits, result.samples), ids[-1], counts)
        if not ids:
            return dict
        read = fetch(ids[0] if len(ids) == 1 else torch.cat(ids))
        return lambda: _accept(samples, read().tolist(), logprobs)

    def sample(self, logits: Tensor, samples: abc.Sequence[Sample]) -> Tensor:
        """Return one sampled id [N] int64 for each row of logits [N, V]; row i belongs to `samples[i]`."""
        logits = self._adjuster.adjust(logits.float(), samples)
        drafted = [row for row, sample in enumerate(samples) if _has_sampled_draft(sample)]
        if not drafted:
            return _sample(logits, samples)
        plain = [row for row, sample in enumerate(samples) if not _has_sampled_draft(sample)]
        ids = logits.new_empty(len(samples), dtype=torch.int64)
        ids[plain] = _sample(logits[plain], [samples[row] for row in plain])
        ids[drafted] = _accept_or_resample(logits[drafted], [samples[row] for row in drafted])
        return ids

    def draw(self, logits: Tensor, samples: abc.Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Sample draft tokens: return one id for each row, and the distributions [N, V] they were sampled from.

        A greedy row takes the likeliest token. Without a seed the noise is a separate stream: with the target's noise,
        the draft would be correlated with the token that replaces it.
        """
        logits = self._adjuster.adjust(logits.float(), samples)
        filters = _filters([sample.chunk.sequence.params for sample in samples], logits.device)
        probs = probabilities(logits, **filters)
        is_random = filters["temperature"] > 0
        sampled_from = torch.where(is_random[:, None], probs.log(), logits)
        return _pick(sampled_from, is_random.float(), samples, _DRAFT), probs

    def _score(self, all_scores: abc.Sequence[Score], hidden: Tensor) -> None:
        """Store embeddings and log-probabilities of prompts in the sequences. hidden: [N, C], a row for each score."""
        embedded = [row for row, score in enumerate(all_scores) if score.position + 1 == score.sequence.prompt_len]
        for row in embedded:
            all_scores[row].sequence.embedding = hidden[row].float().to(HOST, copy=True)
        if embedded:
            rows = [row for row in range(len(all_scores)) if row not in set(embedded)]
            all_scores, hidden = [all_scores[row] for row in rows], hidden[rows]
        for start in range(0, len(all_scores), _SCORE_ROWS):
            scores = all_scores[start : start + _SCORE_ROWS]
            logits = self.head.logits(hidden[start : start + _SCORE_ROWS], [score.sequence.slot for score in scores])
            ids = [score.sequence.token_ids[score.position + 1] for score in scores]
            counts = [score.sequence.params.prompt_logprobs for score in scores]
            logprobs = self._logprobs(logits, torch.tensor(ids, device=logits.device), counts, has_rank=True)
            for score, logprob in zip(scores, logprobs, strict=True):
                assert logprob is not None
                score.sequence.prompt_logprobs.append(logprob)

    def _reported(self, logits: Tensor, samples: abc.Sequence[Sample]) -> Tensor:
        """Return the logits whose log-softmax is reported: the model's, or those that were sampled from.

        With no filter these are logits / temperature, of which a trainer gets the same bits.
        """
        params = [sample.chunk.sequence.params for sample in samples]
        if self.mode == "raw_logprobs" or all(p.logprobs is None for p in params):
            return logits
        if all(p.is_unfiltered and p.temperature in (0.0, 1.0) for p in params):
            return logits
        adjusted = self._adjuster.adjust(logits.float(), samples)
        filters = _filters(params, logits.device)
        scale = torch.where(filters["temperature"] > 0, filters["temperature"], 1)[:, None]
        # Ids that pad the vocabulary are part of the model's softmax, and so of the trainer's.
        reported = logits.float() / scale
        reported[:, : self.vocab_size] = adjusted / scale
        is_cut = torch.ones_like(reported, dtype=torch.bool)
        is_cut[:, : self.vocab_size] = probabilities(adjusted, **filters) == 0
        has_filter = torch.tensor([p.has_filter for p in params], device=logits.device)[:, None]
        return reported.masked_fill(is_cut & has_filter, -torch.inf)

    def _logprobs(
        self, logits: Tensor, ids: Tensor, counts: abc.Sequence[int | None], *, has_rank: bool = False
    ) -> list[Logprob | None]:
        """Return the log-probability of `ids[i]` by row i of logits [N, V].

        counts: how many of the likeliest tokens to report for each row; None: the row needs no log-probability.
        """
        rows = [row for row, count in enumerate(counts) if count is not None]
        logprobs: list[Logprob | None] = [None] * len(counts)
        if not rows:
            return logprobs
        all_logprobs = ops.log_softmax(logits[rows])
        own = all_logprobs.gather(1, ids[rows, None])
        sampled, sampled_ids = own.squeeze(1).tolist(), ids.tolist()
        count = min(max(counts[row] or 0 for row in rows), self.vocab_size)
        values, tops = (t.tolist() for t in all_logprobs[:, : self.vocab_size].topk(count))
        ranks = (1 + (all_logprobs > own).sum(1)).tolist() if has_rank else [0] * len(rows)
        for i, row in enumerate(rows):
            top = tuple(zip(tops[i], values[i], strict=True))[: counts[row]]
            logprobs[row] = Logprob(sampled_ids[row], sampled[i], top, ranks[i])
        return logprobs


def _accept(
    samples: abc.Sequence[Sample], ids: abc.Sequence[int], logprobs: abc.Sequence[Logprob | None]
) -> dict[Chunk, list[Token]]:
    """Return the new tokens of each chunk: the accepted part of its draft, and one token of the target."""
    tokens: dict[Chunk, list[Token]] = {}
    for sample, token_id, logprob in zip(samples, ids, logprobs, strict=True):
        tokens.setdefault(sample.chunk, []).append(Token(token_id, logprob))
    for chunk, sampled in tokens.items():
        if chunk.draft:
            del sampled[1 + _num_equal(chunk.draft, sampled) :]
    return tokens


def _num_equal(draft: abc.Sequence[int], tokens: abc.Sequence[Token]) -> int:
    """Return how many tokens of the draft equal the target's, up to the first that differs."""
    pairs = enumerate(zip(draft, tokens, strict=False))
    return next((i for i, (guess, token) in pairs if guess != token.id), len(draft))


def _sample(logits: Tensor, samples: abc.Sequence[Sample]) -> Tensor:
    """Return one id for each row, sampled as the runner does it."""
    params = [sample.chunk.sequence.params for sample in samples]
    return ops.sample(logits, **_filters(params, logits.device), **_noise(samples, logits.device))


# ---- drafts that were sampled

# The seed of a sequence whose request has none is XORed with these for the noise of its drafts and of their acceptance.
_DRAFT, _ACCEPT = 0x3C6EF372FE94F82B, 0x1F83D9ABFB41BD6B


def _has_sampled_draft(sample: Sample) -> bool:
    """Return whether the position has a draft token that was sampled; the position after the whole draft has none."""
    return sample.chunk.probs is not None and sample.num_drafted < len(sample.chunk.draft)


def _accept_or_resample(logits: Tensor, samples: abc.Sequence[Sample]) -> Tensor:
    """Return the draft token of each row if it is accepted, else a token from the residual distribution. That is never
    the draft token, because p - q is not above 0 there."""
    p = probabilities(logits, **_filters([sample.chunk.sequence.params for sample in samples], logits.device))
    q = torch.stack([sample.chunk.probs[sample.num_drafted] for sample in samples])  # type: ignore[index]
    q = torch.nn.functional.pad(q, (0, p.shape[1] - q.shape[1]))  # a draft model's vocabulary may be padded differently
    drafted = _column([sample.chunk.draft[sample.num_drafted] for sample in samples], p.device, torch.int64)
    p_drafted, q_drafted = (x.gather(1, drafted[:, None]).squeeze(1) for x in (p, q))
    is_accepted = _is_accepted(p_drafted, q_drafted, _uniform(samples, p.device))
    resampled = _pick(_residual(p, q).log(), torch.ones_like(p_drafted), samples)
    return torch.where(is_accepted, drafted, resampled)


def _is_accepted(p: Tensor, q: Tensor, uniform: Tensor) -> Tensor:
    """Return True with probability min(1, p / q)."""
    return uniform * q < p


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the part of p that accepted tokens do not cover, max(p - q, 0), not normalised."""
    residual = (p - q).clamp_min(0)
    # Equal distributions leave no residual but rounding, and reject nothing.
    return torch.where(residual.sum(1, keepdim=True) > 0, residual, p)


def _pick(logits: Tensor, temperature: Tensor, samples: abc.Sequence[Sample], stream: int = 0) -> Tensor:
    """Sample one id for each row, without filters. stream: what the seeds are XORed with."""
    filters = _filters([SamplingParams()] * len(samples), logits.device) | {"temperature": temperature}
    return ops.sample(logits, **filters, **_noise(samples, logits.device, stream))


def _uniform(samples: abc.Sequence[Sample], device: torch.device) -> Tensor:
    """Return [N] numbers in (0, 1): the noise of token 0 in a separate stream."""
    return torch.exp(-torch.exp(-gumbel(**_noise(samples, device, _ACCEPT), size=1).squeeze(1)))


def _noise(samples: abc.Sequence[Sample], device: torch.device, stream: int = 0) -> dict[str, Any]:
    """Return seeds and steps [N], of which the noise is a hash, as arguments of `ops.sample`.

    stream: what the seeds of sequences are XORed with whose request has none.
    """
    sequences = [sample.chunk.sequence for sample in samples]
    seeds = _column([seq.seed ^ (stream if seq.params.seed is None else 0) for seq in sequences], device, torch.int64)
    return {"seeds": seeds, "steps": _column([sample.output_index for sample in samples], device, torch.int64)}


def _filters(params: abc.Sequence[SamplingParams], device: torch.device) -> dict[str, Any]:
    """Return the filters [N] as arguments of `ops.sample`."""
    dtypes = {"f4": torch.float32, "i4": torch.int64}
    return {name: _column([getattr(p, name) for p in params], device, dtypes[kind]) for name, kind in FILTERS.items()}


def _column(values: list[float] | list[int], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return lasting(torch.tensor(values, dtype=dtype), device.type).to(device, non_blocking=True)
