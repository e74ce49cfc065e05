"""Log-probabilities in the forms of chat and of completions."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whorl.engine.sequence import Logprob

if TYPE_CHECKING:
    from whorl.engine.tokenizer import Tokenizer

_LOWEST = -9999.0  # OpenAI's number for impossible: JSON has no infinity


class TokenTexts:
    """Returns the text and the bytes of single tokens."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, str] = {}  # twenty alternatives for each token of many sequences: mostly the same ones

    def text(self, token_id: int) -> str:
        if token_id not in self._cache:
            self._cache[token_id] = self._tokenizer.decode([token_id], skip_special=False)
        return self._cache[token_id]

    def bytes(self, token_id: int) -> list[int]:
        text = self.text(token_id)
        if "\ufffd" not in text:
            return list(text.encode())
        letters = _byte_letters()
        spelling = self._tokenizer.token(token_id)
        return [letters[c] for c in spelling] if all(c in letters for c in spelling) else list(text.encode())

    def name(self, token_id: int) -> str:
        """Return a text that is unique to the token: part of a character is written as bytes."""
        text = self.text(token_id)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id))


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Map the letters of byte-level vocabularies to bytes: printable bytes are themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(unprintable)}


def for_chat(texts: TokenTexts, logprobs: Sequence[Logprob]) -> dict[str, Any]:
    """Return the log-probabilities of tokens as chat completions report them."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token_id), "logprob": finite(logprob), "bytes": texts.bytes(token_id)}

    content = [
        entry(token.token_id, token.logprob) | {"top_logprobs": [entry(*other) for other in token.top]}
        for token in logprobs
    ]
    return {"content": content, "refusal": None}


def for_completion(
    texts: TokenTexts, logprobs: Sequence[Logprob | int], *, start: int, num_top: int
) -> dict[str, list[Any]]:
    """Return the log-probabilities of tokens as completions report them.

    logprobs: a bare id is a token that nothing predicts, the prompt's first. start: where the first token begins in
    the choice's text.
    """
    columns: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token in logprobs:
        token_id = token if isinstance(token, int) else token.token_id
        columns["tokens"].append(texts.name(token_id))
        columns["text_offset"].append(start)
        start += len(texts.text(token_id))
        if isinstance(token, int):
            columns["token_logprobs"].append(None)
            columns["top_logprobs"].append(None)
            continue
        columns["token_logprobs"].append(finite(token.logprob))
        tops: dict[str, float] = {}
        for other, logprob in [*token.top, (token.token_id, token.logprob)]:
            tops.setdefault(texts.name(other), finite(logprob))
        columns["top_logprobs"].append(tops if num_top else None)
    return columns


def finite(logprob: float) -> float:
    """Replace minus infinity, which JSON cannot represent."""
    return max(logprob, _LOWEST)
