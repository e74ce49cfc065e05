"""Log-probabilities as the two ways of asking return them."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whorl.engine.sequence import Logprob

if TYPE_CHECKING:
    from whorl.engine.tokenizer import Tokenizer

_LOWEST = -9999.0  # OpenAI's number for impossible: JSON has no infinity


class TokenTexts:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._kept: dict[int, str] = {}  # twenty alternatives for each token of many sequences: mostly the same ones

    def text(self, token_id: int) -> str:
        if token_id not in self._kept:
            self._kept[token_id] = self._tokenizer.decode([token_id], skip_special=False)
        return self._kept[token_id]

    def bytes(self, token_id: int) -> list[int]:
        text = self.text(token_id)
        if "\ufffd" not in text:
            return list(text.encode())
        letters = _byte_letters()
        spelling = self._tokenizer.token(token_id)
        return [letters[c] for c in spelling] if all(c in letters for c in spelling) else list(text.encode())

    def name(self, token_id: int) -> str:
        """Text that tells tokens apart: part of a character is spelled in bytes."""
        text = self.text(token_id)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id))


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte: itself where it prints, else from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printed)]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def for_chat(texts: TokenTexts, logprobs: Sequence[Logprob]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token_id), "logprob": finite(logprob), "bytes": texts.bytes(token_id)}

    content = [
        entry(one.token_id, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]} for one in logprobs
    ]
    return {"content": content, "refusal": None}


def for_completion(
    texts: TokenTexts, logprobs: Sequence[Logprob | int], *, start: int, num_top: int
) -> dict[str, list[Any]]:
    """start: where in the choice's text the first token is. An id alone is a token that nothing predicts."""
    found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for one in logprobs:
        token_id = one if isinstance(one, int) else one.token_id
        found["tokens"].append(texts.name(token_id))
        found["text_offset"].append(start)
        start += len(texts.text(token_id))
        if isinstance(one, int):
            found["token_logprobs"].append(None)
            found["top_logprobs"].append(None)
            continue
        found["token_logprobs"].append(finite(one.logprob))
        tops: dict[str, float] = {}
        for other, logprob in [*one.top, (one.token_id, one.logprob)]:
            tops.setdefault(texts.name(other), finite(logprob))
        found["top_logprobs"].append(tops if num_top else None)
    return found


def finite(logprob: float) -> float:
    """As JSON can say it."""
    return max(logprob, _LOWEST)
