"""The real GRPOTrainer of TRL against a server with --rl: 20 steps, and not one log-probability with other bits.

It runs where the package is: pip install trl==1.16.0 into an environment that has this checkout with its extra `serve`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import python_path
from trainer import CONFIG, changed, engine, model, trainable_server, weights

from whorl import nn

pytest.importorskip("trl", reason="needs the package: pip install trl==1.16.0, in an environment of its own")

STEPS = 20
TARGET = ord("e")


def tokenizer() -> Any:
    from serving import byte_tokenizer
    from transformers import PreTrainedTokenizerFast

    ours = byte_tokenizer()
    return PreTrainedTokenizerFast(
        tokenizer_object=ours._backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )


def reward(completion_ids: list[list[int]], **more: Any) -> list[float]:
    """How many of the tokens are even."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def trained(tmp_path: Path, policy: Any, rollout: Any, **options: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 1,
        "disable_tqdm": True,
    }
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=reward,
        args=GRPOConfig(**settings | options),
        train_dataset=Dataset.from_dict({"prompt": [f"prompt {n}: " for n in range(40)]}),
        processing_class=tokenizer(),
        rollout_func=rollout,
    )
    return trainer


class Recomputed:
    """Counts, in TRL's own tensors, where the sampled log-probabilities are not those of the first training forward."""

    def __init__(self, trainer: Any) -> None:
        self.num_tokens = self.num_mismatches = 0
        self.largest = 0.0
        compute = trainer._compute_loss

        def counted(policy: Any, inputs: dict[str, Any]) -> Any:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            with torch.no_grad():
                length = inputs["completion_ids"].shape[1]
                values, _, _ = trainer._get_per_token_logps_and_entropies(policy, ids, mask, length)
            sampled, is_token = inputs["sampling_per_token_logps"], inputs["completion_mask"].bool()
            difference = (values - sampled)[is_token]
            self.num_tokens += int(is_token.sum())
            self.num_mismatches += int((difference != 0).sum())
            self.largest = max(self.largest, float(difference.abs().max()))
            return compute(policy, inputs)

        trainer._compute_loss = counted


@pytest.mark.parametrize("transfer", ["shm", "gloo"])
def test_20_steps_without_a_mismatch(tmp_path: Path, transfer: Any) -> None:
    from transformers import Qwen3Config

    from whorl.rl.trl import exact_model, rollout

    policy = exact_model(model(), Qwen3Config(**CONFIG))
    with trainable_server(engine(), weight_transfer_config=f'{{"backend": "{transfer}"}}') as served:
        sample = rollout(served.url, transfer=transfer)
        trainer = trained(tmp_path, policy, sample)
        recomputed = Recomputed(trainer)
        trainer.train()
        assert trainer.state.global_step == sample.num_syncs == STEPS
        assert served.llm.weight_version == f"step {STEPS - 1}"
    assert recomputed.num_tokens > STEPS * 8
    assert (recomputed.num_mismatches, recomputed.largest) == (0, 0.0)
    assert sample.num_logprobs >= recomputed.num_tokens
    assert sample.num_mismatches == 0


def test_a_temperature_needs_the_processed_form_and_then_has_equal_bits(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    from whorl.rl.trl import exact_model, rollout

    policy = exact_model(model(), Qwen3Config(**CONFIG))
    with trainable_server(engine()) as served, pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
        trained(tmp_path, policy, rollout(served.url, transfer="gloo"), temperature=0.7).train()
    with trainable_server(engine(logprobs_mode="processed_logprobs")) as served:
        sample = rollout(served.url, transfer="gloo")
        trainer = trained(tmp_path, policy, sample, temperature=0.7, max_steps=3)
        recomputed = Recomputed(trainer)
        trainer.train()
    assert (recomputed.num_mismatches, sample.num_mismatches) == (0, 0)
    assert recomputed.num_tokens > 24


def test_transformers_own_model_trains_as_well_with_other_bits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    from whorl.rl.trl import rollout

    policy = AutoModelForCausalLM.from_config(Qwen3Config(**CONFIG))
    policy.load_state_dict(weights(), strict=False)
    with trainable_server(engine()) as served:
        sample = rollout(served.url, transfer="gloo")
        trainer = trained(tmp_path, policy, sample, max_steps=3)
        recomputed = Recomputed(trainer)
        trainer.train()
        assert sample.num_syncs == 3
    assert 0 < recomputed.num_mismatches <= recomputed.num_tokens
    assert recomputed.largest < 1e-4


def test_trls_own_clients_unchanged() -> None:
    """The client of GRPO's server mode and that of AsyncGRPO, with a double of vLLM for the sender's side."""
    here = Path(__file__).parent
    path = python_path(here / "double", here, here.parent / "helpers", here.parents[1])
    with trainable_server(engine(), max_logprobs=-1) as served:
        command = [sys.executable, str(here / "use_trl_clients.py"), served.url]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path}, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        told = json.loads(done.stdout.splitlines()[-1])
        classic, asynchronous = told["classic"], told["async"]
        assert classic["world_size"] == 1
        assert classic["before"]["prompt_ids"] == [[70, 71, 72], [73, 74]]
        assert [len(ids) for ids in classic["before"]["completion_ids"]] == [5] * 4
        assert classic["before"] == classic["again"] != classic["after"]
        for answer in (classic["before"], classic["after"]):
            for ids, named in zip(answer["completion_ids"], answer["logprob_token_ids"], strict=True):
                assert [[token] for token in ids] == named
        assert bytes(classic["regex"]["completion_ids"][0][:3]).decode("latin-1")
        assert all(len(entries) >= 2 for entries in classic["chat"]["logprobs"][0])
        assert [len(entries) for entries in classic["teacher"]["logprobs"][0]] == [5, 5]
        assert asynchronous == {"max_model_len": served.llm.max_model_len, "dtype": "torch.float32", "lora": None}
        assert served.llm.control.num_updates == 3
        expected = changed(weights(), 6)
        for name, place in nn.destinations(served.llm.model).items():  # type: ignore[arg-type]
            assert torch.equal(place.into, expected[name])
