"""Of each token where it came from, its probability and the runners-up: what `token_details` adds to an answer."""

from collections.abc import Sequence as List
from typing import TYPE_CHECKING, Any

from whorl.engine.sequence import Logprob, Sequence

from .engine_thread import StepOutput
from .logprobs import TokenTexts, finite

if TYPE_CHECKING:
    from whorl.engine.tokenizer import Detokenizer, Tokenizer

    from .schemas import TokenDetails

_MODEL = "model"  # the other sources are what `Proposer.source` names
_MOST_PROMPT = 1024  # tokens of a prompt whose texts are told: each takes some microseconds of everybody's time


class DetailWriter:
    """Of one request's sequences. drafted_by: where drafted tokens come from; None: nothing is drafted."""

    def __init__(
        self, asked: "TokenDetails", texts: TokenTexts, tokenizer: "Tokenizer", drafted_by: str | None
    ) -> None:
        self._asked, self._texts, self._tokenizer, self._drafted_by = asked, texts, tokenizer, drafted_by
        self._detokenizers: dict[int, Detokenizer] = {}
        self._kept: dict[int, dict[str, Any]] = {}  # not taken yet

    def add(self, output: StepOutput, seq: Sequence) -> None:
        kept = self._kept.setdefault(output.index, {"tokens": []})
        if output.index not in self._detokenizers:
            self._detokenizers[output.index] = self._tokenizer.detokenizer(skip_special=False)
            if self._asked.prompt:
                kept["prompt"] = self._prompt(seq)
        detokenizer = self._detokenizers[output.index]
        for at, token_id in enumerate(output.token_ids):
            source = self._drafted_by if at < output.num_drafted else _MODEL
            entry: dict[str, Any] = {"id": token_id, "text": detokenizer.add(token_id), "source": source}
            if token_id in self._tokenizer.added_ids:  # a mark, not text that somebody wrote
                entry["special"] = True
            kept["tokens"].append(entry | (self._odds(output.logprobs[at]) if output.logprobs else {}))

    def take(self, index: int) -> dict[str, Any]:
        """What was added since the last time."""
        return self._kept.pop(index, {"tokens": []})

    def _odds(self, one: Logprob) -> dict[str, Any]:
        top = [{"id": i, "text": self._texts.name(i), "logprob": finite(logprob)} for i, logprob in one.top]
        return {"logprob": finite(one.logprob), "top": top}

    def _prompt(self, seq: Sequence) -> dict[str, Any]:
        ids: List[int] = seq.token_ids[: seq.prompt_len]
        first = max(0, len(ids) - _MOST_PROMPT)
        detokenizer = self._tokenizer.detokenizer(skip_special=False)
        texts = [detokenizer.add(token_id) for token_id in ids[first:]]
        return {"num_tokens": len(ids), "num_cached": seq.num_cached, "first": first, "texts": texts}
