"""`whorl quantize --format fp8` of DeepSeek's models: their makers' layout, read back by transformers and by whorl."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from one_sequence import PROMPT, Runner, close
from safetensors.torch import load_file, save_file
from test_models import hf_logits
from test_quant_formats import matrices
from torch import Tensor

from whorl.engine.weights import load_model, rewrite
from whorl.models.deepseek import DeepSeek
from whorl.nn.weights.dense import DENSE
from whorl.nn.weights.rounding import BlockRounding

PUBLISHED = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
# Whole blocks, or one that is partial: transformers takes the size of a block from the number of scales.
WHOLE = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "q_lora_rank": 96}
WHOLE |= {"num_attention_heads": 4, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
WHOLE |= {"kv_lora_rank": 96, "index_n_heads": 8, "index_head_dim": 32}
# The last block of many is partial, as that of kv_a_proj_with_mqa's 576 rows is.
PARTIAL = {"hidden_size": 208, "intermediate_size": 176, "kv_lora_rank": 130, "q_lora_rank": 140, "v_head_dim": 40}
AS_THEY_ARE = ("embed_tokens", "lm_head", "mlp.gate", "indexer.weights_proj", "eh_proj", "shared_head.head")


def written(folder: Path, **changes: Any) -> Path:
    """In bf16, with a layer of multi-token prediction behind the others, as the published files have one."""
    (folder / "models").mkdir()
    config = DeepSeek.tiny(num_hidden_layers=2, num_nextn_predict_layers=1, dtype="bfloat16", **changes)
    path = write_checkpoints(folder / "models", {"plain": config})["plain"]
    tensors = {name: x.bfloat16() for name, x in load_file(path / "model.safetensors").items()}
    further = {name.replace("layers.1.", "layers.2."): x.clone() for name, x in tensors.items() if ".layers.1." in name}
    width = config["hidden_size"]
    further |= {"model.layers.2.eh_proj.weight": torch.randn(width, 2 * width).bfloat16()}
    further |= {"model.layers.2.shared_head.head.weight": tensors["lm_head.weight"].clone()}
    save_file(tensors | further, path / "model.safetensors", metadata={"format": "pt"})
    return path


def dequantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers makes of every matrix that has scales, in bf16."""
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    dense = {}
    for name, scales in tensors.items():
        if name.endswith(".weight_scale_inv"):
            weight = tensors[name.removesuffix("_scale_inv")]
            values = integration._dequantize_fp8_weight(weight, scales, [128, 128], torch.float32)
            dense[name.removesuffix(".weight_scale_inv")] = values.bfloat16()
    return dense


@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v3"])
@pytest.mark.parametrize("sizes", [WHOLE, PARTIAL], ids=["whole", "partial"])
def test_the_makers_layout(model_type: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    path, out = written(tmp_path, model_type=model_type, **sizes), tmp_path / "out"
    report = rewrite.quantize_folder(str(path), out, scheme="fp8", progress=False)
    config = json.loads((out / "config.json").read_text())
    has_powers = model_type == "deepseek_v32"
    assert config.pop("quantization_config") == PUBLISHED | ({"scale_fmt": "ue8m0"} if has_powers else {})
    assert config == json.loads((path / "config.json").read_text())
    before, after = load_file(path / "model.safetensors"), load_file(out / "model.safetensors")
    theirs = dequantised(after)
    for name, tensor in before.items():
        module = name.removesuffix(".weight")
        if tensor.dim() == 2 and not module.endswith(AS_THEY_ARE):
            scales = after[f"{name}_scale_inv"]
            assert (after[name].dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
            assert scales.shape == tuple(-(-n // 128) for n in tensor.shape)
            assert bool((scales.log2() % 1 == 0).all()) == has_powers
            error = float((theirs[module].double() - tensor.double()).norm() / tensor.double().norm())
            assert report.modules[module].error == pytest.approx(error, rel=0.05)  # theirs is rounded to bf16
            assert 0.01 < error < 0.04
        else:
            assert torch.equal(after[name], tensor), name
    assert len(theirs) == len(report.modules) == len(after) - len(before)
    judge_loading(path, out, theirs)


def judge_loading(path: Path, out: Path, theirs: dict[str, Tensor]) -> None:
    """The same numbers here, however they are held; kv_b_proj is held as values. And made while loading."""
    expected = None
    for options in ({"unpack": False}, {"unpack": True}):
        model: Any = load_model(out, device="cpu", dtype="bfloat16", progress=False, **options)
        logits = Runner(model).run(PROMPT)
        assert expected is None or torch.equal(logits, expected)
        expected = logits
        for name, matrix in matrices(model).items():
            for part in matrix.parts:
                source = part.source(name)
                is_plain = matrix.format == DENSE
                assert is_plain == (options["unpack"] or source.endswith(("kv_b_proj", *AS_THEY_ARE))), source
                if source in theirs:
                    values = matrix.weight if is_plain else matrix.format.values(matrix)
                    assert torch.equal(values[part.place], theirs[source]), source
    rounded = load_model(path, device="cpu", dtype="bfloat16", quantize="fp8", progress=False)
    assert torch.equal(Runner(rounded).run(PROMPT), expected)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v3"])
def test_transformers_reads_the_folder(model_type: str, tmp_path: Path) -> None:
    """Every number that it makes of the weights is ours, bit for bit, and the logits are close."""
    transformers = pytest.importorskip("transformers")
    path, out = written(tmp_path, model_type=model_type, **WHOLE), tmp_path / "out"
    rewrite.quantize_folder(str(path), out, scheme="fp8", progress=False)
    hf = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval().float()
    model: Any = load_model(out, device="cpu", dtype="float32", unpack=True, progress=False)
    theirs, count = hf.state_dict(), 0
    for name, matrix in matrices(model).items():
        for part in matrix.parts:
            values, source = matrix.weight[part.place], part.source(name)
            if ".experts." in source and "shared_experts" not in source:
                layer, _, rest = source.partition(".experts.")
                number, kind = rest.split(".")
                stack = theirs[f"{layer}.experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"][int(number)]
                right = stack if kind == "down_proj" else stack.chunk(2)[kind == "up_proj"]
            else:
                right = theirs[f"{source}.weight"]
            assert torch.equal(values.to(right.dtype), right), source
            count += 1
    assert count > 30
    close(Runner(model).run(PROMPT), hf_logits(hf, PROMPT))


def test_what_is_left_is_listed_by_name(tmp_path: Path) -> None:
    path, out = written(tmp_path, **WHOLE), tmp_path / "out"
    rewrite.quantize_folder(str(path), out, scheme="fp8", ignore=["re:.*o_proj$"], progress=False)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    names = [f"model.layers.{i}.self_attn.o_proj" for i in range(2)]
    assert config == PUBLISHED | {"scale_fmt": "ue8m0", "modules_to_not_convert": names}
    tensors = load_file(out / "model.safetensors")
    assert not any("o_proj.weight_scale_inv" in name for name in tensors)
    model: Any = load_model(out, device="cpu", dtype="bfloat16", unpack=False, progress=False)
    assert torch.equal(model.decoder.layers[0].self_attn.o_proj.weight, tensors[f"{names[0]}.weight"])


def test_a_block_of_zeros_and_numbers_that_no_scale_holds() -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    weight[:128, 128:] = 0
    for has_powers in (True, False):
        ends, off, size = BlockRounding(has_powers).apply(weight)
        assert ends["weight_scale_inv"][0, 1] == 1
        assert not ends["weight"][:128, 128:].float().any()
        assert off < 0.002 * size
    weight[299, 199] = torch.inf
    with pytest.raises(ValueError, match="has an infinity or NaN"):
        BlockRounding(True).apply(weight)
