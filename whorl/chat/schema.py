"""Answers that are JSON of a schema: `whorl generate --schema`."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whorl.engine.grammar_masks import Allow
    from whorl.engine.llm import LLM


def read_schema(given: str) -> dict[str, Any]:
    """The schema itself, which begins with a brace, or a file's name."""
    if importlib.util.find_spec("llguidance") is None:
        raise ValueError("--schema needs llguidance: pip install 'whorl[serve]'")
    text, where = given, "--schema"
    if not given.lstrip().startswith("{"):
        where = f"--schema {given}"
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{where}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: is not UTF-8 text: {error}") from error
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: is {type(found).__name__}, expected a JSON object")
    return found


def allow_by(schema: dict[str, Any], llm: "LLM") -> "Callable[[str], Allow]":
    """Given a prompt's text, which tokens may follow. ValueError: the schema cannot be followed."""
    from whorl.engine.grammar_masks import compiled, native_tokenizer, schema_grammar
    from whorl.engine.reply_parser import END_THINK, THINK
    from whorl.engine.tokenizer import Tokenizer

    tokenizer, size = llm.tokenizer, llm.vocab_size
    assert isinstance(tokenizer, Tokenizer)
    native, grammar = native_tokenizer(tokenizer, size), schema_grammar(schema)
    may_think = tokenizer.token_id(END_THINK) is not None

    def allow(prompt: str) -> "Allow":
        is_thinking = may_think and prompt.rstrip().endswith(THINK)
        return compiled(grammar, "the JSON schema", native, tokenizer, size, is_thinking=is_thinking)

    allow("")  # what is wrong with it is said before the first prompt
    return allow
