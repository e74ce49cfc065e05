"""`--quantize cpu4`: torch's product of 4-bit weights, what is rounded, what is refused, and that rows are alone."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from kernels import without_cpu_kernels
from mock_model import ByteTokenizer
from one_sequence import close
from quant_checkpoints import model as config
from test_quant_formats import load, logits, matrices
from torch import Tensor

from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.nn.cache import zeros
from whorl.nn.ranks import Ranks
from whorl.nn.weights import cpu4
from whorl.nn.weights.cpu4 import CpuRounding
from whorl.nn.weights.dense import DENSE
from whorl.nn.weights.packed import unpacked

SIZES = {"hidden_size": 64, "intermediate_size": 192, "moe_intermediate_size": 64, "head_dim": 32}
DEFAULT_MODEL = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
needs_kernel = pytest.mark.skipif(not cpu4._has_kernel(), reason="torch has no 4-bit kernel for this CPU")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tied = {**config("llama", SIZES), "tie_word_embeddings": True}
    odd = config("llama", {**SIZES, "intermediate_size": 72})
    small = config("llama", {"hidden_size": 32, "intermediate_size": 24, "head_dim": 8})
    kinds = {"llama": config("llama", SIZES), "moe": config("moe", SIZES), "tied": tied, "odd": odd, "small": small}
    return write_checkpoints(tmp_path_factory.mktemp("models"), kinds)


def rounded(weight: Tensor, passes: int = 1) -> tuple[list[Tensor], Tensor, Tensor]:
    """The packed codes and the offsets, and the numbers that they stand for."""
    ends, _, _ = CpuRounding(passes).apply(weight)
    values, codes = ends["offsets"].repeat_interleave(cpu4.GROUP, 1), []
    for number in range(passes):
        words, scales = ends[f"words{number}"], ends[f"scales{number}"]
        codes.append(cpu4._pack(words, scales))
        values = values + (unpacked(words, 4, weight.shape[1]).float() - 8) * scales.repeat_interleave(cpu4.GROUP, 1)
    return codes, ends["offsets"], values


def drawn(shape: tuple[int, int], seed: int) -> tuple[list[Tensor], Tensor]:
    """Random codes and offsets."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (shape[0], shape[1] // 8), dtype=torch.int32, generator=generator)
    scales, offsets = (torch.rand(shape[0], shape[1] // cpu4.GROUP, generator=generator) for _ in range(2))
    return [cpu4._pack(words, scales)], offsets


def eight_bits(x: Tensor) -> Tensor:
    """What a token is rounded to: 256 steps from its least to its largest number, zero among them."""
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    step = (high - low) / 255
    zero = (-128 - low / step).round()
    return ((x / step).round() + zero).clamp(-128, 127).sub(zero) * step


@needs_kernel
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("shape", [(40, 64), (5, 96), (960, 576), (33, 1536)])
def test_the_product_is_that_of_the_rounded_numbers(shape: tuple[int, int], passes: int) -> None:
    """In fp64 by the formula: the codes multiply tokens in 8 bits, the offsets multiply them as they are."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, shape[1], generator=generator) for n in (shape[0], 9))
    codes, offsets, values = rounded(weight, passes)
    actual = cpu4.multiply(x, codes, offsets).double()
    plain = x.double() @ values.double().T
    added = x.double() @ offsets.double().repeat_interleave(cpu4.GROUP, 1).T
    coded = eight_bits(x).double() @ (values - offsets.repeat_interleave(cpu4.GROUP, 1)).double().T
    error = (actual - coded - added).norm() / plain.norm()
    assert error < 5e-4  # a few numbers lie between two steps
    assert (actual - plain).norm() / plain.norm() > 5 * error
    assert (values - weight).norm() / weight.norm() < (0.09, 0.006)[passes - 1]
    assert cpu4.multiply(x[:0], codes, offsets).shape == (0, shape[0])


def test_values_of_16_steps_are_kept() -> None:
    """GGUF's Q4_1 has them: only the scale's 8 bits are between. A group of equal values is its offset."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (7, 3, 32), generator=generator).float()
    codes[..., 0], codes[..., 1] = 0, 15
    weight = (codes * 0.037 - 0.2).flatten(1)
    weight[2, :32] = 0.25
    ends, squared_error, _ = CpuRounding().apply(weight)
    assert (squared_error / weight.numel()) ** 0.5 < 0.037 * 0.03
    values = rounded(weight)[2] if cpu4._has_kernel() else weight
    assert torch.equal(values[2, :32], weight[2, :32])
    assert ends["scales0"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="an infinity or NaN"):
        CpuRounding().apply(weight / 0)


@needs_kernel
@pytest.mark.parametrize("shape", DEFAULT_MODEL)
def test_a_row_has_the_bits_that_it_has_alone(shape: tuple[int, int]) -> None:
    codes, offsets = drawn(shape, 1)
    x = torch.randn(64, shape[1], generator=torch.Generator().manual_seed(2))
    alone = torch.cat([cpu4.multiply(row, codes, offsets) for row in x.split(1)])
    for count in range(1, 65) if shape[0] < 10_000 else (1, 2, 3, 4, 7, 8, 16, 33, 64):
        assert torch.equal(cpu4.multiply(x[:count], codes, offsets), alone[:count]), count
    assert torch.equal(cpu4.multiply(x[7:39], codes, offsets), alone[7:39])


@needs_kernel
def test_where_rows_depend_on_others_they_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for four rows that rounds otherwise: the trial notices it, and results stay those of single rows."""
    product, shape = cpu4._product, (48, 64)

    def planted(x: Tensor, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        return product(x, packed, shape) * (1 + 1e-6 * (len(x) % 4 == 0))

    codes, offsets = drawn(shape, 0)
    x = torch.randn(8, shape[1])
    expected = cpu4.multiply(x, codes, offsets)
    monkeypatch.setattr(cpu4, "_product", planted)
    monkeypatch.setattr(cpu4._STORE, "outcome", lambda key, device, trial: trial())
    cpu4._is_free_of_other_rows.cache_clear()
    try:
        assert not cpu4._is_free_of_other_rows(*shape, torch.get_num_threads())
        assert torch.equal(cpu4.multiply(x, codes, offsets), expected)
    finally:
        cpu4._is_free_of_other_rows.cache_clear()


def round_to_values(plain: Any, by_name: dict[str, Any]) -> None:
    """Give a plain model the numbers of the rounded one, so that only the 8 bits of tokens are between them."""
    for name, matrix in matrices(plain).items():
        is_embedding, is_head = (getattr(matrix, f"is_{use}", use == "head") for use in ("embedding", "head"))
        if by_name[name].format == DENSE:
            continue
        stack = matrix.weight.detach().view(-1, *matrix.shape[-2:])
        passes = 2 if hasattr(matrix, "is_head") else 1
        values = torch.stack([rounded(entry, passes)[2] for entry in stack]).view(matrix.shape)
        if is_embedding and is_head:
            matrix.logits = lambda hidden, values=values: hidden @ values.T  # type: ignore[method-assign,misc,assignment]
        matrix.weight.data = matrix.weight.data.bfloat16().float() if is_embedding else values


@needs_kernel
@pytest.mark.parametrize("kind", ["llama", "tied", "moe"])
def test_a_model_is_rounded_while_it_is_loaded(
    kind: str, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    plain = load(folders[kind])
    with caplog.at_level(logging.WARNING):
        model = load(folders[kind], quantize="cpu4", unpack=True)  # it is never unpacked
    (line,) = [record.getMessage() for record in caplog.records if "cpu4" in record.getMessage()]
    assert "4 bits in groups of 32" in line
    assert "outputs differ" in line
    left = {name for name, matrix in matrices(model).items() if matrix.format == DENSE}
    assert left == {name for name in matrices(model) if name.endswith("mlp.gate")}
    assert all(name in line for name in left)
    assert ("as they were" in line) == bool(left)
    round_to_values(plain, matrices(model))
    actual, expected = logits(model), logits(plain)
    assert 0 < (actual - expected).norm() / expected.norm() < 0.06  # a token's expert may be another one
    embedding, original = model.model.embed_tokens, plain.model.embed_tokens
    ids = torch.tensor([3, 1, 60])
    assert torch.equal(embedding(ids), original(ids))
    assert hasattr(embedding, "packed1") == (kind == "tied")
    assert "rows" not in dict(embedding.named_parameters())


@needs_kernel
def test_matrices_that_do_not_fit_stay_as_they_are(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = load(folders["odd"], quantize="cpu4")  # 72 columns
    layer = model.model.layers[0].mlp
    assert layer.down_proj.format == DENSE
    assert layer.gate_up_proj.format != DENSE
    assert "as they were: model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj" in caplog.text
    with pytest.raises(ValueError, match=r"multiples of 32 and more than that, and no matrix has such.* 24, 32"):
        load(folders["small"], quantize="cpu4")


@pytest.mark.parametrize(("count", "names"), [(64, []), (96, []), (32, ["b"]), (72, ["b"]), (20, ["b"])])
def test_columns_that_the_product_takes(count: int, names: list[str]) -> None:
    assert CpuRounding.unfit({"a": 128, "b": count}) == names


def test_experts_of_a_layer_stay_together() -> None:
    columns = {"l.0.experts.0.gate_proj": 64, "l.0.experts.0.down_proj": 40, "l.1.experts.0.gate_proj": 64}
    assert CpuRounding.unfit(columns) == ["l.0.experts.0.gate_proj", "l.0.experts.0.down_proj"]


@needs_kernel
def test_ranks_have_the_rows_of_the_whole(folders: dict[str, Path]) -> None:
    x = torch.randn(3, 64)
    whole = load(folders["llama"], quantize="cpu4").model.layers[0].mlp.gate_up_proj
    sizes = whole.splits
    gate, _ = whole(x).split(sizes, -1)
    parts = [
        load(folders["llama"], quantize="cpu4", tp=Ranks(rank=rank, size=2)).model.layers[0].mlp.gate_up_proj
        for rank in range(2)
    ]
    shares = [part(x).split(part.splits, -1)[0] for part in parts]
    assert torch.equal(torch.cat(shares, -1), gate)
    with pytest.raises(ValueError, match="take fewer ranks"):
        load(folders["llama"], quantize="cpu4", tp=Ranks(rank=0, size=4))


@needs_kernel
def test_neighbours_change_no_bit(folders: dict[str, Path]) -> None:
    tokenizer: Any = ByteTokenizer()
    llm = LLM(folders["tied"], tokenizer=tokenizer, device="cpu", num_blocks=32, quantize="cpu4")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    together = llm.generate([[1, 2, 3], [9, 8], [7] * 21], params, progress=False)
    for prompt, output in zip(([1, 2, 3], [9, 8], [7] * 21), together, strict=True):
        alone = llm.generate([prompt], params, progress=False)[0]
        assert alone.token_ids == output.token_ids
        assert alone.logprobs == output.logprobs


@needs_kernel
def test_a_gguf_file_is_rounded_anew(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from test_gguf_weights import write_gguf
    from test_models import save

    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", save(tmp_path / "hf", config("llama", SIZES)), gguf.GGMLQuantizationType.Q8_0)
    model = load(path, quantize="cpu4")
    assert any(isinstance(matrix.format, cpu4.Cpu4) for matrix in matrices(model).values())
    plain = load(path, unpack=True)
    round_to_values(plain, matrices(model))
    close(logits(model), logits(plain), bound=0.05)


def test_other_devices_are_refused(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cuda", "npu"):
        with pytest.raises(ValueError, match=f"cpu4 is for CPUs, and the device is {device}; use w4a16, w8a8 or fp8"):
            cpu4.check_device(device)
    with pytest.raises(ValueError, match="the device is meta"):
        load(folders["llama"], quantize="cpu4", device="meta")
    monkeypatch.setattr(cpu4, "_has_kernel", lambda: False)
    message = r"needs an Arm CPU with dot products .* 100 times as long, longer than fp32"
    with without_cpu_kernels(), pytest.raises(ValueError, match=message):
        load(folders["llama"], quantize="cpu4")


def test_nothing_is_written_in_it(folders: dict[str, Path], tmp_path: Path) -> None:
    from whorl.engine.weights import rewrite

    with pytest.raises(ValueError, match="format is 'cpu4', expected one of w4a16, w8a8, fp8"):
        rewrite.quantize_folder(str(folders["llama"]), tmp_path / "out", scheme="cpu4")


def test_blocks_take_memory_when_they_are_written() -> None:
    def own_memory() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("RssAnon"))

    before = own_memory()
    blocks = zeros((64, 1024, 1024), torch.float32, "cpu")  # 256 MB
    assert not blocks[::7, ::64].any()
    assert own_memory() - before < 64
    blocks[:32] = 1
    assert own_memory() - before > 100
    assert not blocks[32:].any()
    assert zeros((0, 16), torch.bfloat16, "cpu").shape == (0, 16)
