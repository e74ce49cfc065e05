"""Whole experts on several ranks, against one rank bit by bit; and what W8A8 models exchange with sequence parallelism.

Every rank is an engine of its own here; test_tensor_parallel.py has engines that start their ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from checkpoints import write_checkpoints
from mock_model import ByteTokenizer
from test_engine_sp import CHUNK, Counted, check_equal, serve

from whorl import collectives, nn
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.sequence_parallel import PromptForward, SPSettings
from whorl.engine.settings import EngineSettings
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.tensor_parallel import shards
from whorl.engine.weights import load_model
from whorl.models.deepseek import DeepSeek
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3

WIDE = {"hidden_size": 128, "intermediate_size": 160}
CONFIGS = {
    "llama": Llama.tiny(**WIDE, attention_bias=True),
    "qwen3_moe": Qwen3.tiny(**WIDE, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True),
    "deepseek": DeepSeek.tiny(**WIDE, num_hidden_layers=2),
}
FORMATS = [("float32", None), ("bfloat16", None), ("bfloat16", "w4a16"), ("float32", "cpu4")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"), CONFIGS)


# ---- on every rank


def load(path: Path, tp: nn.Ranks, dtype: str, quantize: Any = None) -> Any:
    settings = EngineSettings(dtype=dtype, quantize=quantize)  # type: ignore[arg-type]
    return load_model(path, settings, device="cpu", tp=tp, progress=False)


def place() -> tuple[int, int]:
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def expert_bytes(model: Any) -> int:
    return sum(p.nbytes for m in model.modules() if isinstance(m, nn.Experts) for p in m.parameters())


def divided(path: Path, dtype: str, quantize: str | None, many: bool) -> float:
    """One rank's model and one with divided experts: the same logits; return the share of expert bytes."""
    rank, size = place()
    plain = load(path, nn.ONE, dtype, quantize)
    model = load(path, shards(EngineSettings(ep=size), rank, size), dtype, quantize)
    expected = serve(plain, None, chunk=64, together=False)
    together = serve(model, None, chunk=CHUNK, proposer=PromptLookup(k=4, min_hist=1, guard=False))
    check_equal(together, expected)
    assert together[2]["num_tokens_hit"] > 0
    assert together[2]["num_accepted"] > 0
    if many:
        check_equal(serve(model, None, chunk=64, together=False), expected)
    return expert_bytes(model) / expert_bytes(plain)


def beside_shards(path: Path) -> None:
    """Layers are shared and experts divided: the same logits with shared tokens, and close to those of one rank."""
    rank, size = place()
    model = load(path, shards(EngineSettings(tp=size, ep=size), rank, size), "float32")
    off = serve(model, None, chunk=64, together=False)
    prompts = Counted(PromptForward(model, "cpu", SPSettings(mode="on")))
    check_equal(serve(model, prompts, chunk=CHUNK), off)
    assert prompts.sizes
    plain = serve(load(path, nn.ONE, "float32"), None, chunk=64, together=False)
    for ours, theirs in zip(off[1], plain[1], strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-4)


def add_out_of_order(path: Path) -> None:
    """A fault: each rank adds its own choices, and the ranks' sums are added."""
    rank, size = place()
    model = load(path, shards(EngineSettings(ep=size), rank, size), "float32")

    def summed(self: nn.Experts, ranks: nn.Ranks, x: Any, weights: Any, ids: Any) -> Any:
        own = ids // (self.own.stop - self.own.start) == ranks.rank
        every = serve_experts(self, x, ids.where(own, self.own.start) - self.own.start, weights.where(own, 0))
        return ranks.own_rows(ranks.sum(every))

    def serve_experts(self: nn.Experts, x: Any, ids: Any, weights: Any) -> Any:
        return self.gate_up_proj.format.experts(self.gate_up_proj, self.down_proj, x, weights, ids)

    expected = serve(load(path, nn.ONE, "float32"), None, chunk=64, together=False)
    original, nn.Experts._divided = nn.Experts._divided, summed  # type: ignore[method-assign]
    try:
        actual = serve(model, None, chunk=64, together=False)
    finally:
        nn.Experts._divided = original  # type: ignore[method-assign]
    check_equal(actual, expected)


def wire(path: Path, dtype: str, fuse: bool) -> tuple[float, int, int]:
    """W8A8 with shared tokens equals W8A8 without; return the share of bytes that a layer's exchanges take, and the
    bytes of gathers that were counted and that were sent."""
    rank, size = place()
    model = load(path, nn.Ranks(rank=rank, size=size), dtype, "w8a8")
    prompts = PromptForward(model, "cpu", SPSettings(mode="on", fuse=fuse))
    off = serve(model, None, chunk=64, together=False)
    check_equal(serve(model, prompts, chunk=CHUNK), off)
    sent: list[int] = []
    gather_rows = collectives.gather_rows

    def counting(x: Any, *rest: Any) -> Any:
        sent.append(x.nbytes * (size - 1))
        return gather_rows(x, *rest)

    collectives.gather_rows = counting
    try:
        report = PromptForward(model, "cpu", SPSettings(mode="on", fuse=False)).report
    finally:
        collectives.gather_rows = gather_rows
    tokens = 32
    counted = sum(collectives.wire_bytes("all_gather", num_bytes, tokens, size) for num_bytes in report.gathered)
    summed, gathered = report.summed[1:], report.gathered[:-1]  # of layers: not the embedding and not the head
    return (sum(summed) + sum(gathered)) / (2 * sum(summed)), counted, sum(sent)


# ---- several of them


@pytest.mark.parametrize(
    ("size", "dtype", "quantize"),
    [
        pytest.param(size, *form, marks=() if (size, form) == (2, FORMATS[0]) else pytest.mark.slow)
        for size in (2, 4)
        for form in FORMATS
    ],
    ids=str,
)
def test_the_bits_are_those_of_one_rank(
    size: int, dtype: str, quantize: str | None, checkpoints: dict[str, Path]
) -> None:
    for name in ("qwen3_moe", "deepseek") if (dtype, quantize) in FORMATS[:2] else ("qwen3_moe",):
        shares = ranks.shared(size).run(divided, checkpoints[name], dtype, quantize, size == 4)
        assert shares == [1 / size] * size


@pytest.mark.slow
def test_beside_tensor_parallelism(checkpoints: dict[str, Path]) -> None:
    ranks.shared(2).run(beside_shards, checkpoints["qwen3_moe"])


@pytest.mark.slow
def test_another_order_shows(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(AssertionError, match="check_equal"):
        ranks.shared(2).run(add_out_of_order, checkpoints["qwen3_moe"])


@pytest.mark.parametrize(
    ("dtype", "fuse"),
    [
        ("float32", False),
        pytest.param("bfloat16", False, marks=pytest.mark.slow),
        pytest.param("bfloat16", True, marks=pytest.mark.slow),
    ],
)
def test_w8a8_exchanges_codes(dtype: str, fuse: bool, checkpoints: dict[str, Path]) -> None:
    for share, counted, sent in ranks.shared(2).run(wire, checkpoints["llama"], dtype, fuse):
        assert share <= (0.63 if dtype == "float32" else 0.76)
        assert counted == sent


def test_codes_are_restored_to_equal_codes() -> None:
    from whorl import ops

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(500, 130).to(dtype) * torch.logspace(-30, 10, 500).unsqueeze(1).to(dtype)
        x[3], x[4, 5], x[5] = 0, float("nan"), x[5].sign()
        packed, restore = collectives._pack(x, "codes")
        for expected, actual in zip(ops.dynamic_quant(x), ops.dynamic_quant(restore(packed)), strict=True):
            assert torch.equal(expected.nan_to_num(7), actual.nan_to_num(7))


# ---- an engine that starts its ranks


@pytest.mark.slow
def test_an_engine(checkpoints: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    prompts: Any = [[3, 5, 8], [1, 2] * 9]
    outputs = []
    for options in ({}, {"ep": 2}, {"tp": 2, "expert_parallel": True}):
        llm = LLM(checkpoints["qwen3_moe"], tokenizer=ByteTokenizer(), device="cpu", dtype="float32", **options)  # type: ignore[arg-type]
        outputs.append(llm.generate(prompts, params, progress=False))
        llm.close()
    alone, divided_experts, both = outputs
    for plain, ours, close in zip(alone, divided_experts, both, strict=True):
        assert (ours.token_ids, ours.logprobs) == (plain.token_ids, plain.logprobs)
        assert close.token_ids == plain.token_ids


def test_what_is_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="expected a tp of 1 or 4"):
        EngineSettings(ep=4, tp=2)
    with pytest.raises(ValueError, match="nothing is recorded"):
        EngineSettings(ep=2, use_graphs=True)
    with pytest.raises(ValueError, match="there is one rank"):
        LLM(checkpoints["qwen3_moe"], tokenizer=ByteTokenizer(), device="cpu", expert_parallel=True)
    with pytest.raises(ValueError, match="divisor of the model's 8 experts"):
        LLM(checkpoints["qwen3_moe"], tokenizer=ByteTokenizer(), device="cpu", ep=3)
    with pytest.raises(ValueError, match="experts that quantize their input"):
        LLM(checkpoints["qwen3_moe"], tokenizer=ByteTokenizer(), device="cpu", ep=2, quantize="w8a8")
    with pytest.raises(ValueError, match="has no experts that ranks could divide"):
        LLM(checkpoints["llama"], tokenizer=ByteTokenizer(), device="cpu", ep=2)
    with pytest.raises(ValueError, match="there is one rank; shard the model"):
        LLM(checkpoints["qwen3_moe"], tokenizer=ByteTokenizer(), device="cpu", ep=2, sp="on")
