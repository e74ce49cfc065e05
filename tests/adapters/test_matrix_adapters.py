"""What is added to a matrix's products: everywhere, once, and to the same bits in any batch."""

import random
from typing import Any

import pytest
import torch
from mock_model import alone, record
from one_sequence import PROMPT, Runner, close
from schedules import compare, random_settings, requests, run_at_random, tiny
from torch import Tensor

from whorl import ops
from whorl.engine.llm import LLM
from whorl.models.deepseek import DeepSeek
from whorl.models.qwen3 import Qwen3
from whorl.nn.latent_heads import LatentHeads
from whorl.nn.vocabulary import Vocabulary
from whorl.nn.weight import Matrix, Routing

RANK = 4


class LowRank:
    """A low-rank update of one matrix, or of each matrix of a stack: y + (x A^T) B^T."""

    def __init__(self, matrix: Matrix, scale: float) -> None:
        *stack, rows, columns = matrix.shape
        self.a = torch.randn(*stack, RANK, columns).to(matrix.dtype) * columns**-0.5
        self.b = torch.randn(*stack, rows, RANK).to(matrix.dtype) * scale

    def __call__(self, y: Tensor, x: Tensor, routing: Routing | None = None) -> Tensor:
        if routing is None:
            return y + ops.linear(ops.linear(x, self.a), self.b)
        return y + ops.grouped_matmul(ops.grouped_matmul(x, self.a, routing.counts), self.b, routing.counts)


def matrices(model: Any) -> dict[str, Matrix]:
    kinds = "qkv_proj", "o_proj", "gate", "gate_up_proj", "down_proj"
    return {n: m for n, m in model.named_modules() if isinstance(m, Matrix) and n.rpartition(".")[2] in kinds}


def attach(model: Any, scale: float) -> dict[str, LowRank]:
    torch.manual_seed(3)
    adapters = {name: LowRank(matrix, scale) for name, matrix in matrices(model).items()}
    for name, matrix in matrices(model).items():
        matrix.adapter = adapters[name]
    return adapters


def built(num_experts: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return tiny(Qwen3, dtype, num_experts=num_experts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_experts", [0, 8])
def test_adding_nothing_changes_no_bit(num_experts: int, dtype: torch.dtype) -> None:
    """Experts run in two matmuls instead of one kernel."""
    model = built(num_experts, dtype)
    expected = Runner(model).run(PROMPT)
    attach(model, 0.0)
    assert torch.equal(Runner(model).run(PROMPT), expected)


@pytest.mark.parametrize("num_experts", [0, 8])
def test_every_matrix_is_adapted_once(num_experts: int) -> None:
    """The logits are those of weights with the updates added, and each update alone changes them."""
    model = built(num_experts)
    plain = Runner(model).run(PROMPT)
    adapters = attach(model, 0.1)
    actual = Runner(model).run(PROMPT)
    for name, matrix in matrices(model).items():
        matrix.adapter = None
        assert not torch.equal(Runner(model).run(PROMPT), actual), f"{name} is not adapted"
        matrix.adapter = adapters[name]
    for name, matrix in matrices(model).items():
        matrix.adapter = None
        matrix.replace(weight=matrix.weight + adapters[name].b @ adapters[name].a)
    close(actual, Runner(model).run(PROMPT))
    assert float((actual - plain).abs().max()) > 1e-2


def test_the_head_is_adapted() -> None:
    """Its embedding, where both are one matrix, is none of its products."""
    model = built(0)
    head = next(module for module in model.modules() if isinstance(module, Vocabulary) and module.is_head)
    plain = Runner(model).run(PROMPT)
    torch.manual_seed(3)
    head.adapter = update = LowRank(head, 0.1)
    actual = Runner(model).run(PROMPT)
    head.adapter = None
    hidden: list[Tensor] = []
    logits = model.logits
    model.logits = lambda x: hidden.append(x) or logits(x)
    Runner(model).run(PROMPT)
    close(actual, plain + hidden[0] @ update.a.T @ update.b.T)
    assert float((actual - plain).abs().max()) > 1e-2


def test_a_matrix_without_a_product_takes_no_adapter() -> None:
    """Queries are absorbed and values made head by head: an adapter would be dropped in silence."""
    torch.manual_seed(0)
    model = tiny(DeepSeek)
    (first, *_) = [module for module in model.modules() if isinstance(module, LatentHeads)]
    with pytest.raises(ValueError, match=r"kv_b_proj: this matrix is multiplied head by head, .* merge the update"):
        first.adapter = LowRank(first, 0.1)  # type: ignore[assignment]


@pytest.mark.parametrize("seed", range(3))
def test_adapted_logits_do_not_depend_on_the_schedule(seed: int) -> None:
    model, rng = built(8), random.Random(seed)
    attach(model, 0.1)
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}] * 2
    chosen = list(requests(rng, model.vocab_size, kinds, fewest=4))
    plain = [alone(model, None, *request) for request in chosen]
    llm = LLM(model=model, settings=random_settings(rng, seqs=4, block_size=4))
    recorded = record(llm)
    for index, seq in run_at_random(rng, llm, chosen):
        compare(*plain[index], seq, recorded.get(seq.id, {}))
