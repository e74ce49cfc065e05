"""Grammars that constrain replies: llguidance computes which tokens may come next."""

import functools
import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whorl.engine.grammar_masks import Allow, compiled, native_tokenizer, schema_grammar

from .api_error import ApiError
from .structured import Constraint

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from whorl.engine.tokenizer import Tokenizer

    from .worker_pool import Worker

MAX_GRAMMAR = 256 << 10  # characters; OpenAI's limit for the strings of a schema is 120,000
_NUM_PROVEN = 256  # grammars for which it is cached whether they compile


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in llguidance's form. label: what errors call it; param: the field of the request that it is from."""

    text: str
    label: str = "the JSON schema"
    param: str = "response_format"


class Grammars:
    """Checks and compiles grammars for one tokenizer."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._proven: OrderedDict[bytes, ApiError | None] = OrderedDict()  # None: it compiles

    def json_schema(self, schema: dict[str, Any], param: str = "response_format") -> Grammar:
        """Return the grammar of a JSON schema."""
        return Grammar(schema_grammar(schema), param=param)

    def constraint(self, constraint: Constraint, worker: "Worker") -> Grammar:
        """Return the grammar of `structured_outputs` or of a `guided_` field."""
        from llguidance import LLMatcher

        if constraint.kind == "json":
            return self.json_schema(constraint.value, constraint.param)
        if constraint.kind == "json_object":
            return self.json_schema({"type": "object"}, constraint.param)
        if constraint.kind == "regex":
            return Grammar(LLMatcher.grammar_from_regex(constraint.value), "the regex", constraint.param)
        label = f"the {constraint.kind}"
        if constraint.kind == "choice":
            text = f"start: {' | '.join(json.dumps(text, ensure_ascii=False) for text in constraint.value)}"
        else:
            text = self._lark(constraint, worker)
        return Grammar(LLMatcher.grammar_from_lark(text), label, constraint.param)

    def _lark(self, constraint: Constraint, worker: "Worker") -> str:
        """Return a client's grammar, which may be GBNF, as Lark; ApiError names the field of the request."""
        if len(constraint.value) > MAX_GRAMMAR:
            raise _too_long(len(constraint.value), "the grammar", constraint.param)
        try:
            return str(worker.ask("lark", grammar=constraint.value))
        except ApiError as error:
            raise ApiError(error.status, error.message, param=constraint.param, code=error.code) from None

    def prove(self, grammar: Grammar, worker: "Worker") -> None:
        """Check that a grammar compiles within a worker's limits, before this process compiles it; ApiError if not.

        A schema with a large `multipleOf` may compile for ever. A process can be killed then, a thread cannot.
        """
        if len(grammar.text) > MAX_GRAMMAR:
            raise _too_long(len(grammar.text), grammar.label, grammar.param)
        digest = hashlib.sha256("\0".join((grammar.param, grammar.text)).encode("utf-8", "surrogatepass")).digest()
        if digest not in self._proven:
            self._proven[digest] = _refusal(grammar, worker)
        self._proven.move_to_end(digest)
        if len(self._proven) > _NUM_PROVEN:
            self._proven.popitem(last=False)
        if (refusal := self._proven[digest]) is not None:
            raise refusal

    def compile(self, grammar: Grammar, *, is_thinking: bool, may_think: bool = True) -> Allow:
        """Compile a grammar. is_thinking: the prompt has opened a think tag, so the grammar starts after its end.
        may_think: as in `compiled`."""
        options = {"is_thinking": is_thinking, "may_think": may_think}
        return compiled(grammar.text, grammar.label, self._native, self._tokenizer, self._vocab_size, **options)

    @functools.cached_property
    def _native(self) -> "LLTokenizer":
        return native_tokenizer(self._tokenizer, self._vocab_size)


def _too_long(size: int, label: str, param: str) -> ApiError:
    return ApiError(400, f"{label} has {size} characters; up to {MAX_GRAMMAR} are allowed", param=param)


def _refusal(grammar: Grammar, worker: "Worker") -> ApiError | None:
    """Return why a worker refuses the grammar; None if it compiles."""
    try:
        worker.ask("prove", grammar=grammar.text, label=grammar.label)
    except ApiError as error:
        is_labelled = error.message.startswith(grammar.label)
        message = error.message if is_labelled else f"{grammar.label} cannot be compiled: {error.message}"
        return ApiError(400, message, param=grammar.param, code=error.code)
    return None
