"""The doctor: golden reports of whole launches, readers, logs, traces, live models, exit codes.

`python tests/doctor/test_doctor.py` writes golden/ anew; read the difference before keeping it.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import whorl.doctor.checks.sides  # noqa: F401  (fills PAIR_RULES)
from whorl.doctor import check
from whorl.doctor.command import run
from whorl.doctor.pair import PAIR_RULES
from whorl.doctor.report import Finding
from whorl.doctor.rules import RULES, rule
from whorl.doctor.symptoms import SYMPTOMS

HERE = Path(__file__).parent
EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = Path(__file__).parents[2]
REQUIRED = [
    "rope-branch-mismatch",
    "fused-rope-needs-rope",
    "rope-fusion-with-mrope",
    "mrope-section-sum",
    "mrope-section-not-fused",
    "mrope-interleaved-range",
    "rotary-mode-cache-mode-mixed",
    "no-gradient",
    "in-place-under-compile",
    "static-cos-sin",
    "partial-rotary",
    "yarn-factor-ignored",
    "table-too-short",
    "indexer-style",
    "low-precision-angles",
    "kv-heads-tp",
    "mrope-batch-unfused",
    "positions-not-contiguous",
    "config-overrides-argument",
    "hccl-algorithm",
]
CASES: dict[str, dict[str, Any]] = {
    name: case
    for file in ("cases.yaml", "real_launches.yaml", "threads.yaml")
    for name, case in yaml.safe_load((HERE / file).read_text()).items()
}
THREADS = {name: case for name, case in CASES.items() if "right" in case}
# Notes that are true with and without the fault of a thread.
BESIDE = ("mrope-section-not-fused", "quantised-product", "model-not-given")
CASES |= {
    f"{name}_right": case | case["right"] | {"codes": [code for code in case["codes"] if code in BESIDE]}
    for name, case in THREADS.items()
}


def lay_out(case: dict[str, Any], folder: Path) -> Path:
    """Write a case's files; a file of its own name keeps `where` the same on every machine."""
    if "model" in case:
        shutil.copy(HERE / "models" / f"{case['model']}.json", folder / "config.json")
    for name, text in case.get("files", {}).items():
        (folder / name).write_text(text)
    return folder


def report_of(name: str, folder: Path) -> dict[str, Any]:
    return check(lay_out(CASES[name], folder), **CASES[name].get("options", {})).to_dict()


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, tmp_path: Path) -> None:
    report = report_of(name, tmp_path)
    assert [finding["code"] for finding in report["findings"]] == CASES[name]["codes"]
    assert report == json.loads((HERE / "golden" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", [name for name in CASES if "rotary_operator" not in str(CASES[name])])
def test_every_path_says_why_not_another(name: str, tmp_path: Path) -> None:
    for path in report_of(name, tmp_path)["paths"]:
        assert path["passed_over"]
        assert path["operator"] not in [other["operator"] for other in path["passed_over"]]


@pytest.mark.parametrize("name", THREADS)
def test_the_fault_of_a_thread_and_its_cure(name: str) -> None:
    thread = THREADS[name]
    assert thread["source"].startswith("https://github.com/")
    assert thread["versions"]
    assert set(thread["codes"]) - set(BESIDE)


def test_enough_cases_and_healthy_ones() -> None:
    healthy = [name for name, case in CASES.items() if not case["codes"]]
    assert len(CASES) >= 25
    assert len(healthy) >= 10
    assert {path.stem for path in (HERE / "golden").glob("*.json")} == set(CASES)


def test_every_rule_fires_in_some_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fired: set[str] = set()

    def watch(function: Any) -> Any:
        def watched(launch: Any, path: Any) -> Any:
            for finding in function(launch, path):
                fired.add(function.__name__)
                yield finding

        return watched

    rules = [replace(item, function=watch(item.function)) for item in RULES]
    monkeypatch.setattr("whorl.doctor.checkup.RULES", rules)
    for name in CASES:
        (tmp_path / name).mkdir()
        report_of(name, tmp_path / name)
    assert {item.function.__name__ for item in RULES} - fired == set()


def test_required_codes_exist_and_every_code_is_documented() -> None:
    sources = [*(ROOT / "whorl" / "doctor").rglob("*.py")]
    written = {code for file in sources for code in re.findall(r'"([a-z]+(?:-[a-z0-9]+)+)",? *"?', file.read_text())}
    codes = {item.code for item in RULES} | {symptom.code for symptom in SYMPTOMS}
    codes |= {code for code, _ in PAIR_RULES}
    codes |= {"trace-disagrees", "trace-without-rotary", "log-not-recognised", "position-ids-shape", "packed-positions"}
    documented = re.findall(r"^\| `([a-z0-9-]+)` \|", (ROOT / "docs" / "doctor.md").read_text(), re.MULTILINE)
    assert set(REQUIRED) <= codes
    assert len(REQUIRED) == 20
    assert codes <= written
    assert sorted(documented) == sorted(codes)


def test_adding_a_check_is_one_function() -> None:
    @rule("only-here", "note")
    def added(launch: Any, path: Any) -> Any:
        yield Finding(where="w", found=path.operator, expected="e", why="y", fix=("f",))

    try:
        report = check(EXAMPLES / "qwen3_vl_fixed")
    finally:
        RULES.pop()
    assert [(f.code, f.found) for f in report.findings] == [("only-here", "torch")]
    assert report.exit_code == 0


# The example of the failing launch, step by step to the healthy one.


def codes(report: Any) -> list[str]:
    return [finding.code for finding in report.findings]


def test_failing_example_names_the_settings() -> None:
    report = check(EXAMPLES / "qwen3_vl_rope_branch")
    (finding,) = report.findings
    assert (finding.code, finding.severity, report.exit_code) == ("rope-branch-mismatch", "error", 1)
    assert finding.fix[:3] == ("position_embedding_type=mrope", "mrope_section=[24, 20, 20]", "apply_rope_fusion=False")
    assert "use_fused_rotary_pos_emb off" in finding.fix[3]
    assert "launch.sh:12" in finding.where
    assert "AttributeError" in finding.why
    assert "here it is 0.4.0, so the former" in finding.why


def test_bridge_0_5_fails_later() -> None:
    report = check(EXAMPLES / "qwen3_vl_rope_branch", settings={"megatron_bridge": "0.5.0"})
    assert "here it is 0.5.0, so the latter" in report.findings[0].why


def test_the_fixes_mend_the_example() -> None:
    folder = EXAMPLES / "qwen3_vl_rope_branch"
    branch = {"position_embedding_type": "mrope"}
    assert codes(check(folder, settings=branch)) == ["fused-rope-needs-rope"]
    fused = {"use_fused_rotary_pos_emb": False, "apply_rope_fusion": True}
    assert codes(check(folder, settings=branch | fused)) == ["rope-fusion-with-mrope"]
    assert codes(check(folder, settings=branch | fused | {"apply_rope_fusion": False})) == []
    assert codes(check(EXAMPLES / "qwen3_vl_fixed")) == []


@pytest.mark.parametrize("framework", ["megatron", "mindspeed", "bridge"])
def test_failing_example_by_any_megatron_name(framework: str) -> None:
    report = check(EXAMPLES / "qwen3_vl_rope_branch", framework=framework)
    assert codes(report) == ["rope-branch-mismatch"]
    assert report.framework_because == "set by --framework"


ASCEND = {
    "ascend_torchair": "torch",
    "ascend_torchair_deepseek": "npu_interleave_rope",
    "ascend_own_operator": "ascend_rotary_embedding",
    "ascend_own_operator_not_compiled": "_npu_rotary_embedding",
    "ascend_0_10_deepseek": "_npu_rotary_embedding",
    "ascend_0_10_deepseek_float16": "ascend_rotary_embedding",
    "ascend_0_10_310p": "_npu_rotary_embedding",
    "ascend_310p_mrope": "npu_apply_rotary_pos_emb",
    "ascend_310p_half_of_a_head": "npu_apply_rotary_pos_emb",
    "ascend_310p_other_heads": "_npu_rotary_embedding",
}


@pytest.mark.parametrize("name", ASCEND)
def test_branches_of_vllm_ascend(name: str, tmp_path: Path) -> None:
    (path,) = report_of(name, tmp_path)["paths"]
    assert (path["runs_in"], path["operator"]) == ("vllm-ascend", ASCEND[name])


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_torchair_s_qwen_looks_cos_and_sin_up_once(model_type: str, tmp_path: Path) -> None:
    values = json.loads((HERE / "models" / "qwen3_8b.json").read_text()) | {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = {"additional_config": {"torchair_graph_config": {"enabled": True}}, "vllm_ascend": "0.10.1"}
    (path,) = check(tmp_path, framework="vllm-ascend", settings=config).paths
    assert (path.operator, path.passed_over[0][0]) == ("npu_apply_rotary_pos_emb", "_npu_rotary_embedding")
    newer = check(tmp_path, framework="vllm-ascend", settings=config | {"vllm_ascend": "0.13.0"}).paths[0]
    assert newer.operator == "triton_rope"


CLASSES = {
    "NTKScalingRotaryEmbedding": {"rope_type": "ntk", "factor": 4.0, "mixed_b": 0.7},
    "DynamicNTKAlphaRotaryEmbedding": {"rope_type": "dynamic", "alpha": 1000.0},
    "DynamicNTKScalingRotaryEmbedding": {"rope_type": "dynamic", "factor": 4.0},
    "TeleChat3RoPEScaledRotaryEmbedding": {"rope_type": "telechat3-yarn", "factor": 4.0},
    "DeepseekScalingRotaryEmbedding": {"rope_type": "deepseek_llama_scaling", "factor": 4.0},
    "MRotaryEmbeddingInterleaved": {
        "rope_type": "openpangu", "mrope_section": [24, 20, 20], "mrope_interleaved": True,
    },
    "FourierRotaryEmbedding": {"rope_type": "default", "use_fope": True, "num_inv_freq": 24},
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_get_rope(name: str, tmp_path: Path) -> None:
    values = json.loads((HERE / "models" / "qwen3_8b.json").read_text()) | {"rope_scaling": CLASSES[name]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    report = check(tmp_path, framework="vllm")
    assert report.paths[0].branch == name
    assert not report.failed
    expected = ["rope-config-unread"] if name == "FourierRotaryEmbedding" else []
    assert [code for code in codes(report) if code != "rope-key-ignored"] == expected
    if expected:
        assert "cos_coef and sin_coef of the checkpoint" in report.findings[0].found


def test_vllm_ascend_is_vllm_on_an_npu() -> None:
    report = check(HERE / "models" / "qwen3_vl_8b.json", framework="vllm-ascend")
    assert (report.framework, report.device, report.paths[0].runs_in) == ("vllm", "npu", "vllm-ascend")


@pytest.mark.parametrize(
    ("model", "change", "reason"),
    [
        ("gemma3_27b", {}, "Gemma3ForConditionalGeneration needs SigLIP's vision tower"),
        ("qwen3_8b", {"architectures": ["SpiralForCausalLM"]}, "known are DeepseekV32ForCausalLM"),
        ("qwen3_8b", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3_8b", {"num_key_value_heads": 5}, "a multiple of"),
        ("qwen3_8b", {}, None),
    ],
)
def test_what_whorl_s_engine_refuses_is_an_error(
    model: str, change: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    values = json.loads((HERE / "models" / f"{model}.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    refusals = [f.found for f in check(tmp_path, framework="whorl").findings if f.code == "engine-refuses"]
    assert len(refusals) == (reason is not None)
    assert reason is None or reason in refusals[0]


def test_inference_of_framework_and_device_is_said() -> None:
    report = check(EXAMPLES / "qwen3_vl_fixed")
    assert report.framework_because == "inferred from megatron_bridge in requirements.txt:1"
    assert report.device_because.startswith("inferred from HCCL_ALGO")


EXIT_CODES = {
    "qwen3_vl_rope_branch": 1,
    "qwen3_vl_fixed": 0,
    "qwen3_30b_mindspeed": 0,
    "qwen2_5_vl_vllm_ascend": 0,
    "glm4_vllm_ascend_atb": 1,
    "verl_qwen2_5_vl": 1,
    "logs/qwen3_vl_bridge_0_4.log": 1,
}


@pytest.mark.parametrize("name", EXIT_CODES)
def test_examples_exit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(EXAMPLES / name, as_json=True) == EXIT_CODES[name]
    assert json.loads(capsys.readouterr().out)["exit_code"] == EXIT_CODES[name]
    assert f"`{name}`" in (EXAMPLES / "README.md").read_text()


# Transformers' own configurations are healthy by definition.

MODELS = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "glm",
    "glm4",
    "phi",
    "phi3",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "gpt_oss",
    "gptj",
    "gpt_neox",
    "cohere",
    "olmo2",
    "smollm3",
]


def findings_of_default(name: str, folder: Path, **options: Any) -> list[tuple[str, str]]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    (folder / "config.json").write_text(CONFIG_MAPPING[name]().to_json_string(use_diff=False))
    return [(f.code, f.found) for f in check(folder, **options).findings if f.severity != "note"]


@pytest.mark.parametrize("name", MODELS)
def test_transformers_defaults_raise_no_alarm(name: str, tmp_path: Path) -> None:
    for framework in ("hf", "vllm", "bridge"):
        assert findings_of_default(name, tmp_path, framework=framework) == []


@pytest.mark.slow
def test_no_transformers_config_raises_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # one config looks for its backbone
    alarms, read = {}, 0
    for name in CONFIG_MAPPING:
        try:
            text = CONFIG_MAPPING[name]().to_json_string(use_diff=False)
        except Exception:
            continue  # not built without arguments, packages or files of its own; `read` counts the others
        if '"rope_parameters"' in text:
            read += 1
            alarms[name] = findings_of_default(name, tmp_path)
    assert read > 250
    assert {name: findings for name, findings in alarms.items() if findings} == {}


# Output.


def test_plain_output_has_the_path_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(EXAMPLES / "qwen3_vl_rope_branch") == 1
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert text.index("Rotary path (train, bridge)") < text.index("error: rope-branch-mismatch") < text.index("fix ")


def test_terminal_output_is_styled(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    run(EXAMPLES / "qwen3_vl_rope_branch")
    text = capsys.readouterr().out
    assert "\x1b[1;31merror: rope-branch-mismatch" in text
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in text.splitlines()) <= 100


def test_json_keys_are_stable(capsys: pytest.CaptureFixture[str]) -> None:
    run(EXAMPLES / "qwen3_vl_rope_branch", as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [
        "schema", "framework", "device", "train", "model", "read", "paths", "findings", "ran", "exit_code",
    ]  # fmt: skip
    assert list(report["findings"][0]) == ["code", "severity", "where", "found", "expected", "why", "fix"]
    assert set(report["paths"][0]) >= {"branch", "operator", "style", "layout", "device", "because", "passed_over"}


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "torch_npu", "triton", "transformers", "megatron", "fastapi"}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
import whorl.doctor
from whorl.doctor.command import run
code = run(sys.argv[1], log=sys.argv[2])
assert not any(name.split(".")[0] == "torch" for name in sys.modules)
sys.exit(code)
"""


def test_works_where_torch_is_not_installed() -> None:
    arguments = [EXAMPLES / "qwen3_vl_rope_branch", EXAMPLES / "logs" / "qwen3_vl_bridge_0_4.log"]
    done = subprocess.run([sys.executable, "-c", BLOCK, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("rope-branch-mismatch") == 2


def write_golden() -> None:
    for file in (HERE / "golden").glob("*.json"):
        file.unlink()
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            text = json.dumps(report_of(name, Path(folder)), indent=2)
        (HERE / "golden" / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    write_golden()
