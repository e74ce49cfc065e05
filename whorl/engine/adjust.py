"""Changes of logits before sampling: penalties, biases and grammar masks.

A request may have a thousand biases, and a penalty applies to every token of a long prompt. So both are cached as
arrays from step to step, and a step only pays for its new tokens.
"""

import math
from collections import OrderedDict, abc
from collections.abc import Hashable, Mapping

import numpy as np
import torch
from torch import Tensor

from whorl import ops
from whorl.device import lasting

from .call import Sample
from .sequence import AllowError

_NUM_CACHED = 1024


class Adjuster:
    """Applies these changes. Ids >= vocab_size pad the model's vocabulary and are never sampled."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # Ids and values of a request's biases. The mapping itself is held as well, so that its `id` is not reused.
        self._bias_cache: OrderedDict[Hashable, tuple[object, Tensor, Tensor]] = OrderedDict()

    def adjust(self, logits: Tensor, samples: abc.Sequence[Sample]) -> Tensor:
        """Return the logits [N, vocab_size] with penalties, biases and masks applied."""
        logits = self._bias(_penalize(logits[:, : self._vocab_size], samples), samples)
        # An infinite logit, of a huge bias or a tiny penalty, has no difference from the highest to sample by.
        return _allow(logits.clamp(max=torch.finfo(logits.dtype).max), samples)

    def _bias(self, logits: Tensor, samples: abc.Sequence[Sample]) -> Tensor:
        """Add `logit_bias`, and exclude stop tokens until `min_tokens` are generated; `logits` is not changed."""
        groups: dict[int, list[int]] = {}
        banned: dict[frozenset[int], list[int]] = {}
        for row, sample in enumerate(samples):
            seq, params = sample.chunk.sequence, sample.chunk.sequence.params
            if params.logit_bias:
                groups.setdefault(id(params.logit_bias), []).append(row)
            if sample.output_index < params.min_tokens and seq.stop_ids:
                banned.setdefault(seq.stop_ids, []).append(row)
        if not groups and not banned:
            return logits
        out = logits.clone()
        for name, rows in groups.items():
            mapping = samples[rows[0]].chunk.sequence.params.logit_bias
            ids, values = self._tensors(name, mapping, out.device)
            out[torch.tensor(rows, device=out.device)[:, None], ids] += values
        for stop_ids, rows in banned.items():
            ids, _ = self._tensors(stop_ids, stop_ids, out.device)
            out[torch.tensor(rows, device=out.device)[:, None], ids] = -math.inf
        return out

    def _tensors(
        self, name: Hashable, biases: Mapping[int, float] | frozenset[int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the ids and values of `biases` on the device, from the cache if possible; a set of ids has no values.

        name: the key in the cache.
        """
        if name not in self._bias_cache:
            ids = [i for i in biases if i < self._vocab_size]
            values = [] if isinstance(biases, frozenset) else [biases[i] for i in ids]
            tensors = torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32)
            self._bias_cache[name] = biases, tensors[0].to(device), tensors[1].to(device)
            if len(self._bias_cache) > _NUM_CACHED:
                self._bias_cache.popitem(last=False)
        self._bias_cache.move_to_end(name)
        return self._bias_cache[name][1:]


def _penalize(logits: Tensor, samples: abc.Sequence[Sample]) -> Tensor:
    """Apply penalties. A row counts the tokens generated so far and the part of its draft before the row."""
    params = [sample.chunk.sequence.params for sample in samples]
    if not any(p.has_penalties for p in params):
        return logits
    rows = [_counts(sample, logits.shape[1]) for sample in samples]
    width = max(len(ids) for ids, _ in rows)
    padded = np.full((2, len(rows), width), -1, dtype=np.int64)
    for number, (ids, times) in enumerate(rows):
        padded[0, number, : len(ids)], padded[1, number, : len(times)] = ids, times
    tokens, counts = lasting(torch.from_numpy(padded), logits.device.type).to(logits.device, non_blocking=True)

    def column(values: list[float]) -> Tensor:
        return lasting(torch.tensor(values), logits.device.type).to(logits.device, non_blocking=True)

    return ops.penalize(
        logits,
        tokens,
        counts,
        repetition=column([p.repetition_penalty for p in params]),
        presence=column([p.presence_penalty for p in params]),
        frequency=column([p.frequency_penalty for p in params]),
    )


def _counts(sample: Sample, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids that a sample's penalties apply to and how often each was generated; empty without any."""
    seq = sample.chunk.sequence
    if not seq.params.has_penalties:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if seq.counts is None:
        seq.counts = TokenCounts(seq.token_ids[: seq.prompt_len], vocab_size)
    seq.counts.read(seq.token_ids)
    return seq.counts.row(sample.chunk.draft[: sample.num_drafted])


def _allow(logits: Tensor, samples: abc.Sequence[Sample]) -> Tensor:
    """Set the logits of tokens that `SamplingParams.allow` excludes to -inf."""
    if all(sample.chunk.sequence.allow is None for sample in samples):
        return logits
    keep = torch.ones_like(logits, dtype=torch.bool)
    for row, sample in enumerate(samples):
        mask = _mask(sample)
        if mask is not None:
            size = min(len(mask), keep.shape[1])
            keep[row, size:] = False
            keep[row, :size] = mask[:size].to(keep.device)
    return logits.masked_fill(~keep, -math.inf)


def _mask(sample: Sample) -> Tensor | None:
    """Return the mask [V] of tokens that may follow; None: all may. An AllowError is stored in the sequence."""
    seq = sample.chunk.sequence
    if seq.allow is None:
        return None
    try:
        return seq.allow(seq.output_ids + sample.chunk.draft[: sample.num_drafted])
    except AllowError as error:
        # A draft may violate the grammar. Then it is rejected at an earlier row, and this row is not used.
        if sample.num_drafted == 0:
            seq.error = error
        return None


class TokenCounts:
    """The tokens of a sequence and how often each was generated. A count of 0 means that the token is only in the
    prompt, -1 that it is not in the sequence: it was only in a draft that was rejected."""

    def __init__(self, prompt_ids: abc.Sequence[int], vocab_size: int) -> None:
        prompt = dict.fromkeys(token for token in prompt_ids if token < vocab_size)
        self._places = {token: place for place, token in enumerate(prompt)}
        self._tokens, self._times = np.array(list(prompt), dtype=np.int64), np.zeros(len(prompt), dtype=np.int64)
        self._vocab_size, self._num_prompt = vocab_size, len(prompt)
        self._start, self._read = len(prompt_ids), list[int]()

    def read(self, token_ids: abc.Sequence[int]) -> None:
        """Count the tokens that the sequence has gained since the last call."""
        new = token_ids[self._start + len(self._read) :]
        self._read += new
        self._tokens, self._times = self._with(new)
        for token in self._tokens[len(self._places) :].tolist():
            self._places[token] = len(self._places)

    def cut(self, length: int) -> None:
        """Uncount the tokens from index `length` on, which the sequence has lost with a rejected draft."""
        keep = max(0, length - self._start)
        for token in self._read[keep:]:
            if token in self._places:
                self._times[self._places[token]] -= 1
        del self._read[keep:]

    def row(self, draft: abc.Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and how often each was generated, including the draft."""
        tokens, times = self._with(draft) if draft else (self._tokens, self._times.copy())
        late = times[self._num_prompt :]
        late[late == 0] = -1
        return tokens, times

    def _with(self, new: abc.Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and counts with `new` tokens counted as well; ids not seen before come last."""
        new = [token for token in new if token < self._vocab_size]
        unseen = list(dict.fromkeys(token for token in new if token not in self._places))
        late = {token: len(self._places) + i for i, token in enumerate(unseen)}
        tokens = np.concatenate([self._tokens, np.array(unseen, dtype=np.int64)])
        times = np.concatenate([self._times, np.zeros(len(unseen), dtype=np.int64)])
        for token in new:
            times[self._places[token] if token in self._places else late[token]] += 1
        return tokens, times
