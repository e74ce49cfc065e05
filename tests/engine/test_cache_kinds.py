"""A kind of cache is a class beside its attention: one is added here, and the engine runs it without knowing of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from whorl.engine import roofline, tensor_parallel
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.settings import EngineSettings
from whorl.engine.speculate.draft_model import DraftModel
from whorl.engine.tensor_parallel import FollowRunner
from whorl.nn import Step

WIDTH, VOCABULARY, LONGEST = 8, 61, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSpec:
    """One vector a token, which is key and value, in fp16, and a byte that says whether the token counts double."""

    width: int
    dtype: torch.dtype = torch.float16

    @property
    def token_bytes(self) -> int:
        return self.width * self.dtype.itemsize + 1

    def empty(self, num_blocks: int, block_size: int, device: torch.device | str) -> "Latent":
        return Latent(
            vectors=torch.zeros(num_blocks * block_size, self.width, dtype=self.dtype, device=device),
            doubles=torch.zeros(num_blocks * block_size, dtype=torch.bool, device=device),
            block_size=block_size,
        )

    def step_bytes(self, num_keys: int) -> int:
        return (num_keys + 1) * self.token_bytes

    def block_size(self, device: str) -> int:
        return 6

    def refusal(self, block_size: int, device: str) -> str | None:
        return "latent attention takes multiples of 3" if block_size % 3 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    vectors: Tensor
    doubles: Tensor
    block_size: int

    def write(self, step: Step, vectors: Tensor) -> None:
        is_kept = step.slots >= 0
        self.vectors[step.slots[is_kept]] = vectors[is_kept].to(self.vectors.dtype)
        self.doubles[step.slots[is_kept]] = step.token_ids[is_kept] % 2 == 0

    def read(self, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
        places = (table.long()[:, None] * self.block_size + torch.arange(self.block_size)).flatten()[:count]
        return self.vectors[places], self.doubles[places]


def attend(query: Tensor, vectors: Tensor, doubles: Tensor) -> Tensor:
    keys = vectors.to(query.dtype)
    weights = (keys @ query + doubles.to(query.dtype).log1p()).softmax(0)
    return weights @ keys


class LatentModel(torch.nn.Module):
    """Two layers of latent attention, a row at a time, so that nothing depends on what runs beside a row."""

    config, dtype, vocab_size, max_length = None, torch.float32, VOCABULARY, LONGEST

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding, self.position, self.head, *self.down = (
            torch.randn(rows, WIDTH, generator=generator) for rows in (VOCABULARY, LONGEST, VOCABULARY, WIDTH, WIDTH)
        )

    def cache_specs(self) -> list[LatentSpec]:
        return [LatentSpec(width=WIDTH) for _ in self.down]

    def latent(self, layer: int, hidden: Tensor) -> Tensor:
        return torch.stack([torch.tanh(self.down[layer] @ row) for row in hidden])

    def forward(self, step: Step, caches: Sequence[Latent]) -> Tensor:
        hidden, starts = self.embedding[step.token_ids] + self.position[step.positions], step.query_starts.tolist()
        for layer, cache in enumerate(caches):
            cache.write(step, self.latent(layer, hidden))
            out = hidden.clone()
            for entry, context in enumerate(step.context_lens.tolist()):
                first, end = starts[entry], starts[entry + 1]
                vectors, doubles = cache.read(step.block_tables[entry], context)
                for row in range(first, end):
                    seen = context - (end - 1 - row)
                    out[row] += attend(hidden[row], vectors[:seen], doubles[:seen])
            hidden = out
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.stack([self.head @ row for row in hidden])

    def plainly(self, token_ids: list[int]) -> int:
        """The next token, from all tokens at once and without a cache."""
        ids = torch.tensor(token_ids)
        hidden, doubles = self.embedding[ids] + self.position[: len(ids)], ids % 2 == 0
        for layer in range(len(self.down)):
            vectors = self.latent(layer, hidden).half()
            seen = [attend(row, vectors[: i + 1], doubles[: i + 1]) for i, row in enumerate(hidden)]
            hidden = hidden + torch.stack(seen)
        return int(self.logits(hidden[-1:]).argmax())


def expected(model: LatentModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model.plainly(tokens))
    return tokens[len(prompt) :]


PROMPTS = [[7, 3, 9, 4, 4, 8, 1, *range(own)] for own in (3, 9, 5, 12, 1)]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


@pytest.mark.parametrize("drafts", [False, True])
def test_the_engine_runs_a_cache_that_it_does_not_know(drafts: bool) -> None:
    """In blocks that are shared, taken away and given out again; and the draft model's cache is of that kind, too."""
    model: Any = LatentModel()
    proposer = DraftModel(model=model, k=3, device="cpu", num_blocks=30) if drafts else None
    options: dict[str, Any] = {"num_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    llm = LLM(model=model, device="cpu", speculate=proposer, draft_length="fixed", **options)
    assert llm.pool.block_size == 6
    outputs = llm.generate(PROMPTS, GREEDY, progress=False)
    outputs += llm.generate(PROMPTS, GREEDY, progress=False)
    for output in outputs:
        assert output.token_ids == expected(model, output.prompt_ids, 14)
    stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert stats["num_tokens_hit"] > 0
    assert (stats["num_accepted"] > 0) == drafts


def test_blocks_are_counted_by_what_the_layers_say() -> None:
    model: Any = LatentModel()
    token = 2 * (WIDTH * 2 + 1)  # layers, halves, the byte
    assert LLM(model=model, device="cpu", memory=5 * 6 * token + 7, max_model_len=24).pool.num_blocks == 5
    assert LLM(model=model, device="cpu", memory=5 * 3 * token, block_size=3).pool.num_blocks == 5
    assert DraftModel(model=model, device="cpu", memory=4 * 6 * token).pool.num_blocks == 4
    assert tensor_parallel._cache_room(model, "cpu", 1)["token"] == token
    assert roofline.step_bytes(model, batch=3, context=10) == 3 * 11 * token
    for make in (LLM, DraftModel):
        with pytest.raises(ValueError, match="block_size is 16: latent attention takes multiples of 3"):
            make(model=model, device="cpu", num_blocks=4, block_size=16)


def test_hidden_states_have_the_models_dtype_and_not_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that follows makes room for them before they come."""
    model: Any = LatentModel()
    came: list[torch.dtype] = []
    monkeypatch.setattr(tensor_parallel.distributed, "broadcast", lambda tensor, rank: came.append(tensor.dtype))
    runner = FollowRunner(model, EngineSettings(), num_blocks=2, block_size=6, max_len=12, device="cpu")
    runner._head(2, WIDTH, [])
    assert came == [torch.float32]
