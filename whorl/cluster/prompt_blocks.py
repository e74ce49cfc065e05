"""The beginning of a request's prompt as a chain of digests, from its body alone: what two prompts have in common.

A digest stands for a block of characters and all before it. The engine's cache counts in tokens and knows better; this
is what can be known before a tokenizer has seen the prompt, and it errs by less than a block.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

BLOCK = 256  # characters, about 64 tokens of English
MOST_BLOCKS = 4096  # of one prompt; what is behind them does not change where it goes
_BYTES = 8
# In the order in which templates write them.
_BEFORE, _TURNS = ("tools", "system", "instructions"), ("messages", "input", "prompt", "token_ids")


def prompt_blocks(body: bytes, salt: str = "") -> tuple[bytes, ...]:
    """Of a request's body; () where there is no prompt in it. salt: whose cache it may find its prompt in."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):  # the replica says what is wrong with it
        return ()
    if not isinstance(asked, dict):
        return ()
    own_salt = asked.get("cache_salt")
    return tuple(_chain(_text(asked), f"{salt} {own_salt or ''}"))


def _text(asked: Mapping[str, Any]) -> str:
    """Such that a conversation that goes on begins with what it was before."""
    parts = [_written(asked[name]) for name in _BEFORE if asked.get(name) is not None]
    for name in _TURNS:
        turns = asked.get(name)
        if isinstance(turns, list):
            parts += [_written(each) for each in turns[: MOST_BLOCKS * BLOCK]]
        elif isinstance(turns, str):
            parts.append(turns)
    return "\n".join(parts)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _chain(text: str, salt: str) -> Iterator[bytes]:
    """Whole blocks alone: the end of a prompt is where the next turn differs."""
    before = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest()
    for at in range(0, min(len(text) // BLOCK, MOST_BLOCKS) * BLOCK, BLOCK):
        block = text[at : at + BLOCK].encode("utf-8", "surrogatepass")
        before = hashlib.blake2b(before + block, digest_size=_BYTES).digest()
        yield before
