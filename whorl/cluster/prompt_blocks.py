"""Hashes the beginning of a request's prompt into a chain of digests, which shows how much two prompts share.

A digest stands for a block of characters and everything before it, as a key of the prefix cache stands for a block of
tokens. This needs only the request's body, no tokenizer; the shared length that it finds is short by less than a block.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

BLOCK = 256  # characters, about 64 tokens of English
MOST_BLOCKS = 4096  # of one prompt; the text after them does not influence the routing
_BYTES = 8
# Fields of a request's body, in the order in which chat templates write them.
_BEFORE, _TURNS = ("tools", "system", "instructions"), ("messages", "input", "prompt", "token_ids")


def prompt_blocks(body: bytes, salt: str = "") -> tuple[bytes, ...]:
    """Return the digests of a request's body; () if it has no prompt.

    salt: prompts share a prefix cache, and so digests, only with the same salt.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):  # the replica reports the error
        return ()
    if not isinstance(request, dict):
        return ()
    cache_salt = request.get("cache_salt")
    return tuple(_chain(_text(request), f"{salt} {cache_salt or ''}"))


def _text(request: Mapping[str, Any]) -> str:
    """Return the prompt as text, such that a longer conversation begins with the text of the shorter one."""
    parts = [_as_text(request[name]) for name in _BEFORE if request.get(name) is not None]
    for name in _TURNS:
        turns = request.get(name)
        if isinstance(turns, list):
            parts += [_as_text(turn) for turn in turns[: MOST_BLOCKS * BLOCK]]
        elif isinstance(turns, str):
            parts.append(turns)
    return "\n".join(parts)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _chain(text: str, salt: str) -> Iterator[bytes]:
    """Yield the digests of full blocks only: the incomplete last block is where the next turn differs."""
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest()
    for start in range(0, min(len(text) // BLOCK, MOST_BLOCKS) * BLOCK, BLOCK):
        block = text[start : start + BLOCK].encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(digest + block, digest_size=_BYTES).digest()
        yield digest
