"""Grammars that replies must follow, by llguidance: which tokens may come next."""

import functools
import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whorl.engine.grammar_masks import Allow, compiled, native_tokenizer, schema_grammar

from .gate import ApiError
from .structured import Constraint

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from whorl.engine.tokenizer import Tokenizer

    from .worker_pool import Worker

MAX_GRAMMAR = 256 << 10  # characters; OpenAI's limit for the strings of a schema is 120,000
_NUM_PROVEN = 256


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
        return Grammar(schema_grammar(schema), param=param)

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

    def compile(self, grammar: Grammar, *, is_thinking: bool) -> Allow:
        """is_thinking: the prompt has opened a think tag, so the grammar begins behind its end."""
        native, size = self._native, self._vocab_size
        return compiled(grammar.text, grammar.what, native, self._tokenizer, size, is_thinking=is_thinking)

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
