"""Qwen3-Next and Qwen3.5 against transformers on random tiny checkpoints: logits and greedy answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mock_model import record
from one_sequence import close

from whorl import nn
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import load_model
from whorl.models.qwen3_5 import Qwen3_5Text
from whorl.models.qwen3_next import Qwen3Next

pytest.importorskip("transformers")

ODD = {"hidden_size": 36, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "next": Qwen3Next.tiny(),
    "dense": Qwen3_5Text.tiny(),
    "experts": Qwen3_5Text.tiny(num_experts=5),
    "next with dense layers": Qwen3Next.tiny(mlp_only_layers=[1], norm_topk_prob=False, linear_num_value_heads=6),
    "odd": Qwen3_5Text.tiny(**ODD, linear_key_head_dim=6, linear_value_head_dim=14, num_hidden_layers=5),
    "tied, with biases": Qwen3_5Text.tiny(
        tie_word_embeddings=True, attention_bias=True, layer_types=["full_attention", *["linear_attention"] * 3]
    ),
}
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPT = [(7 * i * i + 3 * i + 5) % 97 for i in range(150)]
FIRST = ("next", "dense", "experts")


def lively(model: torch.nn.Module) -> None:
    """Random weights of transformers' model whose state matters: a head keeps 0.3 to 0.99 of it over 64 tokens."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.logspace(-3.5, -1.8, len(parameter)).log())
            elif name.endswith("dt_bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.3 if "conv1d" in name or "in_proj_qkv" in name else 0.15)


def save(folder: Path, config: dict[str, Any]) -> Any:
    """A random checkpoint of transformers, with the config.json as a publisher writes it."""
    import transformers

    values = {key: value for key, value in config.items() if key != "architectures"}
    theirs = getattr(transformers, config["architectures"][0])
    model = theirs(transformers.AutoConfig.for_model(values.pop("model_type"), **values)).eval()
    lively(model)
    model.tie_weights()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module", params=[n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("qwen")
    return save(folder, CONFIGS[request.param]), load_model(folder, device="cpu", progress=False)


def test_logits_and_answers_are_transformers(both: tuple[Any, Any]) -> None:
    """Of prompts within a chunk of 64 tokens and past two of them."""
    theirs, ours = both
    llm = LLM(model=ours, device="cpu", max_num_seqs=4, block_size=4, num_blocks=200, max_num_batched_tokens=100)
    logits = record(llm)
    sequences = [llm.add(PROMPT[:length], GREEDY)[0] for length in (1, 5, 64, 150)]
    while llm.has_work:
        llm.step()
    for seq in sequences:
        with torch.inference_mode():
            expected = theirs(input_ids=torch.tensor([seq.token_ids])).logits[0]
        close(torch.stack(list(logits[seq.id].values())), expected[seq.prompt_len - 1 : -1], 2e-5)
        assert seq.output_ids == expected[seq.prompt_len - 1 : -1].argmax(-1).tolist()


def test_training_has_transformers_gradients(both: tuple[Any, Any]) -> None:
    theirs, ours = both
    tokens = torch.tensor([PROMPT[:70]])
    theirs.zero_grad()
    expected = theirs(input_ids=tokens).logits.float().log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    (-expected.mean()).backward()
    nn.trainable(ours)
    actual = ours.logprobs(nn.pack(tokens.tolist(), "cpu"))
    close(actual.detach(), expected.detach())
    (-actual.mean()).backward()
    gradients = dict(theirs.named_parameters())
    for name in ("model.embed_tokens.weight", "model.layers.0.linear_attn.out_proj.weight", "model.norm.weight"):
        close(dict(ours.named_parameters())[name].grad, gradients[name].grad, 5e-5)
    ours.requires_grad_(False)
