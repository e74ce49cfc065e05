"""Masks of the tokens that a grammar allows next, compiled by llguidance: values for `SamplingParams.allow`."""

import bisect
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .reply_parser import END_THINK, THINK
from .sequence import AllowError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions
    from torch import Tensor

    from .tokenizer import Tokenizer

# Limits on the CPU seconds that computing a request's masks may take on the engine's thread: an allowance for the whole
# request, and more for each generated token.
_FREE_SECONDS, _TOKEN_SECONDS = 1.0, 0.02


def schema_grammar(schema: dict[str, Any]) -> str:
    """Return the llguidance grammar of the values of a JSON schema."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(schema, overrides=json_layout(schema))


def native_tokenizer(tokenizer: "Tokenizer", vocab_size: int) -> "LLTokenizer":
    """Return the tokenizer in llguidance's form."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids))


def compiled(
    grammar: str,
    name: str,
    native: "LLTokenizer",
    tokenizer: "Tokenizer",
    vocab_size: int,
    *,
    is_thinking: bool,
    may_think: bool = True,
) -> "Allow":
    """Compile a grammar. name: what errors call it. is_thinking: the prompt has opened a think tag, and the grammar
    applies after the closing tag. may_think: the answer itself may begin with a thought, which the prompt has neither
    opened nor closed. Raises ValueError if the grammar cannot be compiled."""
    from llguidance import LLMatcher

    # The library never raises: the matcher holds the error.
    matcher = LLMatcher(native, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask takes longest; here it does not delay the engine
    if matcher.is_error():
        raise ValueError(f"{name} cannot be followed: {_reason(matcher)}")
    return Allow(matcher, tokenizer, vocab_size, is_thinking=is_thinking, may_think=may_think, name=name)


def only(token_ids: Sequence[int], vocab_size: int) -> "Callable[[Sequence[int]], Tensor]":
    """Return a value for `SamplingParams.allow` that always allows the same tokens."""
    import torch

    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[list(token_ids)] = True
    return lambda output: mask


class Allow:
    """`SamplingParams.allow` of one request; the engine forks it, once for each of its sequences.

    With drafts, an output may be shorter than in the last call or differ at its end: then the matcher is rolled back.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        tokenizer: "Tokenizer",
        vocab_size: int,
        *,
        is_thinking: bool,
        may_think: bool,
        name: str,
        clock: "_Clock | None" = None,
    ) -> None:
        self._tokenizer, self._vocab_size, self._is_thinking = tokenizer, vocab_size, is_thinking
        self._close = tokenizer.token_id(END_THINK)
        self._open = tokenizer.token_id(THINK) if may_think and self._close is not None else None
        self._blank, self._name, self._clock = matcher, name, clock or _Clock(name)
        self._matcher: LLMatcher | None = None
        self._seen: list[int] = []  # the tokens that the matcher has consumed

    def fork(self) -> "Allow":
        """Return a copy for another sequence of the same request; both share the limit on CPU time."""
        same: dict[str, Any] = {"is_thinking": self._is_thinking, "name": self._name, "clock": self._clock}
        return Allow(self._blank, self._tokenizer, self._vocab_size, may_think=self._open is not None, **same)

    def __call__(self, output_ids: Sequence[int]) -> "Tensor | None":
        """Return the mask [V] of allowed tokens: while the model thinks, all but those that end the output, which would
        leave it without an answer. AllowError if the output violates the grammar or the library has reached one of its
        limits."""
        ids = list(output_ids)
        start = self._start(ids)
        if start is None:
            return self._thinking_mask()
        started = time.thread_time()
        mask = self._mask(ids[start:])
        self._clock.spend(time.thread_time() - started, len(ids))
        if not ids and not self._is_thinking and self._open is not None:
            mask[self._open] = True  # the model may begin by thinking
        return mask

    def _start(self, ids: list[int]) -> int | None:
        """Return the index where the grammar begins; None while the model thinks."""
        is_thinking = self._is_thinking or (bool(ids) and ids[0] == self._open)
        if not is_thinking:
            return 0
        return ids.index(self._close) + 1 if self._close in ids else None

    def _thinking_mask(self) -> "Tensor | None":
        """Return the mask of all tokens but ends of the output; None for a tokenizer that cannot end thinking."""
        import torch

        if self._close is None:
            return None
        mask = torch.ones(self._vocab_size, dtype=torch.bool)
        mask[list(self._tokenizer.eos_ids)] = False
        return mask

    def _mask(self, ids: list[int]) -> "Tensor":
        import torch  # imported here because workers that compile grammars do not need it

        matcher = self._follow(ids)
        mask = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)[: self._vocab_size] > 0
        self._check(matcher)
        if not mask.any():
            raise AllowError(f"{self._name} cannot be followed any further: it allows no next token")
        return mask

    def _follow(self, ids: list[int]) -> "LLMatcher":
        """Return the matcher after it has consumed exactly `ids`; AllowError if they violate the grammar."""
        if self._matcher is None:
            self._matcher, self._seen = self._blank.deep_copy(), []
        matcher, seen = self._matcher, self._seen
        if ids[: len(seen)] != seen:
            num_common = _num_common(seen, ids)
            matcher.rollback(len(seen) - num_common)
            del seen[num_common:]
        num_consumed = matcher.try_consume_tokens(ids[len(seen) :])
        seen += ids[len(seen) : len(seen) + num_consumed]
        self._check(matcher)
        if len(seen) < len(ids):
            raise AllowError(f"the output violates {self._name}")
        return matcher

    def _check(self, matcher: "LLMatcher") -> None:
        if matcher.is_error():  # it cannot recover: after a rejected draft a new copy starts from the beginning
            self._matcher = None
            raise AllowError(f"{self._name} cannot be followed any further: {_reason(matcher)}")


class _Clock:
    """The CPU time that the masks of one request have taken, over all its sequences."""

    def __init__(self, name: str) -> None:
        self._name, self._spent, self._longest = name, 0.0, 0

    def spend(self, seconds: float, num_tokens: int) -> None:
        """Add to the time; AllowError if it exceeds the limit for an output of this length."""
        self._spent += seconds
        self._longest = max(self._longest, num_tokens)
        if self._spent > _FREE_SECONDS + _TOKEN_SECONDS * self._longest:
            raise AllowError(
                f"{self._name} takes too long to follow: {self._spent:.1f} seconds for {self._longest} tokens"
            )


def _reason(matcher: "LLMatcher") -> str:
    return matcher.get_error().partition("\n")[0]


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    size = min(len(a), len(b))
    return bisect.bisect_left(range(size), True, key=lambda i: a[: i + 1] != b[: i + 1])


# ---- white space in JSON

# A grammar allows what a compact or an indented printer writes, and no more: if any white space is allowed, a weak
# model writes little else.
_MOST_LEVELS = 8  # of indentation, if a schema does not limit the depth of its values
_WIDEST = 4  # spaces a level
_SAME_LEVEL = ("anyOf", "oneOf", "allOf")
_LISTS, _TABLES, _SINGLE = ("prefixItems",), ("properties", "patternProperties"), ("items", "additionalProperties")
_CONTAINERS = ("object", "array")


def json_layout(schema: Any) -> "JsonCompileOptions":
    """Return llguidance's options for values of a schema: a space after a comma or a colon, or a line break and as
    much indentation as the schema is deep. All white space is optional, so the limit forbids no value."""
    levels = max(1, _depth(schema, _MOST_LEVELS))
    return {
        "whitespace_pattern": rf"\n(\x20{{0,{levels * _WIDEST}}}|\t{{0,{levels}}})",
        "item_separator": r",\x20?",
        "key_separator": r":\x20?",
    }


def _depth(schema: Any, most: int) -> int:
    """Return how deep values of a schema may nest, up to `most`, which is also the result if it does not say."""
    if not isinstance(schema, dict):
        return most if schema is True else 0
    if "$ref" in schema:
        return most
    if "enum" in schema or "const" in schema:
        return 0
    same = [part for name in _SAME_LEVEL for part in _parts(schema.get(name))]
    inner = [part for name in (*_LISTS, *_TABLES) for part in _parts(schema.get(name))]
    inner += [schema[name] for name in _SINGLE if isinstance(schema.get(name), dict)]
    if not same and not inner:
        kinds = schema.get("type", _CONTAINERS)
        kinds = [kinds] if isinstance(kinds, str) else _parts(kinds)
        return most if any(kind in _CONTAINERS for kind in kinds) else 0
    below = [1 + _depth(part, most - 1) for part in inner] if most else []
    return min(most, max([*below, *(_depth(part, most) for part in same)], default=0))


def _parts(value: Any) -> list[Any]:
    """Return the elements of a list or the values of an object; a malformed schema has none and fails elsewhere."""
    return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else []
