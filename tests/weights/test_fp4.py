"""MXFP4 and NVFP4 of compressed-tensors and ModelOpt: values of the library, ranks, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from one_sequence import PROMPT, Runner
from safetensors.torch import save_file
from torch import Tensor

from whorl import nn
from whorl.engine.weights import load_model, random_model
from whorl.models.qwen3 import Qwen3
from whorl.nn import weights
from whorl.ops.quantised import mx

SIZES = {"hidden_size": 64, "intermediate_size": 128}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def config(**quantization: Any) -> dict[str, Any]:
    return Qwen3.tiny(**SIZES) | {"quantization_config": quantization}


def compressed(name: str, group: int) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups, "ignore": ["lm_head"]}


def drawn(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    return torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=draw)


def numbers(codes: Tensor) -> Tensor:
    """The library's numbers of codes, or, without it, by the definition."""
    try:
        from compressed_tensors.compressors.quantized_compressors.fp4_quantized import unpack_fp4_from_uint8
    except ImportError:
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        return E2M1[(nibbles & 7).long()] * torch.where(nibbles >= 8, -1.0, 1.0)
    return unpack_fp4_from_uint8(codes, len(codes), codes.shape[1] * 2, dtype=torch.float32)


def mxfp4(rows: int, columns: int, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales = drawn(rows, columns, draw), torch.randint(120, 125, (rows, columns // 32), generator=draw)
    values = numbers(codes) * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    return {"weight_packed": codes, "weight_scale": scales.to(torch.uint8)}, values


def nvfp4(rows: int, columns: int, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, factor = drawn(rows, columns, draw), torch.rand(1, generator=draw) + 20
    scales = (torch.rand(rows, columns // 16, generator=draw) + 0.3).to(torch.float8_e4m3fn)
    values = numbers(codes) * scales.float().repeat_interleave(16, 1) / factor
    tensors = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": factor}
    return tensors | {"input_global_scale": torch.ones(1)}, values


def of_modelopt(rows: int, columns: int, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, factor = drawn(rows, columns, draw), torch.rand((), generator=draw) / 20
    scales = (torch.rand(rows, columns // 16, generator=draw) + 0.3).to(torch.float8_e4m3fn)
    values = numbers(codes) * scales.float().repeat_interleave(16, 1) * factor
    tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": factor}
    return tensors | {"input_scale": torch.tensor(0.1)}, values


MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "exclude_modules": ["lm_head", "*.q_norm"],
}
CASES: dict[str, Any] = {
    "mxfp4": (compressed("mxfp4-pack-quantized", 32), mxfp4),
    "nvfp4": (compressed("nvfp4-pack-quantized", 16), nvfp4),
    "modelopt": (MODELOPT, of_modelopt),
}


def write(folder: Path, name: str) -> tuple[Path, Path]:
    """A checkpoint of a format, and one of its values."""
    settings, make = CASES[name]
    draw = torch.Generator().manual_seed(0)
    model: Any = random_model(Qwen3.tiny(**SIZES), device="cpu", dtype=torch.float32)
    plain = {n: slot.into.clone() for n, slot in nn.destinations(model).items()}
    packed: dict[str, Tensor] = {}
    for tensor_name, tensor in list(plain.items()):
        if not tensor_name.endswith("proj.weight"):
            packed[tensor_name] = tensor
            continue
        tensors, values = make(*tensor.shape, draw)
        plain[tensor_name] = values
        packed |= {f"{tensor_name.removesuffix('.weight')}.{end}": each for end, each in tensors.items()}
    folders = folder / "packed", folder / "plain"
    for path, tensors, values in zip(folders, (packed, plain), (config(**settings), Qwen3.tiny(**SIZES)), strict=True):
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(values))
    return folders


def load(path: Path, **options: Any) -> Any:
    return load_model(path, device="cpu", dtype="float32", progress=False, **options)


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_values(tmp_path: Path, name: str) -> None:
    packed, plain = write(tmp_path, name)
    expected = Runner(load(plain)).run(PROMPT)
    for unpack in (False, True):
        model = load(packed, unpack=unpack)
        assert hasattr(model.decoder.layers[0].mlp.down_proj, "codes") != unpack
        torch.testing.assert_close(Runner(model).run(PROMPT), expected, rtol=1e-5, atol=1e-5)
    whole = load(packed, unpack=True).decoder.layers[0].mlp
    halves = [load(packed, unpack=True, tp=nn.Ranks(rank=rank, size=2)).decoder.layers[0].mlp for rank in range(2)]
    assert torch.equal(torch.cat([half.down_proj.weight for half in halves], 1), whole.down_proj.weight)


def test_every_number_and_scale_of_mxfp4() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(255, 1)[:, :16]
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    expected = numbers(codes).double() * torch.exp2(scales.double() - 127)
    inside = expected.abs() <= torch.finfo(torch.float32).max
    actual = mx.values(codes, scales, torch.float32, 2 * codes.shape[1])
    assert torch.equal(actual[inside].double(), expected[inside])
    exact = inside & (scales.expand_as(inside) > 8) & (scales.expand_as(inside) < 250)
    assert torch.equal(mx.values(codes, scales, torch.bfloat16, 2 * codes.shape[1])[exact].double(), expected[exact]), (
        "not exact in bf16"
    )
    assert mx.values(codes[:1], torch.full((1, 1), 255, dtype=torch.uint8), torch.float32, 32).isnan().all()


def test_rounding_to_mxfp4_is_to_the_nearest() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    codes, scales = mx.rounded(x)
    values = mx.values(codes, scales, torch.float32, 2 * codes.shape[1])
    power = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    every = torch.cat((E2M1, -E2M1))[:, None, None] * power
    assert torch.equal((values - x).abs(), (every - x).abs().amin(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (compressed("mxfp4-pack-quantized", 16), "group_size is 16, expected one of 32"),
        (compressed("nvfp4-pack-quantized", 32), "group_size is 32, expected one of 16"),
        (MODELOPT | {"quant_algo": "FP8"}, "quant_algo is 'FP8', expected one of 'NVFP4', 'W4A16_NVFP4'"),
        ({"quant_method": "nvfp4"}, r"quantised \(nvfp4: NVFP4 of a tool that is not known"),
    ],
)
def test_what_is_not_known_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weights.find({"quantization_config": settings})


def test_columns_that_are_no_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="48 columns, expected a multiple of 32"):
        random_model(
            Qwen3.tiny(intermediate_size=48) | {"quantization_config": CASES["mxfp4"][0]},
            device="cpu",
            dtype=torch.float32,
        )
