"""Training an adapter: its gradients, the bits of its numbers in the engine, and the files that it becomes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from schedules import tiny

from whorl import nn
from whorl.engine.llm import LLM
from whorl.engine.lora import write_adapter
from whorl.engine.sequence import SamplingParams
from whorl.models.qwen3 import Qwen3

KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dense": ({}, ["q_proj", "v_proj", "o_proj", "up_proj", "lm_head"]),
    "experts": ({"num_experts": 4}, ["q_proj", "experts.gate_up_proj", "experts.down_proj"]),
    "one-stack": ({"num_experts": 4}, ["experts.gate_up_proj"]),
}
SEQUENCES = [[3, 41, 7, 88, 2], [5, 9, 60, 11, 14, 77, 21]]


def begun(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, nn.TrainedUpdates]:
    changes, names = KINDS[kind]
    model = tiny(Qwen3, dtype, **changes)
    torch.manual_seed(2)
    return model, nn.TrainedUpdates(model, names, rank=4, alpha=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_has_the_trainers_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """After a step of training, through the files: logprobs of prompts and of generated tokens."""
    model, updates = begun(kind, dtype)
    packed = nn.pack(SEQUENCES, "cpu")
    with updates.attached():
        model.logprobs(packed).sum().backward()
        gradients = [parameter.grad for parameter in updates.parameters()]
        torch.optim.SGD(updates.parameters(), lr=0.5).step()
        expected = model.logprobs(packed).detach()
    assert all(parameter.grad is None for parameter in model.parameters()), "the base is frozen"
    assert all(gradient is not None for gradient in gradients)
    assert not torch.equal(expected, model.logprobs(packed)), "the update changes nothing, or stays attached"
    write_adapter(tmp_path / "a", updates)
    llm = LLM(model=model, device="cpu", block_size=4, num_blocks=64, lora={"a": str(tmp_path / "a")})
    params = SamplingParams(lora="a", max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = llm.generate(SEQUENCES, params, progress=False)
    actual = torch.tensor([each.logprob for output in outputs for each in output.prompt_logprobs])
    assert torch.equal(actual, expected)


def test_gradients_are_those_of_merged_weights() -> None:
    """Of W + scale B A, by torch's autograd over the plain model."""
    model, updates = begun("dense")
    with torch.no_grad():
        for b in updates.b:
            b.normal_(std=0.1)
    packed = nn.pack(SEQUENCES, "cpu")
    with updates.attached():
        model.logprobs(packed).sum().backward()
    ours = {name: (a.grad, b.grad) for name, a, b in zip(updates.targets, updates.a, updates.b, strict=True)}
    for name, update in updates.updates().items():
        target = updates.targets[name]
        with torch.no_grad():
            target.matrix.weight[target.parts[0].place] += update.scale * update.b @ update.a
    nn.trainable(model)
    model.logprobs(packed).sum().backward()
    for name, update in updates.updates().items():
        target = updates.targets[name]
        gradient = target.matrix.weight.grad[target.parts[0].place] * update.scale
        a_grad, b_grad = ours[name]
        torch.testing.assert_close(a_grad, update.b.T @ gradient, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(b_grad, gradient @ update.a.T, rtol=1e-3, atol=1e-4)


def test_peft_reads_the_files(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForCausalLM

    _, updates = begun("experts")
    with torch.no_grad():
        for b in updates.b:
            b.normal_(std=0.1)
    write_adapter(tmp_path / "a", updates)
    config = Qwen3.tiny(hidden_size=96, intermediate_size=160, num_experts=4)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "a")
    state = peft.get_peft_model_state_dict(loaded)
    assert len(state) == 2 * len(updates.targets)
    expected = updates.updates()["model.layers.1.self_attn.q_proj"].b
    assert torch.equal(state["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"], expected)
    stack = updates.updates()["model.layers.0.mlp.experts.gate_up_proj"]
    wrapper = loaded.base_model.model.model.layers[0].mlp.experts.base_layer
    assert wrapper.parameter_name == "gate_up_proj"
    torch.testing.assert_close(wrapper.get_delta_weight("default"), stack.scale * stack.b @ stack.a)


def test_wrong_names_are_errors() -> None:
    with pytest.raises(ValueError, match="no layer of the model has a name that ends with k_projection"):
        nn.TrainedUpdates(tiny(Qwen3), ["q_proj", "k_projection"])
