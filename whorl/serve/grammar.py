"""Grammars that replies must follow, by llguidance: which tokens may come next."""

import bisect
import functools
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whorl.engine.reply_parser import END_THINK, THINK
from whorl.engine.sequence import AllowError

from .gate import ApiError
from .json_layout import json_layout
from .structured import Constraint
from .worker import native_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from whorl.engine.tokenizer import Tokenizer

    from .worker_pool import Worker

MAX_GRAMMAR = 256 << 10  # characters; OpenAI's limit for the strings of a schema is 120,000
_NUM_PROVEN = 256
# What a request's masks may take of the engine's thread, in seconds of CPU time: at first, and for each token.
_FREE_SECONDS, _TOKEN_SECONDS = 1.0, 0.02


@dataclass(frozen=True, slots=True)
class Grammar:
    """As llguidance takes it. what, param: how errors call it, and the field of the request that it is from."""

    text: str
    what: str = "the JSON schema"
    param: str = "response_format"


class Grammars:
    """Compiles grammars for one tokenizer."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._proven: OrderedDict[bytes, ApiError | None] = OrderedDict()  # None: it can be compiled

    def json_schema(self, schema: dict[str, Any], param: str = "response_format") -> Grammar:
        from llguidance import LLMatcher

        return Grammar(LLMatcher.grammar_from_json_schema(schema, overrides=json_layout(schema)), param=param)

    def constraint(self, asked: Constraint, worker: "Worker") -> Grammar:
        from llguidance import LLMatcher

        if asked.kind == "json":
            return self.json_schema(asked.value, asked.param)
        if asked.kind == "json_object":
            return self.json_schema({"type": "object"}, asked.param)
        if asked.kind == "regex":
            return Grammar(LLMatcher.grammar_from_regex(asked.value), "the regex", asked.param)
        what = f"the {asked.kind}"
        if asked.kind == "choice":
            text = f"start: {' | '.join(json.dumps(each, ensure_ascii=False) for each in asked.value)}"
        else:
            text = self._lark(asked, worker)
        return Grammar(LLMatcher.grammar_from_lark(text), what, asked.param)

    def _lark(self, asked: Constraint, worker: "Worker") -> str:
        if len(asked.value) > MAX_GRAMMAR:
            raise _too_long(len(asked.value), "the grammar", asked.param)
        try:
            return str(worker.ask("lark", grammar=asked.value))
        except ApiError as error:
            raise ApiError(error.status, error.message, param=asked.param, code=error.code) from None

    def prove(self, grammar: Grammar, worker: "Worker") -> None:
        """Raise ApiError unless the grammar has been compiled within the limits of a process that can be ended.

        A schema with a large `multipleOf` would otherwise be compiled for ever; nothing can end a thread.
        """
        if len(grammar.text) > MAX_GRAMMAR:
            raise _too_long(len(grammar.text), grammar.what, grammar.param)
        name = hashlib.sha256("\0".join((grammar.param, grammar.text)).encode("utf-8", "surrogatepass")).digest()
        if name not in self._proven:
            self._proven[name] = _refusal(grammar, worker)
        self._proven.move_to_end(name)
        if len(self._proven) > _NUM_PROVEN:
            self._proven.popitem(last=False)
        if (refusal := self._proven[name]) is not None:
            raise refusal

    def compile(self, grammar: Grammar, *, is_thinking: bool) -> "Allow":
        """is_thinking: the prompt has opened a think tag, so the grammar begins behind its end."""
        from llguidance import LLMatcher

        # The library never raises: what is wrong with the grammar is kept in the matcher.
        matcher = LLMatcher(self._native, grammar.text, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first takes longest, and here nobody waits for it
        if matcher.is_error():
            raise ValueError(f"{grammar.what} cannot be followed: {_reason(matcher)}")
        return Allow(matcher, self._tokenizer, self._vocab_size, is_thinking=is_thinking, what=grammar.what)

    @functools.cached_property
    def _native(self) -> "LLTokenizer":
        return native_tokenizer(self._tokenizer, self._vocab_size)


def _too_long(size: int, what: str, param: str) -> ApiError:
    return ApiError(400, f"{what} has {size} characters; up to {MAX_GRAMMAR} are taken", param=param)


def _refusal(grammar: Grammar, worker: "Worker") -> ApiError | None:
    try:
        worker.ask("prove", grammar=grammar.text, what=grammar.what)
    except ApiError as error:
        is_known = error.message.startswith(grammar.what)
        message = error.message if is_known else f"{grammar.what} cannot be compiled: {error.message}"
        return ApiError(400, message, param=grammar.param, code=error.code)
    return None


class Allow:
    """`SamplingParams.allow` of one request; the engine forks it, once for each copy of the prompt.

    Drafts are tried, so an output may be shorter than the one before or differ at its end: the matcher is moved back.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        tokenizer: "Tokenizer",
        vocab_size: int,
        *,
        is_thinking: bool,
        what: str,
        clock: "_Clock | None" = None,
    ) -> None:
        self._tokenizer, self._vocab_size, self._is_thinking = tokenizer, vocab_size, is_thinking
        self._open, self._close = tokenizer.token_id(THINK), tokenizer.token_id(END_THINK)
        self._blank, self._what, self._clock = matcher, what, clock or _Clock(what)
        self._matcher: LLMatcher | None = None
        self._seen: list[int] = []  # what the matcher has taken

    def fork(self) -> "Allow":
        """For another sequence; both count as one request."""
        same: dict[str, Any] = {"is_thinking": self._is_thinking, "what": self._what, "clock": self._clock}
        return Allow(self._blank, self._tokenizer, self._vocab_size, **same)

    def __call__(self, output_ids: Sequence[int]) -> Tensor | None:
        """AllowError where the output has left the grammar, or the library has reached one of its limits."""
        ids = list(output_ids)
        start = self._start(ids)
        if start is None:
            return None
        began = time.thread_time()
        mask = self._mask(ids[start:])
        self._clock.spend(time.thread_time() - began, len(ids))
        if not ids and not self._is_thinking and self._open is not None and self._close is not None:
            mask[self._open] = True
        return mask

    def _start(self, ids: list[int]) -> int | None:
        """Where the grammar begins; None while the model thinks."""
        is_thinking = self._is_thinking or (bool(ids) and ids[0] == self._open and self._close is not None)
        if not is_thinking:
            return 0
        return ids.index(self._close) + 1 if self._close in ids else None

    def _mask(self, ids: list[int]) -> Tensor:
        matcher = self._follow(ids)
        mask = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)[: self._vocab_size] > 0
        self._check(matcher)
        if not mask.any():
            raise AllowError(f"{self._what} cannot be followed any further: no token may come next")
        return mask

    def _follow(self, ids: list[int]) -> "LLMatcher":
        if self._matcher is None:
            self._matcher, self._seen = self._blank.deep_copy(), []
        matcher, seen = self._matcher, self._seen
        if ids[: len(seen)] != seen:
            num_common = _num_common(seen, ids)
            matcher.rollback(len(seen) - num_common)
            del seen[num_common:]
        num_taken = matcher.try_consume_tokens(ids[len(seen) :])
        seen += ids[len(seen) : len(seen) + num_taken]
        self._check(matcher)
        if len(seen) < len(ids):
            raise AllowError(f"the output has left {self._what}")
        return matcher

    def _check(self, matcher: "LLMatcher") -> None:
        if matcher.is_error():  # for good: what follows a draft that is not taken starts anew
            self._matcher = None
            raise AllowError(f"{self._what} cannot be followed any further: {_reason(matcher)}")


class _Clock:
    """CPU time that the masks of one request have taken, all its copies together."""

    def __init__(self, what: str) -> None:
        self._what, self._spent, self._longest = what, 0.0, 0

    def spend(self, seconds: float, num_tokens: int) -> None:
        self._spent += seconds
        self._longest = max(self._longest, num_tokens)
        if self._spent > _FREE_SECONDS + _TOKEN_SECONDS * self._longest:
            raise AllowError(
                f"{self._what} takes too long to follow: {self._spent:.1f} seconds for {self._longest} tokens"
            )


def _reason(matcher: "LLMatcher") -> str:
    return matcher.get_error().partition("\n")[0]


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    size = min(len(a), len(b))
    return bisect.bisect_left(range(size), True, key=lambda i: a[: i + 1] != b[: i + 1])
