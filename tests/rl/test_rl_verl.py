"""The real verl 0.9.1 with whorl as its rollout, on Ray, whose GPUs are a resource of that name on a CPU.

verl is not in the tests' own environment. Its trainer of PPO needs a GPU for each worker and is not run.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoints
from safetensors.torch import load_file, save_file
from serving import byte_tokenizer
from trainer import CONFIG, changed
from trainer_environments import environment, run, write_metadata

from whorl.engine.llm import LLM
from whorl.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.slow
PROMPTS = [[70, 71, 72, 73], list(range(60, 90))]
CODE = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def write(folder: Path) -> None:
    """The model, with what transformers needs of a tokenizer, and the weights of two steps of a trainer."""
    path = write_checkpoints(folder, {"model": CONFIG})["model"]
    byte_tokenizer()._backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(CODE))
    (folder / "steps").mkdir()
    for step in (1, 2):
        save_file(changed(load_file(path / "model.safetensors"), step), folder / "steps" / f"{step}.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    write(folder)
    return folder


@pytest.fixture(scope="module", params=["shm", "gloo"])
def told(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    metadata = tmp_path_factory.mktemp("metadata")
    write_metadata(metadata, environment("verl"))
    return run("verl", folder, request.param, first=(metadata,), RAY_TMPDIR=str(tmp_path_factory.mktemp("r")))


def expected(folder: Path, step: int | None, **changes: Any) -> list[tuple[list[int], list[float]]]:
    """What one engine without verl says, whose weights are those of a step."""
    llm = LLM(folder / "model", device="cpu", dtype="float32", num_blocks=64, block_size=8, tp_segments=2)
    if step is not None:
        llm.update_weights(load_file(folder / "steps" / f"{step}.safetensors").items())
    params = {"temperature": 1.0, "max_tokens": 12, "seed": 3, "ignore_eos": True, "logprobs": 0} | changes
    outputs = llm.generate(PROMPTS, SamplingParams(**params), progress=False)
    return [(output.token_ids, [each.logprob for each in output.logprobs]) for output in outputs]


def said(answers: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    return [(answer["token_ids"], answer["log_probs"]) for answer in answers]


def test_verl_finds_the_plug_in(told: Any) -> None:
    """verl hides the exception of a plug-in that fails, so that its registry is what counts."""
    assert told["class"] == "<class 'whorl.rl.verl.Rollout'>"
    assert told["replica"] == "<class 'whorl.rl.verl.Replica'>"


def test_every_step_samples_with_the_trainers_weights_bit_for_bit(told: Any, folder: Path) -> None:
    """Through verl's own server manager, client and checkpoint manager, with sleep and wake between the steps."""
    hybrid = told["hybrid"]
    assert said(hybrid["start"]) == expected(folder, None)
    for step in (1, 2):
        answers = hybrid[f"step {step}"]
        assert said(answers) == expected(folder, step)
        assert [answer["stop_reason"] for answer in answers] == ["completed"] * 2
        for answer in answers:
            steps = {name: answer["extra_fields"][f"{name}global_steps"] for name in ("", "min_", "max_")}
            assert set(steps.values()) == {step}
    assert said(hybrid["greedy"]) == expected(folder, 2, temperature=0.0)


def test_the_cache_is_released_for_a_sync(told: Any, folder: Path) -> None:
    num = len(load_file(folder / "steps" / "1.safetensors"))
    assert told["hybrid"]["sent"] == [num, num]  # each worker of the replica takes part in gathering
    assert said(told["hybrid"]["again"]) == expected(folder, 1)


def test_abort_parks_or_rejects_what_comes_later(told: Any) -> None:
    interrupted = told["hybrid"]["interrupted"]
    aborted = interrupted["aborted"]
    assert aborted["stop_reason"] == "aborted"
    assert 0 < len(aborted["token_ids"]) == len(aborted["log_probs"]) < 500
    assert interrupted["waits"] is True
    assert (interrupted["rejected"]["token_ids"], interrupted["rejected"]["stop_reason"]) == ([], "aborted")
    assert (len(interrupted["parked"]["token_ids"]), interrupted["parked"]["stop_reason"]) == (4, "completed")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flush", "wire_format 'delta_flush' is not for whorl"),
        ("adapter", "set model.lora.merge to True"),
        ("parameter", "sampling parameter 'beam_width' is unknown, expected frequency_penalty, "),
        ("n", "sampling parameter n is 2, expected 1"),
        ("picture", "image_data is not for whorl: its rollout takes text only"),
    ],
)
def test_what_is_not_for_whorl_is_refused_by_name(told: Any, name: str, message: str) -> None:
    assert message in told["hybrid"][name]


def test_a_server_with_devices_of_its_own(told: Any, folder: Path) -> None:
    assert told["standalone"]["workers"] == 1
    assert said(told["standalone"]["answers"]) == expected(folder, None)
