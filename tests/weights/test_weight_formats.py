"""A format of weights is one file: this one adds int8 values in pairs along K, with scales per 128 columns.

Nothing of it is known to whorl. A tiny Qwen3-MoE in this format goes through fused qkv, sharded products on two ranks,
experts, embedding and head, against the same values in fp32.
"""

import ast
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from mock_model import ByteTokenizer
from one_sequence import PROMPT, Runner, close
from safetensors.torch import load_file, save_file
from torch import Tensor

from whorl import nn
from whorl.engine import weights
from whorl.engine.llm import LLM
from whorl.engine.roofline import num_values, prompt_flops, step_bytes
from whorl.engine.sequence import SamplingParams
from whorl.models.qwen3 import Qwen3
from whorl.nn.weights import FORMATS
from whorl.nn.weights.dense import DENSE

METHOD, GROUP = "paired-int8", 128


@dataclass(frozen=True, slots=True)
class PairedInt8(nn.Format):
    """pairs [N, K / 2] int16, of two the first value in the low byte; scales [N, K / 128], turned for the product."""

    unit = nn.Unit(rows=1, columns=GROUP)

    def tensors(self, matrix: nn.Matrix) -> dict[str, Tensor]:
        *rows, columns = matrix.shape
        return {
            "pairs": torch.empty(*rows, columns // 2, dtype=torch.int16),
            "scales": torch.empty(*rows, columns // GROUP, dtype=torch.float32),
        }

    def destinations(self, matrix: Any, part: nn.Part) -> Iterator[tuple[str, nn.Destination]]:
        for end, into, size, dtype in (
            ("weight_pairs", matrix.pairs, 2, torch.int16),
            ("weight_scale", matrix.scales, GROUP, None),
        ):
            index = part.rows, slice(part.columns.start // size, part.columns.stop // size)
            shape = part.shape[0], part.shape[1] // size
            yield end, nn.Destination(into=into[part.place], shape=shape, index=index, dtype=dtype)

    def finish(self, matrix: Any) -> None:
        matrix.scales = torch.nn.Parameter(matrix.scales.mT.contiguous(), requires_grad=False)

    def values(self, matrix: Any) -> Tensor:
        return dequantised(matrix.pairs, matrix.scales.mT).to(matrix.dtype)

    def randomize(self, matrix: Any, generator: torch.Generator) -> None:
        matrix.pairs.random_(-(2**15), 2**15, generator=generator)
        matrix.scales.fill_((2**16 / 12 * matrix.shape[-1]) ** -0.5)
        self.finish(matrix)

    def linear(self, matrix: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        parts = zip(x.float().split(GROUP, -1), unpacked(matrix.pairs).split(GROUP, -1), matrix.scales, strict=True)
        y = sum((part @ values.float().T * scale for part, values, scale in parts), torch.zeros(()))
        return (y if bias is None else y + bias).to(x.dtype)

    def lookup(self, matrix: Any, row_ids: Tensor) -> Tensor:
        return dequantised(matrix.pairs[row_ids], matrix.scales.mT[row_ids]).to(matrix.dtype)


def unpacked(pairs: Tensor) -> Tensor:
    return pairs.view(torch.int8) if pairs.is_contiguous() else pairs.contiguous().view(torch.int8)


def dequantised(pairs: Tensor, scales: Tensor) -> Tensor:
    return (unpacked(pairs).unflatten(-1, (-1, GROUP)) * scales[..., None]).flatten(-2)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs and scales, by bytes and not by the format's own reading of them."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1) / 127
    values = (groups / scales[..., None]).round().flatten(-2).long()
    return ((values[:, ::2] & 255) + (values[:, 1::2] << 8)).to(torch.int16), scales


def formats(settings: Mapping[str, Any]) -> nn.Formats:
    kept = tuple(settings["modules_to_not_convert"])
    return nn.Formats(of=lambda name: DENSE if name.endswith(kept) else PairedInt8(), unit=PairedInt8.unit)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, METHOD, f"{__name__}:formats")


# The dense layer's 384 are three units: two ranks have one and two of them.
CONFIG = Qwen3.tiny(
    hidden_size=256,
    intermediate_size=384,
    moe_intermediate_size=256,
    num_experts=4,
    num_hidden_layers=2,
    mlp_only_layers=[1],
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_bias=True,
    norm_topk_prob=True,
) | {"head_dim": 64}


def settings(*kept: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": METHOD, "modules_to_not_convert": ["mlp.gate", *kept]}}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """In the format, and the same values in fp32."""
    model: Any = weights.random_model(CONFIG, device="cpu", dtype=torch.float32)
    paired: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, destination in nn.destinations(model).items():
        if destination.into.ndim == 1 or name.endswith("mlp.gate.weight"):
            paired[name] = dense[name] = destination.into.clone()
            continue
        paired[f"{name}_pairs"], paired[f"{name}_scale"] = quantised(destination.into)
        dense[name] = dequantised(paired[f"{name}_pairs"], paired[f"{name}_scale"])
        assert 0 < (dense[name] - destination.into).abs().max() < 0.01
    folder = tmp_path_factory.mktemp("checkpoints")
    return write(folder / "paired", CONFIG | settings(), paired), write(folder / "dense", CONFIG, dense)


def load(path: Path, **options: Any) -> Any:
    return weights.load_model(path, device="cpu", dtype="float32", progress=False, unpack=False, **options)


def logits(model: Any) -> Tensor:
    runner = Runner(model)
    return torch.cat([runner.run(PROMPT), runner.run([5])])


def matrices(model: Any) -> dict[str, nn.Matrix]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Matrix)}


# ---- it runs


def test_one_rank_equals_the_values_in_fp32(checkpoints: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        paired, dense = (load(path) for path in checkpoints)
    assert "F32 to float32, I16 as stored" in caplog.text
    held = matrices(paired)
    assert len(held) == 2 * 2 + (1 + 2) + 2 + 2
    for name, matrix in matrices(dense).items():
        assert held[name].format == (DENSE if name.endswith("mlp.gate") else PairedInt8())
        assert torch.equal(held[name].format.values(held[name]), matrix.weight), name
    close(logits(paired), logits(dense))


def test_the_engine_generates_with_it(checkpoints: tuple[Path, Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tokenizer: Any = ByteTokenizer()
    paired, dense = (
        LLM(path, tokenizer=tokenizer, device="cpu", dtype=torch.float32, num_blocks=16, unpack=False)
        for path in checkpoints
    )
    actual, expected = (llm.generate([[1, 2, 3], [9] * 20], params, progress=False) for llm in (paired, dense))
    assert [output.token_ids for output in actual] == [output.token_ids for output in expected]
    # A value takes a byte and 4 / 128 instead of 4 bytes; all else that a step moves is the same.
    batch = 500  # in which every expert is chosen
    read = [m.weight.numel() for n, m in matrices(dense.model).items() if not n.endswith(("mlp.gate", "embed_tokens"))]
    saved = (sum(read) + batch * CONFIG["hidden_size"]) * (4 - 33 / 32)
    assert step_bytes(dense.model, batch=batch) - step_bytes(paired.model, batch=batch) == pytest.approx(saved)
    for count in (num_values, functools.partial(prompt_flops, num_tokens=9)):  # not of bytes, but of numbers
        assert count(paired.model) == count(dense.model) > 0


def test_random_weights_in_the_format() -> None:
    model: Any = weights.random_model(CONFIG | settings(), device="cpu", dtype=torch.float32)
    for matrix in matrices(model).values():
        assert matrix.format.values(matrix).std() == pytest.approx(matrix.shape[-1] ** -0.5, rel=0.1)
    assert logits(model).isfinite().all()


# ---- two ranks


def test_two_ranks_hold_the_values_between_them(checkpoints: tuple[Path, Path]) -> None:
    """Bit by bit what two ranks hold of the dense checkpoint when cut at the same places."""
    whole = load(checkpoints[1])
    shares = [load(checkpoints[0], tp=nn.Ranks(rank=rank, size=2)) for rank in range(2)]
    sources = {name: destination.into for name, destination in nn.destinations(whole).items()}
    for rank in shares:
        for name, matrix in matrices(rank).items():
            values = matrix.format.values(matrix)
            for part in matrix.parts:
                expected = sources[f"{part.source(name)}.weight"][part.rows, part.columns]
                assert torch.equal(values[part.place], expected), part
    widths = [rank.model.layers[1].mlp.down_proj.shape[1] for rank in shares]
    assert widths == [128, 256]
    assert [rank.model.layers[0].mlp.experts.down_proj.shape for rank in shares] == [(4, 256, 128)] * 2


def share_logits(path: Path) -> Tensor:
    """On every rank."""
    FORMATS[METHOD] = f"{__name__}:formats"
    mine = nn.Ranks(rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())
    return logits(load(path, tp=mine))


def test_two_ranks_equal_one(checkpoints: tuple[Path, Path]) -> None:
    one, other = ranks.shared(2).run(share_logits, checkpoints[0])
    assert torch.equal(one, other)
    close(one, logits(load(checkpoints[0])))
    close(one, logits(load(checkpoints[1])))


# ---- what is refused


def test_shares_that_would_cut_a_unit() -> None:
    for change, message in (
        (
            {"head_dim": 32},
            r"self_attn\.o_proj: this rank's share, or a part of that share, is columns 0 to 64 of 128, and the "
            r"weights are in units of 128 columns, which cannot be cut: take fewer tensor-parallel ranks \(--tp\)",
        ),
        ({"moe_intermediate_size": 128}, "expert size: 1 units of 128 cannot be shared by 2 ranks: take 1 or fewer"),
    ):
        with pytest.raises(ValueError, match=message):
            weights.build(CONFIG | settings() | change, device="meta", dtype=torch.float32, tp=nn.Ranks(size=2))


def test_projections_of_one_matrix_in_two_formats() -> None:
    for kept, message in (
        ("k_proj", r"q_proj and model\.layers\.0\.self_attn\.k_proj are stored as one matrix, .* different formats"),
        ("down_proj", r"mlp\.experts: experts must have one format, and the checkpoint has gate and up in PairedInt8"),
    ):
        with pytest.raises(ValueError, match=message):
            weights.build(CONFIG | settings(kept), device="meta", dtype=torch.float32)


OUT = "model.layers.0.self_attn.o_proj.weight"
GATE = "model.layers.0.mlp.gate.weight"


def stored(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{OUT}_scale"), f"1 missing: {OUT}_scale"),
        (lambda t: t.update({OUT: t.pop(f"{OUT}_pairs")}), f"1 missing: {OUT}_pairs; 1 not part of the model: {OUT}"),
        (stored(f"{OUT}_pairs", torch.int32), f"1 of another dtype: {OUT}_pairs I32, expected int16"),
        (stored(f"{OUT}_pairs", torch.float16), f"1 of another dtype: {OUT}_pairs F16, expected int16"),
        (stored(f"{OUT}_scale", torch.uint8), f"1 of a dtype that cannot be converted: {OUT}_scale U8"),
        (stored(GATE, torch.float8_e4m3fn), f"1 of a dtype that cannot be converted: {GATE} F8_E4M3"),
    ],
)
def test_tensors_that_are_not_in_the_format(
    checkpoints: tuple[Path, Path], edit: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    tensors = load_file(checkpoints[0] / "model.safetensors")
    edit(tensors)
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "changed", CONFIG | settings(), tensors))


# ---- nobody knows


def test_engine_and_models_know_no_format() -> None:
    """Neither this one nor any: what they import is the table."""
    package = Path(nn.__file__).parents[1]
    files = [*(package / "engine").rglob("*.py"), *(package / "models").rglob("*.py")]
    assert len(files) > 20
    for path in files:
        text = path.read_text()
        assert METHOD not in text, path
        assert PairedInt8.__name__ not in text, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and "nn.weights." in f"{node.module}.":
                pytest.fail(f"{path}: {ast.unparse(node)}")
