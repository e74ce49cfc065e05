"""Log-probabilities in the forms of chat and of completions, and the details of tokens."""

import functools
from collections import abc
from typing import TYPE_CHECKING, Any

from whorl.engine.sequence import Logprob, Sequence

from .engine_thread import StepOutput

if TYPE_CHECKING:
    from whorl.engine.tokenizer import Detokenizer, Tokenizer

    from .schemas import TokenDetails

_MODEL = "model"  # other sources are named by `Proposer.source`
_MOST_PROMPT = 1024  # prompt tokens whose texts are reported: each takes microseconds of the event loop's time
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

    def label(self, token_id: int) -> str:
        """Return what a list of alternatives calls the token."""
        return self.text(token_id)

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


class TokenNumbers(TokenTexts):
    """Calls tokens by their ids, which trainers need: several tokens may have the same text."""

    @classmethod
    def like(cls, texts: TokenTexts) -> "TokenNumbers":
        return cls(texts._tokenizer)

    def label(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}"


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Map the letters of byte-level vocabularies to bytes: printable bytes are themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(unprintable)}


def for_chat(texts: TokenTexts, logprobs: abc.Sequence[Logprob]) -> dict[str, Any]:
    """Return the log-probabilities of tokens as chat completions report them."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.label(token_id), "logprob": finite(logprob), "bytes": texts.bytes(token_id)}

    content = [
        entry(token.token_id, token.logprob) | {"top_logprobs": [entry(*other) for other in token.top]}
        for token in logprobs
    ]
    return {"content": content, "refusal": None}


def for_completion(
    texts: TokenTexts, logprobs: abc.Sequence[Logprob | int], *, start: int, num_top: int
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


def for_prompt(texts: TokenTexts, logprobs: abc.Sequence[Logprob]) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt's tokens by id, in vLLM's form: the first token has none."""
    return [None, *(_by_id(texts, token) for token in logprobs)]


def _by_id(texts: TokenTexts, token: Logprob) -> dict[str, Any]:
    pairs = [(token.token_id, token.logprob, token.rank), *((i, p, rank + 1) for rank, (i, p) in enumerate(token.top))]
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.text(token_id)}
        for token_id, logprob, rank in reversed(pairs)
    }


def finite(logprob: float) -> float:
    """Replace minus infinity, which JSON cannot represent."""
    return max(logprob, _LOWEST)


class DetailWriter:
    """Collects `token_details`: each token's source (the model or a draft), its probability and the alternatives.

    drafted_by: the source of drafts; None: no speculation.
    """

    def __init__(
        self, options: "TokenDetails", texts: TokenTexts, tokenizer: "Tokenizer", drafted_by: str | None
    ) -> None:
        self._options, self._texts, self._tokenizer, self._drafted_by = options, texts, tokenizer, drafted_by
        self._detokenizers: dict[int, Detokenizer] = {}
        self._pending: dict[int, dict[str, Any]] = {}  # details that `take` has not returned yet

    def add(self, output: StepOutput, seq: Sequence) -> None:
        """Add the details of one step's tokens."""
        pending = self._pending.setdefault(output.index, {"tokens": []})
        if output.index not in self._detokenizers:
            self._detokenizers[output.index] = self._tokenizer.detokenizer(skip_special=False)
            if self._options.prompt:
                pending["prompt"] = self._prompt(seq)
        detokenizer = self._detokenizers[output.index]
        for position, token_id in enumerate(output.token_ids):
            source = self._drafted_by if position < output.num_drafted else _MODEL
            entry: dict[str, Any] = {"id": token_id, "text": detokenizer.add(token_id), "source": source}
            if token_id in self._tokenizer.added_ids:  # a control token, not text
                entry["special"] = True
            pending["tokens"].append(entry | (self._odds(output.logprobs[position]) if output.logprobs else {}))

    def take(self, index: int) -> dict[str, Any]:
        """Return the details that were added since the last call."""
        return self._pending.pop(index, {"tokens": []})

    def _odds(self, entry: Logprob) -> dict[str, Any]:
        """Return a token's log-probability and its alternatives."""
        top = [{"id": i, "text": self._texts.name(i), "logprob": finite(logprob)} for i, logprob in entry.top]
        return {"logprob": finite(entry.logprob), "top": top}

    def _prompt(self, seq: Sequence) -> dict[str, Any]:
        """Return the texts of the prompt's last tokens, from index `first` on, and how many tokens were cached."""
        ids: abc.Sequence[int] = seq.token_ids[: seq.prompt_len]
        first = max(0, len(ids) - _MOST_PROMPT)
        detokenizer = self._tokenizer.detokenizer(skip_special=False)
        texts = [detokenizer.add(token_id) for token_id in ids[first:]]
        counts = {"num_tokens": len(ids), "num_cached": seq.num_cached, "first": first, "texts": texts}
        return counts | {"seconds": _seconds(seq)}


def _seconds(seq: Sequence) -> dict[str, float]:
    """Return how long a sequence waited, and how long its prompt took."""
    times = seq.timings
    admitted = times.added if times.admitted is None else times.admitted
    first = admitted if times.first_token is None else times.first_token
    return {"queue": admitted - times.added, "prompt": first - admitted}
