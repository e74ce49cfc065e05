"""Builds `token_details`: for each token its source (the model or a draft), its probability and the alternatives."""

from collections import abc
from typing import TYPE_CHECKING, Any

from whorl.engine.sequence import Logprob, Sequence

from .engine_thread import StepOutput
from .logprobs import TokenTexts, finite

if TYPE_CHECKING:
    from whorl.engine.tokenizer import Detokenizer, Tokenizer

    from .schemas import TokenDetails

_MODEL = "model"  # other sources are named by `Proposer.source`
_MOST_PROMPT = 1024  # prompt tokens whose texts are reported: each takes microseconds of the event loop's time


class DetailWriter:
    """Collects the details of one request's tokens. drafted_by: the source of drafts; None: no speculation."""

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
        return {"num_tokens": len(ids), "num_cached": seq.num_cached, "first": first, "texts": texts}
