"""Answers constrained by a JSON schema: `whorl generate --schema`."""

import importlib.util
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from whorl.extras import how_to_install

from .text_streams import read_file

if TYPE_CHECKING:
    from whorl.engine.grammar_masks import Allow
    from whorl.engine.llm import LLM


def read_schema(schema: str) -> dict[str, Any]:
    """Read --schema: the schema itself, which begins with a brace, or the name of a file. Raises ValueError."""
    if importlib.util.find_spec("llguidance") is None:
        raise ValueError(f"--schema needs llguidance: {how_to_install('serve')}")
    text, where = schema, "--schema"
    if not schema.lstrip().startswith("{"):
        where = f"--schema {schema}"
        text = read_file(schema, where)
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{where}: is {type(parsed).__name__}, expected a JSON object")
    return parsed


def grammar_masks(schema: dict[str, Any], llm: "LLM") -> "Callable[[str], Allow]":
    """Return a function from a prompt's text to the `SamplingParams.allow` that enforces the schema.

    Raises ValueError when the schema cannot be enforced.
    """
    from whorl.engine.grammar_masks import compiled, native_tokenizer, schema_grammar
    from whorl.engine.reply_parser import END_THINK, THINK
    from whorl.engine.tokenizer import Tokenizer

    tokenizer, size = llm.tokenizer, llm.vocab_size
    assert isinstance(tokenizer, Tokenizer)
    native, grammar = native_tokenizer(tokenizer, size), schema_grammar(schema)
    may_think = tokenizer.token_id(END_THINK) is not None

    def allow(prompt: str) -> "Allow":
        is_thinking = may_think and prompt.rstrip().endswith(THINK)
        options = {"is_thinking": is_thinking, "may_think": not prompt.rstrip().endswith(END_THINK)}
        return compiled(grammar, "the JSON schema", native, tokenizer, size, **options)

    allow("")  # reports an invalid schema before the first prompt
    return allow
