"""Quantised checkpoints: their values bit for bit as others compute them, whole and in shares, and what models say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from mock_model import ByteTokenizer
from one_sequence import PROMPT, Runner, close
from quant_checkpoints import CASES, EVEN, W8A8, write
from safetensors.torch import load_file
from torch import Tensor

from whorl import nn, ops
from whorl.engine import weights
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.nn.weights.dense import DENSE
from whorl.nn.weights.packed import packed, unpacked
from whorl.ops.quantised.int8_linear import exact_product

KINDS = ("llama", "qwen3", "moe")


def load(path: Path, **options: Any) -> Any:
    arguments = {"device": "cpu", "dtype": "float32", "progress": False, "unpack": False} | options
    return weights.load_model(path, **arguments)


def logits(model: Any) -> Tensor:
    runner = Runner(model)
    return torch.cat([runner.run(PROMPT), runner.run([5])])


def matrices(model: Any) -> dict[str, nn.Matrix]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Matrix)}


def check_values(model: Any, expected: dict[str, Tensor]) -> int:
    """Of every part that the model holds. Returns how many are quantised."""
    count = 0
    for name, matrix in matrices(model).items():
        values = matrix.format.values(matrix)
        assert values.dtype == model.dtype
        assert values.shape == matrix.shape
        for part in matrix.parts:
            whole = expected[f"{part.source(name)}.weight"].to(model.dtype)
            assert torch.equal(values[part.place], whole[part.rows, part.columns]), part.source(name)
            count += matrix.format != DENSE
    return count


@pytest.mark.parametrize("kind", ["moe", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_values_and_logits_are_those_of_the_dequantised_model(name: str, kind: str, tmp_path: Path) -> None:
    """One rank, in fp32 and bf16, packed and unpacked."""
    path, dense = write(tmp_path, CASES[name], kind)
    expected = load_file(dense / "model.safetensors")
    for dtype in ("float32", "bfloat16"):
        model, plain = (load(each, dtype=dtype) for each in (path, dense))
        assert check_values(model, expected) > 10
        actual = logits(model)
        assert torch.equal(actual, logits(plain))
    assert torch.equal(actual, logits(load(path, dtype="bfloat16", unpack=True)))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_shared and case.sizes is EVEN])
def test_ranks_hold_the_values_between_them(name: str, tmp_path: Path) -> None:
    """Four ranks, of which two have the same key head; each holds what it would hold of the dequantised model."""
    path, dense = write(tmp_path, CASES[name], "moe")
    expected = load_file(dense / "model.safetensors")
    for size in (2, 4):
        held: dict[str, set[tuple[int, int, int, int]]] = {}
        for rank in range(size):
            model = load(path, tp=nn.Ranks(rank=rank, size=size))
            check_values(model, expected)
            for at, matrix in matrices(model).items():
                for part in matrix.parts:
                    cut = (part.rows.start, part.rows.stop, part.columns.start, part.columns.stop)
                    held.setdefault(part.source(at), set()).add(cut)
        for source, cuts in held.items():
            total = sum((r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in cuts)
            assert total == expected[f"{source}.weight"].numel(), source


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fp8-partial", "ct-w4-zeros", "ct-w8", "awq", "gptq-order"])
def test_the_engine_generates_with_it(name: str, kind: str, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3)
    tokenizer: Any = ByteTokenizer()
    outputs = []
    for path, unpack in zip(write(tmp_path, CASES[name], kind), (False, None), strict=True):
        model = load(path, unpack=unpack)
        llm = LLM(model=model, tokenizer=tokenizer, device="cpu", num_blocks=16)
        outputs.append(llm.generate([[1, 2, 3], [9] * 20], params, progress=False))
    assert [output.token_ids for output in outputs[0]] == [output.token_ids for output in outputs[1]]
    assert [output.logprobs for output in outputs[0]] == [output.logprobs for output in outputs[1]]


def test_large_matrices_are_unpacked_a_tile_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.nn.weights import quantised

    path, dense = write(tmp_path, CASES["ct-w4"], "moe")
    model, plain = load(path), load(dense)
    seen = []
    monkeypatch.setattr(quantised, "TILE_VALUES", 64 * 64)
    before = type(model.lm_head.format).values_of
    monkeypatch.setattr(type(model.lm_head.format), "values_of", lambda *args: seen.append(args[2]) or before(*args))
    assert torch.equal(logits(model), logits(plain))
    assert any(isinstance(each, slice) and each == slice(64, 97) for each in seen), "the head's 97 rows are two tiles"
    assert any(isinstance(each, Tensor) and len(each) < 4 for each in seen), "of the last token only two experts"


@pytest.mark.parametrize("name", ["fp8-blocks", "ct-w4-zeros", "ct-w8-pack", "ct-w8", "awq", "gptq", "gptq-8"])
def test_random_weights_in_the_format(name: str) -> None:
    from quant_checkpoints import model as config

    settings = config("moe", CASES[name].sizes) | {"quantization_config": CASES[name].settings}
    model: Any = weights.random_model(settings, device="cpu", dtype=torch.float32)
    for matrix in matrices(model).values():
        assert matrix.format.values(matrix).std() == pytest.approx(matrix.shape[-1] ** -0.5, rel=0.2)
    assert logits(model).isfinite().all()


# ---- numbers in words


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_and_back(bits: int) -> None:
    for count in (1, 7, 8, 33):
        numbers = torch.randint(0, 1 << bits, (3, count))
        assert torch.equal(unpacked(packed(numbers, bits), bits, count), numbers.to(torch.uint8))


# ---- int8 activations


def test_products_of_int8_are_exact() -> None:
    for columns in (5, 1024, 5000):
        x, weight = (torch.randint(-128, 128, (n, columns), dtype=torch.int8) for n in (3, 4))
        x[0], weight[0] = -128, -128 if columns < 1025 else 127
        assert torch.equal(exact_product(x, weight).long(), x.long() @ weight.long().t())


def test_int8_activations(tmp_path: Path) -> None:
    """Every product of the model, by whole numbers, against a plain loop over them; one row and many agree."""
    path, dense = write(tmp_path, W8A8, "moe")
    model = load(path)
    linear = model.model.layers[0].self_attn.o_proj
    x = torch.randn(9, linear.shape[1]).bfloat16().float()
    codes, scales = ops.dynamic_quant(x)
    stored = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj"
    sums = (codes.long() @ stored[f"{name}.weight"].long().t()).float()
    expected = sums * stored[f"{name}.weight_scale"].float().T * scales[:, None]
    assert torch.equal(linear(x), expected)
    assert torch.equal(torch.cat([linear(row) for row in x.split(1)]), expected)
    assert check_values(model, load_file(dense / "model.safetensors")) > 10
    one_by_one = Runner(model)
    assert torch.equal(torch.cat([one_by_one.run([token]) for token in PROMPT]), Runner(model).run(PROMPT))
    assert model.lm_head.format != DENSE
    assert load(path, unpack=True).lm_head.format == model.lm_head.format, "unpacking would change the product"
    close(logits(model), logits(load(dense)), bound=0.1)


def test_int8_experts(tmp_path: Path) -> None:
    path, _ = write(tmp_path, W8A8, "moe")
    experts = load(path).model.layers[0].mlp.experts
    x, ids = (
        torch.randn(6, experts.gate_up_proj.shape[2]),
        torch.tensor([[0, 1], [3, 2], [1, 0], [2, 2], [0, 3], [1, 3]]),
    )
    chosen = torch.rand(6, 2)
    expected = torch.zeros_like(x)
    for token, slot in [(t, s) for t in range(6) for s in range(2)]:
        hidden = x[token : token + 1]
        for matrix, then in ((experts.gate_up_proj, ops.glu), (experts.down_proj, lambda y: y)):
            codes, scale = ops.dynamic_quant(hidden)
            entry = ids[token, slot]
            sums = codes.double() @ matrix.weight[entry].double().t()
            hidden = then(sums.float() * matrix.scales[entry] * scale)
        expected[token] += chosen[token, slot] * hidden[0]
    assert torch.equal(experts(x, chosen, ids), expected)


# ---- memory


def test_what_is_packed_is_unpacked_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write(tmp_path, CASES["gptq"], "llama")
    for free, is_packed in ((None, False), (10**9, False), (1000, True)):
        monkeypatch.setattr(weights, "free_memory", lambda free=free: free)
        model = load(path, unpack=None)
        assert (model.model.layers[0].mlp.down_proj.format != DENSE) == is_packed
    assert "words" in dict(model.model.layers[0].mlp.down_proj.named_parameters())
    assert sum(p.nbytes for p in model.parameters()) < 0.6 * sum(p.nbytes for p in load(path, unpack=True).parameters())
    with weights.open_checkpoint(path) as checkpoint:
        assert weights._unpacks(model, checkpoint, torch.device("cuda")) is False


def test_memory_of_this_machine() -> None:
    from whorl.host_memory import free_memory

    free = free_memory()
    assert free is None or 1 << 20 < free < 1 << 50
