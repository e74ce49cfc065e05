"""Grammars that replies must follow, by llguidance: which tokens may come next."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .json_layout import json_layout
from .tools import END_THINK, THINK

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from whorl.engine.tokenizer import Tokenizer


class Grammars:
    """Compiles grammars for one tokenizer."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def json_schema(self, schema: dict[str, Any]) -> str:
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_json_schema(schema, overrides=json_layout(schema))

    def compile(self, grammar: str, *, is_thinking: bool, num_copies: int) -> "Allow":
        """is_thinking: the prompt has opened a think tag, so the grammar begins behind its end."""
        from llguidance import LLMatcher

        # The library never raises: what is wrong with the grammar is kept in the matcher.
        matcher = LLMatcher(self._native, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0]
            raise ValueError(f"the JSON schema cannot be followed: {reason}")
        return Allow(matcher, self._tokenizer, self._vocab_size, is_thinking=is_thinking, num_copies=num_copies)

    @functools.cached_property
    def _native(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        text = self._tokenizer.to_json()
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self._tokenizer.eos_ids))


class Allow:
    """`SamplingParams.allow` of one request. Copies of a prompt share it, and drafts are tried: any output may come
    after any other, so a few matchers are moved back and forth to follow it."""

    def __init__(
        self,
        matcher: "LLMatcher",
        tokenizer: "Tokenizer",
        vocab_size: int,
        *,
        is_thinking: bool,
        num_copies: int,
    ) -> None:
        self._vocab_size, self._num_copies = vocab_size, num_copies
        self._open, self._close = tokenizer.token_id(THINK), tokenizer.token_id(END_THINK)
        self._eos_ids = list(tokenizer.eos_ids)
        self._is_thinking = is_thinking
        self._blank = matcher
        self._followed: list[tuple[list[int], LLMatcher]] = []

    def __call__(self, output_ids: Sequence[int]) -> Tensor | None:
        start = self._start(list(output_ids))
        if start is None:
            return None
        matcher = self._follow(list(output_ids[start:]))
        if matcher is None:  # a draft that leaves the grammar: it is refused before its successor matters
            return None
        mask = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)[: self._vocab_size] > 0
        if not mask.any():  # the library gave up: its limits are for grammars that would take for ever
            mask[self._eos_ids] = True
        if not output_ids and not self._is_thinking and self._open is not None and self._close is not None:
            mask[self._open] = True
        return mask

    def _start(self, ids: list[int]) -> int | None:
        """Where the grammar begins; None while the model thinks."""
        is_thinking = self._is_thinking or (bool(ids) and ids[0] == self._open and self._close is not None)
        if not is_thinking:
            return 0
        return ids.index(self._close) + 1 if self._close in ids else None

    def _follow(self, ids: list[int]) -> "LLMatcher | None":
        best = max(range(len(self._followed)), key=lambda i: _num_common(self._followed[i][0], ids), default=None)
        if best is None or (
            _num_common(self._followed[best][0], ids) < len(self._followed[best][0])
            and len(self._followed) < self._num_copies
        ):
            best = len(self._followed)
            self._followed.append(([], self._blank.deep_copy()))
        seen, matcher = self._followed[best]
        num_common = _num_common(seen, ids)
        if num_common < len(seen):
            matcher.rollback(len(seen) - num_common)
            del seen[num_common:]
        num_taken = matcher.try_consume_tokens(ids[num_common:])
        seen += ids[num_common : num_common + num_taken]
        return matcher if len(seen) == len(ids) else None


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
