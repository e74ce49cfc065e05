"""The rotary path of the families of 2026 in vLLM, SGLang, on Ascend and in Megatron Bridge."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from whorl.doctor import check
from whorl.doctor.build_launch import build_launch
from whorl.doctor.inputs import read_inputs

HERE = Path(__file__).parent
FAMILIES: dict[str, dict[str, list[Any]]] = yaml.safe_load((HERE / "families.yaml").read_text())
ENGINES = {"sglang-npu": ("sglang", "npu"), "vllm-ascend": ("vllm", "npu"), "mindspeed-mm": ("mindspeed-mm", "npu")}
ROWS = [(model, engine) for model, row in FAMILIES.items() for engine in row if engine != "rotates"]


def model_file(name: str) -> Path:
    return HERE / "models" / f"{name}.json"


@pytest.mark.parametrize(("model", "engine"), ROWS)
def test_the_path_of_a_family(model: str, engine: str) -> None:
    framework, device = ENGINES.get(engine, (engine, "cuda"))
    (path,) = check(model_file(model), framework=framework, device=device).paths
    assert [path.branch, path.operator] == FAMILIES[model][engine]
    assert [path.style, path.layout] == FAMILIES[model]["rotates"][:2]


@pytest.mark.parametrize("model", FAMILIES)
def test_what_a_family_rotates(model: str) -> None:
    rope = build_launch(read_inputs(model_file(model)), framework="hf", train=False, device=None).rope
    assert rope is not None
    assert [rope.style, rope.layout, rope.rotary_dim, rope.head_dim] == FAMILIES[model]["rotates"]


def test_a_text_model_with_sections_is_right_in_the_rope_branch(tmp_path: Path) -> None:
    values = json.loads(model_file("qwen3_5_moe").read_text())["text_config"]
    text = values | {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(text))
    report = check(tmp_path, framework="bridge")
    assert (report.paths[0].branch, report.failed) == ("rope", False)
    assert not check(tmp_path, framework="bridge", settings={"position_embedding_type": "rope"}).failed
    assert not check(tmp_path, framework="sglang").failed


def test_transformer_engine_cannot_apply_the_factor_of_gpt_oss() -> None:
    fused = {"apply_rope_fusion": True}
    (path,) = check(model_file("gpt_oss_20b"), framework="bridge", settings=fused).paths
    assert (path.operator, path.passed_over[0][0]) == ("torch", "te_fused_rope")
    assert "1.347" in path.passed_over[0][1]
