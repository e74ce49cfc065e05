"""whorl's generator under Monarch with torchstore, behind TorchTitan's own router, on a CPU.

Of TorchTitan 0.3.0 its RL package cannot be imported without vLLM; `without_vllm` leaves its __init__ out. Its trainer
and controller are not run.
"""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from trainer_environments import HERE, run

from whorl.engine.llm import LLM
from whorl.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.slow
PROMPTS = [[70, 71, 72, 73], list(range(60, 90))]
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("titan")


@pytest.fixture(scope="module")
def told(folder: Path) -> Any:
    return run("titan", folder, first=(HERE / "without_vllm",))


def engine(folder: Path) -> LLM:
    return LLM(folder / "model", device="cpu", dtype="float32", num_blocks=128, block_size=16, max_model_len=1024)


def expected(llm: LLM, **changes: Any) -> list[tuple[list[int], list[float]]]:
    params = {"temperature": 1.0, "max_tokens": 12, "seed": 3, "logprobs": 0} | changes
    outputs = llm.generate(PROMPTS, SamplingParams(**params), progress=False)
    return [(output.token_ids, [each.logprob for each in output.logprobs]) for output in outputs]


def said(answers: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    return [(answer["token_ids"], answer["token_logprobs"]) for answer in answers]


def test_every_step_samples_with_the_trainers_weights_bit_for_bit(told: Any, folder: Path) -> None:
    llm = engine(folder)
    for step in range(STEPS):
        if step:
            llm.update_weights(load_file(folder / f"{step}.safetensors").items())
        answers = told[f"step {step}"]
        assert said(answers) == expected(llm)
        assert [(each["min_policy_version"], each["max_policy_version"]) for each in answers] == [(step, step)] * 2
        assert [each["request_id"] for each in answers] == [f"step {step}/0", f"step {step}/1"]
        assert {each["finish_reason"] for each in answers} == {"length"}


def test_completions_and_metrics_are_torchtitans_own(told: Any) -> None:
    (answer, _) = told["step 0"]
    assert answer["class"] == "torchtitan.experiments.rl.types"
    names = ("inflight_requests_at_completion", "inter_token_latency_ms", "num_cached_tokens", "queue_time_ms")
    assert answer["metrics"] == [f"generator/{name}" for name in (*names, "time_to_first_token_ms")]


def test_weights_come_while_requests_run(told: Any, folder: Path) -> None:
    """They go on, and say which versions sampled them; later ones have the new weights alone."""
    for answer in told["spanning"]:
        assert (answer["min_policy_version"], answer["max_policy_version"]) == (STEPS - 1, STEPS)
        assert len(answer["token_ids"]) == len(answer["token_logprobs"]) == 120
    assert said(told["greedy"]) == expected(engine(folder), temperature=0.0)


def test_what_comes_too_early_or_too_late_fails(told: Any) -> None:
    assert "call start_engine_loop before generate and pull_model_state_dict" in told["early"]
    assert "the server is shutting down" in told["after"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensor_parallel", "generator.parallelism.tensor_parallel_degree is 2, and whorl's generator takes 1 alone"),
        ("prefix", "generator.reset_prefix_cache_on_weight_sync is False, and whorl's generator takes True alone"),
        ("sampling", "sampling.top_k is unknown, expected max_tokens, "),
    ],
)
def test_what_is_not_for_whorl_is_refused_by_name(told: Any, name: str, message: str) -> None:
    assert message in told["refused"][name]
