"""Quantised checkpoints that cannot be loaded: file, tensor, found and expected. Which module has which format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_checkpoints import BLOCKS, CASES, GROUPS, INT4, TOKENS, WHOLE8, Case, ct, write
from safetensors.torch import load_file, save_file
from test_quant_formats import load
from torch import Tensor

from whorl import nn
from whorl.engine.weights import build
from whorl.models.llama import Llama
from whorl.nn.weights import FORMATS, compressed, find, fp4
from whorl.nn.weights.dense import DENSE

OUT = "model.layers.0.self_attn.o_proj"


def formats(**settings: Any) -> nn.Formats:
    return find({"quantization_config": settings})


# ---- tensors


def change(path: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def to(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("case", "edit", "message"),
    [
        ("fp8-blocks", lambda t: t.pop(f"{OUT}.weight_scale_inv"), f"1 missing: {OUT}.weight_scale_inv"),
        ("fp8-blocks", to(f"{OUT}.weight", Tensor.bfloat16), f"{OUT}.weight BF16, expected float8_e4m3fn"),
        (
            "fp8-blocks",
            to(f"{OUT}.weight_scale_inv", lambda x: x[:1]),
            rf"1 of another shape: {OUT}.weight_scale_inv \[1, 4\], expected \[4, 4\]",
        ),
        ("fp8-tensor", lambda t: t.pop(f"{OUT}.weight_scale"), f"1 missing: {OUT}.weight_scale"),
        ("ct-w4", lambda t: t.pop(f"{OUT}.weight_shape"), f"1 missing: {OUT}.weight_shape"),
        (
            "ct-w4",
            to(f"{OUT}.weight_shape", lambda x: x + 1),
            rf"{OUT}.weight_shape is \[65, 65\], expected \[64, 64\] by config",
        ),
        (
            "ct-w4",
            to(f"{OUT}.weight_packed", lambda x: x[:, :-1]),
            rf"{OUT}.weight_packed \[64, 7\], expected \[64, 8\]",
        ),
        ("ct-w4-zeros", lambda t: t.pop(f"{OUT}.weight_zero_point"), f"1 missing: {OUT}.weight_zero_point"),
        ("ct-w8", to(f"{OUT}.weight", Tensor.float), f"{OUT}.weight F32, expected int8"),
        (
            "awq",
            lambda t: t.update({f"{OUT}.weight": t.pop(f"{OUT}.qweight").float()}),
            f"1 missing: {OUT}.qweight; 1 not part of the model: {OUT}.weight",
        ),
        ("gptq", lambda t: t.pop(f"{OUT}.qzeros"), f"1 missing: {OUT}.qzeros"),
        (
            "gptq",
            to(f"{OUT}.g_idx", lambda x: x.flip(0)),
            f"{OUT}: g_idx is not in order, and config.json says desc_act",
        ),
        ("gptq-order", to(f"{OUT}.g_idx", lambda x: x + 1), f"{OUT}: g_idx has groups 1 to 4, expected 0 to 3"),
        (
            "gptq-order",
            to("model.layers.0.self_attn.k_proj.g_idx", lambda x: x.flip(0)),
            r"q_proj and model.layers.0.self_attn.k_proj are stored as one matrix, .* different groups \(g_idx\)",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    case: str, edit: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, CASES[case], "llama")
    change(path, edit)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_a_truncated_file_names_its_tensors(tmp_path: Path) -> None:
    path, _ = write(tmp_path, CASES["awq"], "llama")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"packed/model\.safetensors: truncated, which cuts model"):
        load(path)


def test_the_index_of_columns_may_be_missing(tmp_path: Path) -> None:
    path, dense = write(tmp_path, CASES["gptq"], "llama")
    change(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("g_idx")])
    values = load(path).model.layers[0].self_attn.o_proj
    assert torch.equal(values.format.values(values), load_file(dense / "model.safetensors")[f"{OUT}.weight"])


def test_scales_of_a_cache_are_not_used(tmp_path: Path) -> None:
    path, _ = write(tmp_path, CASES["ct-w4"], "llama")
    change(path, lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    load(path)


# ---- sizes


@pytest.mark.parametrize(
    ("settings", "sizes", "message"),
    [
        (GROUPS, {"hidden_size": 40}, r"q_proj: 40 columns, expected a multiple of the group of 16"),
        (
            GROUPS | {"group_size": 4},
            {"hidden_size": 36},
            "32 rows and 36 columns, expected multiples of 8: GPTQ packs",
        ),
        ({"quant_method": "awq", "group_size": 8}, {"intermediate_size": 44}, "44 rows, expected a multiple of 8"),
    ],
)
def test_sizes_that_have_no_place(settings: dict[str, Any], sizes: dict[str, Any], message: str) -> None:
    config = Llama.tiny(head_dim=8) | sizes | {"quantization_config": settings}
    with pytest.raises(ValueError, match=message):
        build(config, device="meta", dtype=torch.float32)


def test_shares_that_would_cut_a_group() -> None:
    config = Llama.tiny(head_dim=8, hidden_size=32, intermediate_size=64)
    for settings, message in (
        (
            GROUPS | {"group_size": 32},
            r"o_proj: this rank's share, .*, is columns 0 to 16 of 32, .* units of 32 columns",
        ),
        (
            BLOCKS | {"weight_block_size": [32, 32]},
            r"q_proj: this rank's share, .*, is rows 0 to 16 of 32, .* units of 32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            build(config | {"quantization_config": settings}, device="meta", dtype=torch.float32, tp=nn.Ranks(size=2))


# ---- which module has which format


def test_the_doctor_knows_the_same_methods() -> None:
    from whorl.doctor.checks import quantised

    assert set(quantised.KNOWN) == set(FORMATS)
    assert set(quantised.COMPRESSED) == set(compressed.KNOWN)
    assert set(quantised.FP4) == set(fp4.COMPRESSED)
    assert quantised.MODELOPT == fp4.MODELOPT


def test_compressed_tensors_takes_the_nearest_target() -> None:
    """Names go before patterns and patterns before classes; what is ignored is dense."""
    settings = ct("pack-quantized", **INT4)
    eight = {"weights": INT4 | {"num_bits": 8}, "targets": ["re:.*mlp.*_proj$"]}
    floats = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["a.mlp.up_proj"]}
    settings["config_groups"] |= {"b": eight, "c": floats | {"format": "float-quantized"}}
    settings["ignore"] += ["lm_head"]
    of: Any = formats(**settings).of
    assert of("a.self_attn.q_proj").bits == 4
    assert of("a.mlp.down_proj").bits == 8
    assert type(of("a.mlp.up_proj")).__name__ == "Fp8"
    assert of("lm_head") == of("a.mlp.gate") == of("model.embed_tokens") == DENSE


def test_gptq_dynamic() -> None:
    dynamic = {
        "-:.*o_proj": {},
        r"+:model\.layers\.1\..*": {"bits": 8, "group_size": 32},
        ".*down_proj": {"desc_act": True},
    }
    parsed = formats(**GROUPS, dynamic=dynamic)
    of: Any = parsed.of
    assert of("model.layers.1.self_attn.o_proj") == DENSE
    assert (of("model.layers.1.mlp.down_proj").bits, of("model.layers.1.mlp.down_proj").group) == (8, 32)
    assert of("model.layers.0.mlp.down_proj").has_act_order
    assert (of("model.layers.0.mlp.up_proj").bits, of("lm_head")) == (4, DENSE)
    assert parsed.unit == nn.Unit(rows=8, columns=32)
    assert formats(**GROUPS, lm_head=True).of("lm_head") != DENSE
    some: Any = formats(**GROUPS, modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]).of
    assert (some("a.self_attn.q_proj").bits, some("a.self_attn.o_proj")) == (4, DENSE)


def test_lists_of_what_is_not_quantised() -> None:
    of = formats(quant_method="awq", modules_to_not_convert=["gate", "model.layers.1", "o_proj"]).of
    for name in ("model.layers.0.mlp.gate", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.o_proj", "lm_head"):
        assert of(name) == DENSE, name
    assert of("model.layers.0.mlp.experts.3.gate_proj") != DENSE
    assert of("model.layers.11.mlp.up_proj") != DENSE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "nvfp4"},
            r"quantised \(nvfp4: NVFP4 of a tool that is not known; .*; expected fp8, compressed",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "quant_algo is 'FP8', expected one of 'NVFP4', 'W4A16_NVFP4'",
        ),
        ({"quant_method": "modelopt_fp4", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ', expected one of"),
        ({"quant_method": "ascend"}, r"\(ascend: modelslim's, for Ascend\)"),
        ({"quant_method": "auto-round"}, r"\(auto-round: AutoRound's own layout\)"),
        ({"quant_method": "bitsandbytes"}, r"\(bitsandbytes: of bitsandbytes\)"),
        (
            {"quant_method": "new"},
            r"\(new\); expected fp8, compressed-tensors, awq, gptq, gguf, mxfp4, modelopt, modelopt_fp4, bfloat16",
        ),
        ({"bits": 4}, r"\(unknown\)"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt is 'e5m2', expected one of 'e4m3'"),
        (BLOCKS | {"weight_block_size": [128]}, r"blocks of \[128\], expected rows and columns such as"),
        (BLOCKS | {"expert_dtype": "fp4"}, "expert_dtype is 'fp4'; only FP8 is supported"),
        (BLOCKS | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head', expected list"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv', expected one of 'gemm'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point is False, expected one of True"),
        ({"quant_method": "awq", "bits": 3}, "bits is 3, expected one of 4"),
        (GROUPS | {"bits": 3}, "bits is 3, expected one of 4, 8"),
        (GROUPS | {"group_size": 0}, "group_size is 0, expected the columns of a group"),
        (GROUPS | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected one of 'gptq', 'gptq_v2'"),
        (GROUPS | {"dynamic": {"(": {}}}, r"dynamic has '\(', which is not a regular expression"),
        (ct("mxfp8-quantized", num_bits=8, type="float"), "format is 'mxfp8-quantized', expected one of"),
        (ct("nvfp4-pack-quantized", num_bits=4, type="float", group_size=32), "group_size is 32, expected one of 16"),
        (ct("marlin-24", **INT4), "format is 'marlin-24'"),
        (ct("pack-quantized", **INT4 | {"num_bits": 3}), "num_bits is 3, expected one of 4, 8"),
        (ct("pack-quantized", TOKENS, **INT4), "packed weights with quantised activations are not supported"),
        (ct("int-quantized", TOKENS | {"dynamic": False}, **WHOLE8), "dynamic is False, expected one of True"),
        (ct("int-quantized", **WHOLE8 | {"symmetric": False}), "symmetric is False, expected one of True"),
        (ct("float-quantized", **WHOLE8), "weights are of type 'int', which format 'float-quantized' does not store"),
        (ct("pack-quantized", **INT4) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is"),
        (ct("pack-quantized", **INT4) | {"ignore": ["re:("]}, r"'re:\(' is not a regular expression"),
    ],
)
def test_what_is_not_known_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        formats(**settings)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("quant_model_description.json", {"model_quant_type": "W8A8"}, "modelslim's, for Ascend"),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "FP8"}},
            "quant_algo is 'FP8', expected one of 'NVFP4'",
        ),
    ],
)
def test_files_that_say_it_beside_config_json(file: str, values: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, CASES["gptq"], "llama")[1]
    (path / file).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        load(path)


def test_old_checkpoints_say_it_in_a_file_of_their_own(tmp_path: Path) -> None:
    for name, file in (("gptq", "quantize_config.json"), ("awq", "quant_config.json")):
        path, _ = write(tmp_path / name, CASES[name], "llama")
        config = json.loads((path / "config.json").read_text())
        settings = config.pop("quantization_config")
        settings.pop("quant_method")
        (path / file).write_text(json.dumps(settings))
        (path / "config.json").write_text(json.dumps(config))
        assert load(path).model.layers[0].mlp.down_proj.format.bits == 4


def test_any_value_of_any_type_gives_a_message() -> None:
    strange = [None, True, 0, -3, 1.5, 10**30, "x", "", [], [1], {}, {"a": 1}, [[]], float("nan"), [None], ["re:("]]
    every: list[Case] = list(CASES.values())
    for case in every:
        for name in [
            *case.settings,
            "group_size",
            "ignore",
            "dynamic",
            "modules_to_not_convert",
            "config_groups",
            "bits",
        ]:
            for value in strange:
                try:
                    find({"quantization_config": case.settings | {name: value}}).of("model.layers.0.mlp.up_proj")
                except ValueError:
                    continue
