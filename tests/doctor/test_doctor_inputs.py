"""The doctor's readers, and what it says to input it cannot use."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.doctor import BadInput, check
from whorl.doctor.arguments import read_arguments
from whorl.doctor.command import run
from whorl.doctor.inputs import parse_overrides, read_inputs
from whorl.doctor.settings import parse_value

MODELS = Path(__file__).parent / "models"
EXAMPLES = Path(__file__).parents[2] / "examples"


def values(text: str, **options: Any) -> dict[str, Any]:
    return {s.key: s.value for s in read_arguments(text, "f", **options)}


SCRIPT = r"""
#!/bin/bash
SEQ=4096; TP=${TP:-4}
ARGS="
  --seq-length ${SEQ}  # --num-layers 9
  --micro-batch-size 2
"
MORE=(--rotary-base=1000000 --mrope-section 24 20 20)
export HCCL_ALGO='level0:ring'
torchrun --nproc_per_node 8 train.py $ARGS --tensor-model-parallel-size $TP "${MORE[@]}" --bf16 $EXTRA_ARGS \
  --use-fused-rotary-pos-emb --no-rope-fusion --position-embedding-type \
  rope
echo done
vllm serve --max-model-len 32768 Qwen/Qwen3-8B -tp 8
"""


def test_arguments_of_a_shell_script() -> None:
    assert values(SCRIPT) == {
        "TP": "4",
        "SEQ": "4096",
        "HCCL_ALGO": "level0:ring",
        "sequence_length": 32768,
        "micro_batch_size": 2,
        "rotary_base": 1000000,
        "mrope_section": [24, 20, 20],
        "nproc_per_node": 8,
        "tensor_parallel": 8,
        "bf16": True,
        "use_fused_rotary_pos_emb": True,
        "apply_rope_fusion": False,
        "position_embedding_type": "rope",
        "command": "vllm",
    }


def test_settings_know_their_line() -> None:
    where = {s.path: s.where for s in read_arguments(SCRIPT, "run.sh")}
    assert where["seq-length"] == "run.sh:5"
    assert where["position-embedding-type"] == "run.sh:11"


def test_one_argument_per_line() -> None:
    assert values("--position-embedding-type\nmrope\n--bf16\n", values_may_wrap=True) == {
        "position_embedding_type": "mrope",
        "bf16": True,
    }


def test_hydra_overrides_are_config() -> None:
    (setting,) = read_arguments("+actor.megatron.override.apply_rope_fusion=True", "run.sh")
    assert (setting.key, setting.value, setting.kind, setting.where) == (
        "apply_rope_fusion",
        True,
        "config",
        "run.sh:1",
    )


def test_values() -> None:
    texts = ("True", "1e6", "[24, 20, 20]", "None", "0x", "a")
    assert [parse_value(text) for text in texts] == [True, 1e6, [24, 20, 20], None, "0x", "a"]
    assert parse_overrides(["megatron_bridge=0.10", "a.b=1"]) == {"megatron_bridge": "0.10", "a.b": 1}


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from("-=ab0 \"'\\\\\n#${}():."), max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    read_arguments(text, "f")
    read_arguments(text, "f", values_may_wrap=True)
    parse_value(text)


def test_set_reaches_the_text_model_and_not_the_vision_tower() -> None:
    inputs = read_inputs(
        EXAMPLES / "qwen3_vl_fixed", {"hidden_size": 5120, "text_config.rope_scaling.mrope_section": [1]}
    )
    assert inputs.model is not None
    assert inputs.model["text_config"]["hidden_size"] == 5120
    assert inputs.model["text_config"]["rope_scaling"]["mrope_section"] == [1]
    assert inputs.model["vision_config"]["hidden_size"] == 1152


YARN = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'


@pytest.mark.parametrize("flag", [f"--hf-overrides '{{\"rope_scaling\": {YARN}}}'", f"--rope-scaling '{YARN}'"])
def test_vllm_overrides_change_the_model(flag: str, tmp_path: Path) -> None:
    shutil.copy(MODELS / "qwen3_8b.json", tmp_path / "config.json")
    (tmp_path / "serve.sh").write_text(f"vllm serve m --max-model-len 131072 {flag}")
    report = check(tmp_path)
    assert report.paths[0].branch == "YaRNScalingRotaryEmbedding"
    assert report.findings == ()


@pytest.mark.parametrize(
    ("line", "framework"),
    [
        ("whorl serve . --max-model-len 4096 --tp 2", "whorl"),
        (".venv/bin/whorl generate . -p hello", "whorl"),
        ("python -m whorl chat . --gpu-memory-utilization 0.8", "whorl"),
        ("whorl bench decode .", "whorl"),
        ("whorl train qwen3-8b --training.seq_len 4096", "torchtitan"),
        ("whorl doctor . && vllm serve m", "vllm"),
        ("whorl bench serve --url http://localhost:8000 & vllm serve m", "vllm"),
        ("whorl serve . & vllm bench serve", "whorl"),
        ("docker run image bash -lc 'whorl serve . --kv-cache-dtype fp8'", "whorl"),
        ('srun bash -c "vllm serve m --max-model-len 4096"', "vllm"),
        ("echo whorl", "hf"),
    ],
)
def test_whorl_s_own_commands_name_a_framework(line: str, framework: str, tmp_path: Path) -> None:
    shutil.copy(MODELS / "qwen3_8b.json", tmp_path / "config.json")
    (tmp_path / "run.sh").write_text(line)
    report = check(tmp_path)
    assert report.framework == framework
    assert framework == "hf" or "run.sh:1" in report.framework_because


def test_a_command_in_quotes_is_read(tmp_path: Path) -> None:
    shutil.copy(MODELS / "qwen3_8b.json", tmp_path / "config.json")
    script = 'srun --ntasks 1 bash -c "cd /x && vllm serve m --max-model-len 131072" --verbose\necho -c "--tp 3"\n'
    (tmp_path / "run.sh").write_text(script)
    (finding,) = check(tmp_path).findings
    assert (finding.code, finding.where) == ("table-too-short", "run.sh:1 (max-model-len)")


def test_a_folder_of_folders_names_those_to_give(tmp_path: Path) -> None:
    for name in ("scripts/serve/run.sh", "configs/config.yaml", ".git/hook.sh", "a/b/c/d/e/deep.sh", "weights/x.bin"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("vllm serve m")
    with pytest.raises(BadInput) as raised:
        check(tmp_path)
    folders = str(raised.value).partition("such as ")[2]
    assert folders == f"{tmp_path}/configs, {tmp_path}/scripts/serve"


def test_hugging_face_side_files_are_not_settings(tmp_path: Path) -> None:
    shutil.copy(MODELS / "qwen3_8b.json", tmp_path / "config.json")
    (tmp_path / "generation_config.json").write_text('{"max_model_len": 9}')
    (tmp_path / "merges.txt").write_text("a b\nc d\n")
    assert check(tmp_path).read == ("config.json",)


# Bad input teaches.


@pytest.mark.parametrize(
    ("arguments", "lesson"),
    [
        ({"path": "nowhere/Qwen3-8B"}, "; a Hugging Face model id is not downloaded"),
        ({"path": EXAMPLES / "qwen3_vl_fixed", "framework": "tensorrt"}, "choose one of megatron"),
        ({"path": EXAMPLES / "qwen3_vl_fixed", "device": "tpu"}, "choose one of cuda, npu"),
        ({"path": EXAMPLES / "qwen3_vl_fixed", "settings": ["mrope_section"]}, "write key=value"),
        ({"path": EXAMPLES / "qwen3_vl_fixed", "settings": ["rotary_operator=rope"]}, "choose one of torch"),
        ({"path": EXAMPLES / "qwen3_vl_fixed", "log": "nowhere.log"}, "cannot be read"),
        ({"path": EXAMPLES / "qwen3_vl_fixed", "trace": "nowhere.json"}, "(No such file or directory). Give a trace"),
        ({"path": EXAMPLES / "README.md"}, "holds no model config"),
        ({"path": None}, "give a file or folder"),
    ],
)
def test_bad_input(arguments: dict[str, Any], lesson: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(**arguments) == 2
    printed = capsys.readouterr()
    assert lesson in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("name", "content", "lesson"),
    [
        ("config.json", b"{", "is not valid JSON"),
        ("launch.yaml", b"a: 1\nb: [", "is not valid YAML: expected the node content.*: line 2 column 5"),
        ("launch.json", b"3", "expected a mapping"),
        ("model.args", b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_unreadable_files(name: str, content: bytes, lesson: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=lesson):
        check(tmp_path)


def test_bad_input_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("nowhere", as_json=True) == 2
    assert "no such file" in json.loads(capsys.readouterr().out)["error"]
