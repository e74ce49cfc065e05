"""A trainer against its rollout: what both compute, each difference and its cure, five pairs of launches as examples.

`python tests/doctor/test_sides.py` writes golden_sides/ anew; read the difference before keeping it.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import whorl.doctor.checks.sides  # noqa: F401  (fills PAIR_RULES)
from whorl.doctor import BadInput, Report, check_pair
from whorl.doctor.command import run
from whorl.doctor.pair import PAIR_RULES

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "both_sides"
CASES: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "sides.yaml").read_text())
CODES = {code for code, _ in PAIR_RULES}


def compare(case: dict[str, Any], folder: Path) -> Report:
    """Write the files of a case and compare both sides."""
    places: dict[str, Path] = {}
    for side in ("trainer", "rollout"):
        for name, text in case.get(side, {}).items():
            places[side] = folder / side / name
            places[side].parent.mkdir(parents=True, exist_ok=True)
            places[side].write_text(text)
    shutil.copy(HERE / "models" / f"{case['model']}.json", folder / "config.json")
    return check_pair(places["trainer"], places.get("rollout"), model=folder / "config.json")


def differences(report: Report) -> list[str]:
    return [finding.code for finding in report.findings if finding.code in CODES]


@pytest.mark.parametrize("name", CASES)
def test_a_difference_is_named_and_mended(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    report = compare(case, tmp_path / "wrong")
    assert differences(report) == case["codes"]
    severities = [finding.severity for finding in report.findings if finding.code == case["codes"][0]]
    assert severities[0] == case["severity"]
    right = compare(case | case["right"], tmp_path / "right")
    assert len(differences(right)) < len(case["codes"])
    assert case["codes"][0] not in differences(right)


def test_every_difference_has_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fired: set[str] = set()

    def watched(function: Any) -> Any:
        def watch(pair: Any) -> Any:
            for finding in function(pair):
                fired.add(function.__name__)
                yield finding

        return watch

    monkeypatch.setattr("whorl.doctor.compare.PAIR_RULES", [(code, watched(check)) for code, check in PAIR_RULES])
    for name, case in CASES.items():
        compare(case, tmp_path / name)
    assert {check.__name__ for _, check in PAIR_RULES} - fired == set()


# Five pairs of launches: the files, the codes beside notes, and settings that mend them.
PAIRS: dict[str, tuple[tuple[str, ...], list[str], dict[str, Any]]] = {
    "verl": (("run.sh",), ["logprobs-mean-different-things"], {"actor_rollout_ref.rollout.top_p": 1.0}),
    "slime": (("run.sh",), ["rollout-quantised"], {"use_tis": True}),
    "nemo_rl": (("grpo.yaml",), ["stale-prefix-cache"], {"recompute_kv_cache_after_weight_updates": True}),
    "trl": (
        ("train.sh", "serve.sh"),
        ["batch-invariance", "logprobs-mean-different-things"],
        {"logprobs_mode": "processed_logprobs", "attention_backend": "TRITON_ATTN"},
    ),
    "prime_rl": (
        ("rl.toml",),
        ["replay-with-offload"],
        {"trainer.enable_router_replay": False, "inference.vllm.enable_return_routed_experts": False},
    ),
}


def example(name: str, **settings: Any) -> Report:
    files = [EXAMPLES / name / file for file in PAIRS[name][0]]
    return check_pair(*files, model=EXAMPLES / name / "config.json", settings=settings)


@pytest.mark.parametrize("name", PAIRS)
def test_examples_say_what_will_differ(name: str) -> None:
    report = example(name)
    assert [finding.code for finding in report.findings if finding.severity != "note"] == PAIRS[name][1]
    assert report.to_dict() == json.loads((HERE / "golden_sides" / f"{name}.json").read_text())
    assert f"`both_sides/{name}`" in (ROOT / "examples" / "README.md").read_text()


@pytest.mark.parametrize("name", PAIRS)
def test_the_fix_mends_an_example(name: str) -> None:
    assert not example(name, **PAIRS[name][2]).failed


def test_a_fact_is_of_the_side_that_sets_it() -> None:
    sides = {aspect.name: aspect for aspect in example("slime").sides}
    assert sides["rotary base"].trainer == "1e+06 (qwen3-30B-A3B.sh:4 (rotary-base))"
    assert sides["router"].agrees is False
    assert sides["cos and sin"].agrees is True
    assert sides["prompts"].agrees is None


def test_a_rollout_of_our_own_promises_by_itself(tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text("whorl serve m --tp 2")
    (tmp_path / "train.sh").write_text("whorl train run.toml --parallelism.tensor_parallel_degree 2")
    shutil.copy(HERE / "models" / "qwen3_8b.json", tmp_path / "config.json")
    report = check_pair(tmp_path / "train.sh", tmp_path / "serve.sh", model=tmp_path / "config.json")
    sides = {aspect.name: aspect for aspect in report.sides}
    assert report.framework == "torchtitan trains, whorl generates"
    assert sides["batch invariance"].rollout == "yes (always)"


@pytest.mark.parametrize(
    ("files", "lesson"),
    [
        ({"trainer": "trl/serve.sh"}, "trains nothing"),
        ({"trainer": "slime/models/qwen3-30B-A3B.sh"}, "starts no rollout"),
        ({"trainer": "trl/train.sh", "rollout": "nothing.sh"}, "no such file"),
        ({"trainer": "slime/run.sh", "rollout": "slime/models/qwen3-30B-A3B.sh"}, "serves no model"),
    ],
)
def test_what_cannot_be_compared_is_said(files: dict[str, str], lesson: str) -> None:
    with pytest.raises(BadInput, match=lesson):
        check_pair(**{side: EXAMPLES / name for side, name in files.items()})  # type: ignore[arg-type]


def test_two_models_of_one_training_are_read(tmp_path: Path) -> None:
    for side, model in (("trainer", "qwen3_8b"), ("rollout", "qwen3_8b_yarn")):
        (tmp_path / side).mkdir()
        shutil.copy(HERE / "models" / f"{model}.json", tmp_path / side / "config.json")
    (tmp_path / "trainer" / "run.sh").write_text("trl grpo --use_vllm --vllm_mode server --dtype bfloat16")
    (tmp_path / "rollout" / "serve.sh").write_text("vllm serve m --logprobs-mode processed_logprobs")
    report = check_pair(tmp_path / "trainer", tmp_path / "rollout")
    assert differences(report) == ["sides-rotate-differently"]
    assert "yarn x4 in the rollout" in report.findings[0].found


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    trl = EXAMPLES / "trl"
    arguments: dict[str, Any] = {"trainer": trl / "train.sh", "rollout": trl / "serve.sh"}
    assert run(trl / "config.json", **arguments) == 1
    text = capsys.readouterr().out
    assert "! activations\n  trainer    bf16, residuals in fp32" in text
    assert "warning: logprobs-mean-different-things" in text
    assert run(trl / "config.json", **arguments, as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert {"name", "trainer", "rollout", "agrees"} == set(report["sides"][0])
    assert run(None, rollout=trl / "serve.sh") == 2
    assert "--rollout needs --trainer" in capsys.readouterr().err


BLOCK = """
import sys
sys.modules["torch"] = None
from whorl.doctor.command import run
sys.exit(run(sys.argv[1], trainer=sys.argv[2]))
"""


def test_works_where_torch_is_not_installed() -> None:
    arguments = [EXAMPLES / "slime" / "config.json", EXAMPLES / "slime" / "run.sh"]
    done = subprocess.run([sys.executable, "-c", BLOCK, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert "rollout-quantised" in done.stdout


def write_golden() -> None:
    (HERE / "golden_sides").mkdir(exist_ok=True)
    for name in PAIRS:
        text = json.dumps(example(name).to_dict(), indent=2)
        (HERE / "golden_sides" / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    write_golden()
