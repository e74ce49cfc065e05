"""How often a sequence has generated each of its tokens, updated from step to step, for penalties."""

from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """The tokens of a sequence and how often each was generated. A count of 0 means that the token is only in the
    prompt, -1 that it is not in the sequence: it was only in a draft that was rejected."""

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int) -> None:
        prompt = dict.fromkeys(token for token in prompt_ids if token < vocab_size)
        self._places = {token: place for place, token in enumerate(prompt)}
        self._tokens, self._times = np.array(list(prompt), dtype=np.int64), np.zeros(len(prompt), dtype=np.int64)
        self._vocab_size, self._num_prompt = vocab_size, len(prompt)
        self._start, self._read = len(prompt_ids), list[int]()

    def read(self, token_ids: Sequence[int]) -> None:
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

    def row(self, draft: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and how often each was generated, including the draft."""
        tokens, times = self._with(draft) if draft else (self._tokens, self._times.copy())
        late = times[self._num_prompt :]
        late[late == 0] = -1
        return tokens, times

    def _with(self, new: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and counts with `new` tokens counted as well; ids not seen before come last."""
        new = [token for token in new if token < self._vocab_size]
        unseen = list(dict.fromkeys(token for token in new if token not in self._places))
        late = {token: len(self._places) + i for i, token in enumerate(unseen)}
        tokens = np.concatenate([self._tokens, np.array(unseen, dtype=np.int64)])
        times = np.concatenate([self._times, np.zeros(len(unseen), dtype=np.int64)])
        for token in new:
            times[self._places[token] if token in self._places else late[token]] += 1
        return tokens, times
