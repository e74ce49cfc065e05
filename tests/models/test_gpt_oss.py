"""gpt-oss: its MXFP4 checkpoints, ranks, sinks, and what is refused; test_models.py compares logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from one_sequence import PROMPT, Runner, close
from safetensors.torch import load_file, save_file
from test_models import save
from test_one_arithmetic import SAMPLED, decoded, engine, prefilled
from torch import Tensor

from whorl import nn
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.weights import load_model
from whorl.models.gpt_oss import GptOss
from whorl.ops.quantised import mx

pytest.importorskip("transformers")

LONG = PROMPT * 2  # past the window
SETTINGS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def load(path: Path, **options: Any) -> Any:
    return load_model(path, device="cpu", dtype="float32", progress=False, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint whose experts are MXFP4, and one of their values, which transformers unpacks."""
    packed, plain = (tmp_path_factory.mktemp(name) for name in ("packed", "plain"))
    config = GptOss.tiny()
    save(plain, config)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        codes, scales = mx.rounded(tensors[name].mT.contiguous())
        blocks = codes.unflatten(-1, (-1, 16))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del stored[name]
        tensors[name] = theirs(blocks, scales)
    save_file(stored, packed / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(config))
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    return packed, plain


def theirs(blocks: Tensor, scales: Tensor) -> Tensor:
    """transformers' values of MXFP4 tensors: [E, inputs, outputs], as its plain checkpoints have them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float().contiguous()


@pytest.mark.parametrize("unpack", [False, True])
def test_packed_experts_have_the_bits_of_their_values(folders: tuple[Path, Path], unpack: bool) -> None:
    packed, plain = folders
    model = load(packed, unpack=unpack)
    experts = model.decoder.layers[0].mlp.experts
    assert hasattr(experts.gate_up_proj, "codes") != unpack
    assert torch.equal(Runner(model).run(LONG), Runner(load(plain)).run(LONG))


def test_packed_experts_in_the_engine(folders: tuple[Path, Path]) -> None:
    """Decoded, prefilled, with drafts, in an 8-bit cache and from the cache of prefixes: one arithmetic."""
    model = load(folders[0], unpack=False)
    for options in ({}, {"kv_cache_dtype": "fp8"}, {"speculate": PromptLookup(k=3, min_hist=1, guard=False)}):
        llm = engine(model, **options)
        for output in llm.generate([PROMPT[:3], PROMPT], SAMPLED, progress=False):
            assert decoded(output) == prefilled(llm, output)


def on_a_rank(paths: list[Path]) -> list[Tensor]:
    mine = nn.Ranks(rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())
    return [Runner(load(path, tp=mine, unpack=False)).run(LONG) for path in paths]


@pytest.mark.slow
def test_two_ranks_equal_one(folders: tuple[Path, Path]) -> None:
    paths = list(folders)
    one = [Runner(load(path, unpack=False)).run(LONG) for path in paths]
    for results in ranks.shared(2).run(on_a_rank, paths):
        for actual, expected in zip(results, one, strict=True):
            close(actual, expected)


def test_shares_of_ranks_are_the_whole(folders: tuple[Path, Path]) -> None:
    """Pairs of gate and up stay together, blocks of 32 columns are not cut, and one rank adds the bias of down."""
    whole = load(folders[0], unpack=False).decoder.layers[1].mlp.experts
    parts = [load(folders[0], unpack=False, tp=nn.Ranks(rank=i, size=2)).decoder.layers[1] for i in range(2)]
    held = [part.mlp.experts for part in parts]
    assert torch.equal(torch.cat([each.gate_up_proj.codes for each in held], 1), whole.gate_up_proj.codes)
    assert torch.equal(torch.cat([each.down_proj.codes for each in held], 2), whole.down_proj.codes)
    assert torch.equal(torch.cat([each.down_proj.scales for each in held], 2), whole.down_proj.scales)
    assert torch.equal(torch.cat([each.gate_up_bias for each in held], 1), whole.gate_up_bias)
    assert torch.equal(sum(each.down_bias for each in held), whole.down_bias)
    assert [part.mixer.sinks.weight.numel() for part in parts] == [2, 2]


def test_training_has_transformers_gradients(folders: tuple[Path, Path]) -> None:
    """Of every parameter, over packed sequences longer than the window; logprobs are those of the engine."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32, attn_implementation="eager")
    ours, sequences = nn.trainable(load(folders[1])), [LONG, PROMPT[:5]]
    expected = torch.cat([logprobs_of(theirs, tokens) for tokens in sequences])
    actual = ours.logprobs(nn.pack(sequences, "cpu"))
    close(actual.detach(), expected.detach())
    weights = torch.linspace(0.5, 1.5, len(expected))
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    compared = 0
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad  # what a file's tensors go to are then views of gradients
    for name, slot in nn.destinations(ours).items():
        gradient = gradients[name][slot.index] if slot.index else gradients[name]
        close(slot.into, gradient, 1e-4)
        compared += 1
    assert compared == len(gradients)


def logprobs_of(model: Any, tokens: list[int]) -> Tensor:
    ids = torch.tensor([tokens])
    return model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]


def test_experts_in_mxfp4_pass_gradients_on(folders: tuple[Path, Path]) -> None:
    """To their tokens, weights and biases, those of their values."""
    from whorl import ops

    grads = []
    for folder in folders:
        experts = load(folder, unpack=False).decoder.layers[0].mlp.experts
        torch.manual_seed(0)
        x, logits = torch.randn(7, 64, requires_grad=True), torch.randn(7, 8)
        experts.gate_up_bias.requires_grad_()
        experts(x, *ops.route(logits, 3)).square().sum().backward()
        grads.append((x.grad, experts.gate_up_bias.grad))
    for packed, plain in zip(*grads, strict=True):
        close(packed, plain)


def test_sinks_matter(folders: tuple[Path, Path]) -> None:
    """Without them logits would be others: comparisons see them."""
    model = load(folders[1])
    before = Runner(model).run(LONG)
    for layer in model.decoder.layers:
        layer.mixer.sinks.weight.fill_(-torch.inf)
    assert not torch.allclose(Runner(model).run(LONG), before, rtol=1e-2)


def test_a_folder_without_codes_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(folders[0] / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=r"1 missing: model.layers.0.mlp.experts.down_proj_scales"):
        load(tmp_path)


def test_the_published_form_of_config_is_read() -> None:
    """openai/gpt-oss-20b's, with tiny sizes; the class's defaults are the same."""
    scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    old = {"rope_scaling": {**scaling, "rope_type": "yarn", "truncate": False}, "rope_theta": 150000}
    more = {"experts_per_token": 3, "attention_bias": True, "swiglu_limit": 7.0, "hidden_act": "silu"}
    published: Any = GptOss.config_class.from_hf(GptOss.tiny(**old, **more))
    assert published == GptOss.config_class.from_hf(GptOss.tiny())
    assert published.windows == (9, None, 9)
    assert (published.attention_bias, published.output_bias) == (True, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most 8 experts"),
        ({"layer_types": ["full_attention"]}, "expected 3 of sliding_attention, full_attention"),
        ({"swiglu_limit": -1}, "swiglu_limit is -1, expected a number above 0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_what_makes_no_model_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GptOss.config_class.from_hf(GptOss.tiny(**change))
