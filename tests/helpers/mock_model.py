"""A model of two attention layers, written row by row, and a tokenizer of bytes: the engine's tests in milliseconds.

What it computes depends on every token, position and cache slot before it, so whatever the engine gets wrong shows in
the logits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whorl.engine.call import Call
from whorl.engine.llm import LLM
from whorl.engine.runner import Result
from whorl.engine.sequence import SamplingParams
from whorl.engine.sequence import Sequence as Seq
from whorl.engine.settings import EngineSettings
from whorl.engine.speculate import Draft, Proposer
from whorl.nn import KVCache, PagedKV, Step

EOS, OTHER_EOS, SPECIAL = 256, 257, 258
Logits = dict[int, Tensor]  # by place in the output


class MockModel:
    config, dtype = None, torch.float32

    def __init__(self, *, vocab_size: int = 264, width: int = 8, layers: int = 2, max_length: int = 512) -> None:
        generator = torch.Generator().manual_seed(7)

        def weights(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.vocab_size, self.max_length, self.width = vocab_size, max_length, width
        self.embedding, self.position = weights(vocab_size, width), weights(max_length, width)
        self.head = weights(vocab_size, width)
        self.layers = [(weights(width, width), weights(width, width)) for _ in range(layers)]
        self.num_rows: list[tuple[int, int]] = []  # of each call, and its sequences

    def cache_specs(self) -> list[PagedKV]:
        return [PagedKV(num_kv_heads=1, head_dim=self.width, dtype=self.dtype) for _ in self.layers]

    def forward(self, step: Step, caches: Sequence[KVCache]) -> Tensor:
        self.num_rows.append((len(step.token_ids), len(step.context_lens)))
        assert step.max_position > int(step.positions.max())
        hidden = self.embedding[step.token_ids] + self.position[step.positions]
        for (key, value), cache in zip(self.layers, caches, strict=True):
            for row, slot in enumerate(step.slots.tolist()):
                if slot >= 0:
                    cache.k.view(-1, self.width)[slot] = torch.tanh(hidden[row] @ key)
                    cache.v.view(-1, self.width)[slot] = torch.tanh(hidden[row] @ value)
            hidden = hidden + self._attend(hidden, step, cache)
        return hidden

    def _attend(self, hidden: Tensor, step: Step, cache: KVCache) -> Tensor:
        out = torch.empty_like(hidden)
        starts = step.query_starts.tolist()
        for entry, context in enumerate(step.context_lens.tolist()):
            table = step.block_tables[entry].long()
            k, v = (c[table].reshape(-1, self.width) for c in (cache.k, cache.v))
            first, last = starts[entry], starts[entry + 1]
            for row in range(first, last):
                seen = context - (last - 1 - row)
                out[row] = (k[:seen] @ hidden[row]).softmax(0) @ v[:seen]
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.stack([self.head @ row for row in hidden]) if len(hidden) else hidden @ self.head.T


class ByteTokenizer:
    """UTF-8 bytes, two ends of text and a special token."""

    eos_ids = (EOS, OTHER_EOS)
    special_ids = frozenset((EOS, OTHER_EOS, SPECIAL))
    added_ids = special_ids

    def __len__(self) -> int:
        return SPECIAL + 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token(self, token_id: int) -> str:
        return repr(bytes([token_id])) if token_id < EOS else f"<{token_id}>"

    def detokenizer(self, *, skip_special: bool = True) -> "ByteDetokenizer":
        return ByteDetokenizer()


class ByteDetokenizer:
    def __init__(self) -> None:
        self.held = b""

    def add(self, token_id: int) -> str:
        self.held += bytes([token_id]) if token_id < EOS else b""
        for size in range(len(self.held), 0, -1):
            try:
                text = self.held[:size].decode()
            except UnicodeDecodeError:
                continue
            self.held = self.held[size:]
            return text
        return self.finish() if len(self.held) > 3 else ""

    def finish(self) -> str:
        text, self.held = self.held.decode(errors="replace"), b""
        return text


class Script:
    """A model that says what it is told: the logits behind token i of a text are highest for token i + 1."""

    config, dtype, vocab_size, max_length = None, torch.float32, 264, 512

    def __init__(self, prompt_len: int, answer: Sequence[int]) -> None:
        self.first, self.answer = prompt_len - 1, list(answer)

    def cache_specs(self) -> list[PagedKV]:
        return [PagedKV(num_kv_heads=1, head_dim=1, dtype=self.dtype)]

    def forward(self, step: Step, caches: Sequence[KVCache]) -> Tensor:
        return step.positions[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.zeros(len(hidden), self.vocab_size)
        for row, position in enumerate(hidden[:, 0].long().tolist()):
            place = position - self.first
            out[row, self.answer[place] if 0 <= place < len(self.answer) else EOS] = 10.0
        return out


class Oracle(Proposer):
    """Drafts what it is told comes next, with every `wrong`-th token spoilt."""

    def __init__(self, texts: Sequence[Sequence[int]], *, k: int = 4, wrong: int = 5) -> None:
        self.k, self.texts, self.wrong = k, [list(text) for text in texts], wrong

    def propose(self, sequences: Sequence[Seq], k: int) -> list[Draft]:
        return [Draft(self._draft(seq.token_ids)[:k]) for seq in sequences]

    def _draft(self, tokens: list[int]) -> list[int]:
        at = len(tokens)
        text = next((text for text in self.texts if text[:at] == tokens), tokens)
        return [
            (token + 1) % 256 if (at + i) % self.wrong == 0 else token for i, token in enumerate(text[at:][: self.k])
        ]


def record(llm: LLM) -> dict[int, Logits]:
    """By sequence id: the logits that each output token was sampled from, before anything is done to them."""
    recorded: dict[int, Logits] = {}
    run_call = llm.runner.run_call

    def recording(call: Call) -> Result:
        result = run_call(call)
        for row, each in zip(result.logits, result.samples, strict=True):
            seq = each.chunk.sequence
            recorded.setdefault(seq.id, {})[seq.num_outputs + seq.num_unread + each.num_drafted] = row.clone()
        return result

    llm.runner.run_call = recording  # type: ignore[method-assign]
    return recorded


def alone(
    model: object, tokenizer: object, prompt: list[int], params: SamplingParams, **changes: Any
) -> tuple[Seq, Logits]:
    """The plain run: one sequence, its prompt in one piece, one token a step."""
    sizes: dict[str, Any] = {"max_num_seqs": 1, "block_size": 16, "num_blocks": 32}
    settings = EngineSettings(device="cpu", use_prefix_cache=False, **sizes, **changes)
    llm = LLM(settings=settings, model=model, tokenizer=tokenizer)  # type: ignore[arg-type]
    logits = record(llm)
    (seq,) = llm.add(prompt, params)
    while llm.has_work:
        llm.step()
    return seq, logits[seq.id]
