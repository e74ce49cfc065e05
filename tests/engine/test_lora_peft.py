"""Adapters that PEFT itself writes, against the model that PEFT merges them into; skipped without the package."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from one_sequence import close

from whorl.engine.llm import LLM
from whorl.engine.lora import read_adapter
from whorl.engine.lora.config import IGNORED, REFUSED, SERVED
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import load_model
from whorl.models.qwen3 import Qwen3

PROMPT = [(7 * i + 3) % 89 + 1 for i in range(21)]
# The fields of LoraConfig in PEFT 0.21.2, for machines without it.
FIELDS = [
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "r",
    "target_modules",
    "exclude_modules",
    "lora_alpha",
    "lora_dropout",
    "fan_in_fan_out",
    "bias",
    "use_rslora",
    "modules_to_save",
    "init_lora_weights",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "megatron_config",
    "megatron_core",
    "trainable_token_indices",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "use_dora",
    "velora_config",
    "alora_invocation_tokens",
    "use_qalora",
    "qalora_group_size",
    "monteclora_config",
    "layer_replication",
    "runtime_config",
    "lora_bias",
    "target_parameters",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "ensure_weight_tying",
]


def test_every_field_is_served_ignored_or_refused() -> None:
    lists = [*SERVED, *IGNORED, *REFUSED]
    assert len(lists) == len(set(lists)), "a field is in two lists"
    assert set(lists) == set(FIELDS)


def test_peft_has_no_other_fields() -> None:
    peft = pytest.importorskip("peft")
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields <= {*SERVED, *IGNORED, *REFUSED}, "say of each new field whether it is served"


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "list": ({}, {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4, "lora_alpha": 16}),
    "regex": ({}, {"target_modules": r".*\.0\.self_attn\.(k|o)_proj", "use_rslora": True, "r": 3}),
    "all-linear": ({}, {"target_modules": "all-linear", "exclude_modules": ["up_proj"]}),
    "layers": ({}, {"target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [1]}),
    "patterns": (
        {},
        {
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
            "alpha_pattern": {"k_proj": 32},
        },
    ),
    "bias": ({"attention_bias": True}, {"target_modules": ["q_proj", "o_proj"], "lora_bias": True}),
    "head": ({}, {"target_modules": ["lm_head", "q_proj"]}),
    "experts": (
        {"num_experts": 4},
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {"mlp.experts.down_proj": 2},
        },
    ),
    "one-parameter": ({"num_experts": 4}, {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
    "router": ({"num_experts": 4}, {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    """Beside the base, and merged into it."""
    peft = pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForCausalLM

    changes, fields = CASES[case]
    config = Qwen3.tiny(**changes)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **fields)).eval()
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        beside = model(ids).logits[0]
        expected = beside if fields.get("lora_bias") else model.merge_and_unload()(ids).logits[0]
    close(beside, expected)
    options: dict[str, Any] = {
        "device": "cpu",
        "block_size": 4,
        "num_blocks": 64,
        "lora": {"a": str(tmp_path / "adapter")},
    }
    llm = LLM(model=load_model(tmp_path / "base", device="cpu", dtype="float32", progress=False), **options)
    params = SamplingParams(lora="a", max_tokens=1, temperature=0, prompt_logprobs=0, logprobs=0)
    (output,) = llm.generate(PROMPT, params, progress=False)
    scores = torch.tensor([logprob.logprob for logprob in (*output.prompt_logprobs, *output.logprobs)])
    picked = torch.tensor([*PROMPT[1:], *output.token_ids])
    close(scores, expected.log_softmax(-1).gather(1, picked[:, None])[:, 0])
    assert output.token_ids[0] == int(expected[-1].argmax())


REFUSALS: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "init_lora_weights": {"init_lora_weights": "olora"},
    "layer_replication": {"layer_replication": [(0, 2), (0, 2)]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [5, 6]},
    "use_qalora": {"use_qalora": True},
}


@pytest.mark.parametrize("field", REFUSALS)
def test_what_peft_writes_otherwise_is_refused_by_name(field: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], **REFUSALS[field])
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"adapter_config.json: {field} is "):
        read_adapter(tmp_path)
