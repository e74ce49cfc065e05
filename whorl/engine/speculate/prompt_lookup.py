"""Prompt lookup: draft what followed the last tokens at an earlier occurrence, in the prompt or in the output."""

import logging
from collections import Counter, abc
from weakref import WeakKeyDictionary

from whorl.engine.sequence import Sequence

from . import Draft, Proposer

_LOG = logging.getLogger(__name__)
_LEVELS = 3  # n-gram sizes in the index above the shortest
_LONGEST = 32  # matches are compared up to this length
_RECENT = 32  # matches that are compared, the latest ones


class _Index:
    """The places after each n-gram of a growing list of tokens, where a next token exists."""

    def __init__(self, ngram: int) -> None:
        self.sizes = range(ngram + _LEVELS, ngram - 1, -1)
        self.warned = False
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._num_seen = 0

    def update(self, tokens: abc.Sequence[int]) -> None:
        """Add n-grams of all tokens but the last, which has no next token."""
        for end in range(self._num_seen + 1, len(tokens)):
            for size in self.sizes:
                if end >= size:
                    self._places.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self._num_seen = max(self._num_seen, len(tokens) - 1)

    def matches(self, tokens: abc.Sequence[int]) -> list[int]:
        """Return the places after the longest matches of the last tokens; longer n-grams are tried first."""
        for size in self.sizes:
            if len(tokens) >= size and (places := self._places.get(tuple(tokens[-size:]))):
                lengths = {place: _match_len(tokens, place, size) for place in places[-_RECENT:]}
                longest = max(lengths.values())
                return [place for place, length in lengths.items() if length == longest]
        return []


class PromptLookup(Proposer):
    """Drafts by n-gram match.

    k: longest draft. ngram: shortest match that may draft; longer ones are tried first. min_hist: tokens before the
    first draft. If matches continue differently, the draft follows the majority and ends where there is none. The guard
    avoids drafting a model's repetitions: it drops a draft with fewer than `guard_distinct` distinct tokens (or than
    the draft has tokens), and one that begins with a token that the last `guard_tail` tokens all are. `loop_warn` equal
    generated tokens in a row are logged once for each sequence. None of this changes the output, only its speed.
    Raises ValueError for sizes below 1. Example: `LLM(speculate=PromptLookup(k=10))`
    """

    source = "lookup"

    def __init__(
        self,
        k: int = 10,
        ngram: int = 1,
        min_hist: int = 20,
        *,
        guard: bool = True,
        guard_distinct: int = 3,
        guard_tail: int = 6,
        loop_warn: int = 8,
    ) -> None:
        for name, value in (("k", k), ("ngram", ngram), ("guard_tail", guard_tail), ("loop_warn", loop_warn)):
            if value < 1:
                raise ValueError(f"PromptLookup: {name} is {value}, expected at least 1")
        self.k, self.ngram, self.min_hist = k, ngram, min_hist
        self.guard, self.guard_distinct, self.guard_tail, self.loop_warn = guard, guard_distinct, guard_tail, loop_warn
        self._indices: WeakKeyDictionary[Sequence, _Index] = WeakKeyDictionary()

    def propose(self, sequences: abc.Sequence[Sequence], k: int) -> list[Draft]:
        return [Draft(self._draft(seq, k)) for seq in sequences]

    def _draft(self, seq: Sequence, k: int) -> list[int]:
        index = self._indices.setdefault(seq, _Index(self.ngram))
        index.update(seq.token_ids)
        self._warn(seq, index)
        if len(seq.token_ids) < self.min_hist:
            return []
        draft = _majority(seq.token_ids, index.matches(seq.token_ids), k)
        return [] if self.guard and self._is_suspect(seq.token_ids, draft) else draft

    def _is_suspect(self, tokens: abc.Sequence[int], draft: list[int]) -> bool:
        is_low_distinct = len(set(draft)) < min(self.guard_distinct, len(draft))
        is_echo = bool(draft) and set(tokens[-self.guard_tail :]) == {draft[0]}
        return is_low_distinct or is_echo

    def _warn(self, seq: Sequence, index: _Index) -> None:
        tail = seq.token_ids[max(seq.prompt_len, len(seq.token_ids) - self.loop_warn) :]
        if not index.warned and len(tail) == self.loop_warn and len(set(tail)) == 1:
            index.warned = True
            _LOG.warning("sequence %d repeats token %d: %d times in a row", seq.id, tail[0], self.loop_warn)


def _match_len(tokens: abc.Sequence[int], place: int, length: int) -> int:
    """Return how many tokens before `place` equal the last tokens, up to a limit; at least `length` do."""
    while length < min(place, _LONGEST) and tokens[place - length - 1] == tokens[-length - 1]:
        length += 1
    return length


def _majority(tokens: abc.Sequence[int], places: list[int], k: int) -> list[int]:
    """Return up to k tokens that follow `places`: each is what more than half of the places that agree so far have."""
    draft: list[int] = []
    while len(draft) < k:
        following = [tokens[place + len(draft)] for place in places if place + len(draft) < len(tokens)]
        if not following:
            break
        token, count = Counter(following).most_common(1)[0]
        if 2 * count <= len(following):
            break
        places = [p for p in places if p + len(draft) < len(tokens) and tokens[p + len(draft)] == token]
        draft.append(token)
    return draft
