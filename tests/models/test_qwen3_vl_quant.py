"""Quantised checkpoints of Qwen3-VL: features and answers are those of the dequantised model, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_checkpoints import BLOCKS, CASES, FLOAT8, GROUPS, INT4, Case, awq, ct, fp8, gptq
from safetensors.torch import save_file
from torch import Tensor
from vision import expand, item

from whorl import nn
from whorl.engine import weights
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import random_model
from whorl.models.qwen3_vl import Qwen3VL
from whorl.nn.weights.dense import DENSE

SIZES = {"hidden_size": 64, "intermediate_size": 80, "moe_intermediate_size": 64}
TOWER = {"intermediate_size": 48}
HEAD_AND_ROUTER = ("lm_head", "mlp.gate")
WHOLE = (*HEAD_AND_ROUTER, "patch_embed")  # what stays as it is where the tower is quantised, too
TEXT = (*HEAD_AND_ROUTER, "visual")


def _tower_linears() -> list[str]:
    """Named one by one, as Qwen's own FP8 checkpoints do."""
    names = nn.destinations(random_model(config("dense"), device="cpu", dtype=torch.float32))
    return [n.removesuffix(".weight") for n in names if ".visual." in n and n.endswith(".weight")]


def config(kind: str) -> dict[str, Any]:
    sizes = SIZES | ({"num_experts": 4} if kind == "moe" else {})
    return Qwen3VL.tiny(TOWER, **sizes)


def _ignoring(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return settings | {"ignore": [*settings["ignore"], "lm_head", *names]}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}
FORMATS: dict[str, Case] = {
    "fp8": Case(BLOCKS, fp8((16, 16), "weight_scale_inv"), kept=TEXT),
    "fp8, the tower too": Case(
        BLOCKS | {"modules_to_not_convert": ["lm_head"]}, fp8((16, 16), "weight_scale_inv"), kept=WHOLE
    ),
    "compressed-tensors": Case(
        _ignoring(ct("pack-quantized", **INT4), "re:visual.*", "re:model.visual.*"), CASES["ct-w4"].make, kept=TEXT
    ),
    "compressed-tensors, the tower too": Case(
        _ignoring(ct("float-quantized", **FLOAT8, strategy="channel")), CASES["ct-fp8-channel"].make, kept=WHOLE
    ),
    "awq": Case(AWQ | {"modules_to_not_convert": ["visual"]}, awq(16), kept=TEXT),
    "awq, nothing said": Case(AWQ, awq(16), kept=TEXT),
    "gptq, nothing said": Case(GROUPS, gptq(16), kept=TEXT),
}


def write(folder: Path, case: Case, kind: str) -> tuple[Path, Path]:
    """A folder in the format, and one with the same values in fp32. Experts lie one by one where they are quantised."""
    values, generator = config(kind), torch.Generator().manual_seed(0)
    if case.settings is BLOCKS:
        case = replace(case, settings=BLOCKS | {"modules_to_not_convert": [*_tower_linears(), "lm_head"]})
    packed: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}

    def made(module: str, rows: int, columns: int) -> Tensor:
        tensors, exact = case.make(module, rows, columns, generator)
        packed.update({f"{module}.{end}": tensor.contiguous() for end, tensor in tensors.items()})
        return exact

    for name, slot in nn.destinations(random_model(values, device="cpu", dtype=torch.float32)).items():
        module, shape = name.removesuffix(".weight"), tuple(slot.into.shape)
        if ".experts." in name:
            sources = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            prefix, rows = name.rpartition(".")[0], shape[1] // len(sources)
            experts = [[made(f"{prefix}.{e}.{source}", rows, shape[2]) for source in sources] for e in range(shape[0])]
            dense[name] = torch.stack([torch.cat(parts) for parts in experts])
            continue
        is_kept = module.endswith(("embed_tokens", "pos_embed")) or any(f".{n}." in f".{module}." for n in case.kept)
        if len(shape) == 1 or is_kept:
            packed[name] = dense[name] = slot.into.clone()
        else:
            dense[name] = made(module, *shape)
    both = folder / "packed", folder / "dense"
    for path, tensors, more in zip(both, (packed, dense), ({"quantization_config": case.settings}, {}), strict=True):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(values | more))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return both


def load(path: Path, **options: Any) -> Any:
    return weights.load_model(path, **{"device": "cpu", "dtype": "float32", "progress": False} | options)


def answers(model: Any) -> list[Any]:
    llm = LLM(model=model, device="cpu", block_size=4, num_blocks=100)
    ids, items = expand([5, item(0, (1, 4, 6)), 6, item(1, (2, 2, 4), "video"), 7])
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
    (output,) = llm.generate([ids], params, media=[items], progress=False)
    return [output.token_ids, output.logprobs]


def formats_of(model: Any) -> dict[str, Any]:
    return {name: module.format for name, module in model.named_modules() if isinstance(module, nn.Matrix)}


CHOSEN = [("dense", name) for name in FORMATS] + [
    pytest.param("moe", name, marks=[] if name in ("fp8", "awq") else pytest.mark.slow) for name in FORMATS
]


@pytest.mark.parametrize(("kind", "name"), CHOSEN)
def test_features_and_answers_are_those_of_the_dequantised_model(kind: str, name: str, tmp_path: Path) -> None:
    path, dense = write(tmp_path, FORMATS[name], kind)
    model, plain = load(path, unpack=False), load(dense)
    quantised = [name for name, held in formats_of(model).items() if held != DENSE]
    assert any("language_model" in each for each in quantised)
    assert any("visual.blocks.1" in each for each in quantised) == name.endswith("the tower too")
    assert not any("patch_embed" in each for each in quantised), "a convolution"
    shown = item(0, (1, 4, 6))
    patches = torch.from_numpy(shown.patches)
    expected = plain.tower.encode(patches, shown.grid)
    assert torch.equal(model.tower.encode(patches, shown.grid), expected)
    assert answers(model) == answers(plain)


def test_rounding_leaves_the_tower_as_it_is(tmp_path: Path) -> None:
    _, dense = write(tmp_path, FORMATS["fp8"], "dense")
    rounded, plain = load(dense, quantize="fp8", unpack=False), load(dense)
    quantised = {name for name, held in formats_of(rounded).items() if held != DENSE}
    assert quantised
    assert not any("visual" in name for name in quantised)
    shown = item(0, (1, 4, 6))
    patches = torch.from_numpy(shown.patches)
    assert torch.equal(rounded.tower.encode(patches, shown.grid), plain.tower.encode(patches, shown.grid))
    answers(rounded)


def test_rounding_of_stacked_experts_is_refused(tmp_path: Path) -> None:
    _, dense = write(tmp_path, FORMATS["fp8"], "moe")
    with pytest.raises(ValueError, match="experts in one tensor cannot be quantised"):
        load(dense, quantize="fp8")
