"""GGUF files of Qwen3.5 and Qwen3-Next: values as transformers computes with them, packed with the bits of unpacked."""

import json
from pathlib import Path
from typing import Any

import client_environments
import pytest
import torch
from checkpoints import write_checkpoints
from delta_gguf import write
from one_sequence import PROMPT, Runner, close
from safetensors.torch import load_file, save_file
from test_models import hf_logits
from test_quant_formats import matrices
from test_qwen3_5 import save
from test_weights import load, logits
from torch import Tensor

from whorl import nn
from whorl.engine.weights import load_prediction
from whorl.models.qwen3_5 import Qwen3_5Text
from whorl.models.qwen3_next import Qwen3Next

pytest.importorskip("gguf")
pytest.importorskip("transformers")

# Three value heads for each of two key heads: an order that is undone twice is another one.
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen35", Qwen3_5Text.tiny(**HEADS)),
    "equal heads, tied": (
        "qwen35",
        Qwen3_5Text.tiny(**HEADS | {"linear_num_value_heads": 2}, tie_word_embeddings=True),
    ),
    "experts": ("qwen35moe", Qwen3_5Text.tiny(**HEADS, num_experts=5, shared_expert_intermediate_size=32)),
    "next": ("qwen3next", Qwen3Next.tiny(**HEADS, shared_expert_intermediate_size=32)),
}


def numbers(model: Any, config: dict[str, Any]) -> dict[str, Any]:
    drops = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    return {name: x.float().numpy() for name, x in model.state_dict().items() if name not in drops}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_the_checkpoint(name: str, tmp_path: Path) -> None:
    arch, config = CONFIGS[name]
    theirs = save(tmp_path / "hf", config)
    path = tmp_path / "model.gguf"
    for options in ({}, {"fuses": True}) if "num_experts" in config else ({},):
        write(path, arch, config, numbers(theirs, config), **options)
        ours = load(path, unpack=True)
        close(logits(ours), hf_logits(theirs, PROMPT), 2e-5)
    expected = {key: slot.tensor() for key, slot in nn.destinations(load(tmp_path / "hf")).items()}
    for key, slot in nn.destinations(ours).items():
        if key in expected:  # Qwen3-Next's projections have other names
            close(slot.tensor(), expected[key], 1e-6)


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
@pytest.mark.parametrize("name", ["dense", "experts", "next"])
def test_packed_weights_have_the_bits_of_unpacked_ones(name: str, kind: str, tmp_path: Path) -> None:
    arch, config = CONFIGS[name]
    theirs, path = save(tmp_path / "hf", config), tmp_path / "model.gguf"
    write(path, arch, config, numbers(theirs, config), kind)
    packed, plain = load(path, unpack=False), load(path, unpack=True)
    assert torch.equal(logits(packed), logits(plain))
    if kind == "Q8_0":
        close(logits(load(path)), logits(plain), 1e-3)  # tokens in 16 bits, whorl's own kernels


def test_packed_weights_of_ranks(tmp_path: Path) -> None:
    """A rank's value heads are several ranges of the file's columns, which must not cut blocks."""
    arch, config = CONFIGS["dense"]
    path = tmp_path / "model.gguf"
    write(path, arch, config, numbers(save(tmp_path / "hf", config), config), "Q8_0")
    plain = matrices(load(path, unpack=True))
    for name, own in matrices(load(path, unpack=False, tp=nn.Ranks(rank=1, size=2))).items():
        if name.endswith("out_proj"):
            (part,) = own.parts
            assert torch.equal(own.format.values(own), plain[name].weight[part.rows, part.columns])
    narrow = config | {"linear_num_value_heads": 4, "linear_value_head_dim": 16}
    write(path, arch, narrow, numbers(save(tmp_path / "narrow", narrow), narrow), "Q8_0")
    with pytest.raises(ValueError, match="this rank's value heads are columns 16 to 32 of the file, which has blocks"):
        load(path, unpack=False, tp=nn.Ranks(rank=1, size=2))


def test_older_files_of_qwen3_next(tmp_path: Path) -> None:
    """Their projections are by key head, as in the checkpoint."""
    arch, config = CONFIGS["next"]
    theirs = save(tmp_path / "hf", config)
    for old in (False, True):
        write(tmp_path / f"{old}.gguf", arch, config, numbers(theirs, config), "Q8_0", is_old=old)
    assert torch.equal(logits(load(tmp_path / "True.gguf")), logits(load(tmp_path / "False.gguf")))


@pytest.mark.parametrize("name", ["dense", "experts", "next"])
def test_the_prediction_layer(name: str, tmp_path: Path) -> None:
    arch, config = CONFIGS[name]
    config = config | {"mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    (folder,) = write_checkpoints(tmp_path, {"model": config}).values()
    path, tensors = tmp_path / "model.gguf", load_file(folder / "model.safetensors")
    for x in tensors.values():
        if x.dim() == 1:  # norms, which begin with zeros
            x.add_(0.1 * torch.randn_like(x))
    save_file(tensors, folder / "model.safetensors")
    write(path, arch, config, {key: x.numpy() for key, x in stacked(tensors).items()})
    expected, actual = (
        {key: slot.tensor() for key, slot in nn.destinations(prediction(each)).items()} for each in (folder, path)
    )
    assert actual.keys() == expected.keys()
    for key, value in actual.items():
        close(value, expected[key], 1e-6)
    assert any("pre_fc_norm" in key for key in actual)
    close(logits(load(path, unpack=True)), logits(load(folder)), 2e-5)


def prediction(path: Path) -> Any:
    return load_prediction(path, load(path, unpack=True), progress=False)


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the matrices of experts, which llama.cpp's converter does first."""
    result: dict[str, Tensor] = {}
    stacks: dict[str, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        layer, is_expert, rest = key.partition(".experts.")
        if not is_expert or not rest[0].isdigit():
            result[key] = x
            continue
        stacks.setdefault(layer, {})[rest] = x
    for layer, parts in stacks.items():
        count = len(parts) // 3
        gate, up, down = (
            torch.stack([parts[f"{e}.{n}_proj.weight"] for e in range(count)]) for n in ("gate", "up", "down")
        )
        result |= {f"{layer}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{layer}.experts.down_proj": down}
    return result


def test_files_that_are_refused(tmp_path: Path) -> None:
    arch, config = CONFIGS["dense"]
    tensors = numbers(save(tmp_path / "hf", config), config)
    path = tmp_path / "model.gguf"
    write(path, arch, config | {"linear_num_value_heads": 2}, tensors)
    with pytest.raises(ValueError, match=r"of another shape: .*in_proj_qkv\.weight \[256, 32\], expected \[128, 32\]"):
        load(path)


# ---- against llama.cpp

WIDE: dict[str, Any] = {"hidden_size": 256, "vocab_size": 320, "intermediate_size": 256, "head_dim": 64}
WIDE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
WIDE |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SECTIONS = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
EXPERTS |= {"shared_expert_intermediate_size": 256}
PEER: dict[str, dict[str, Any]] = {
    "qwen35": Qwen3_5Text.tiny(**WIDE, rope_parameters=ROPE | SECTIONS),
    "qwen35moe": Qwen3_5Text.tiny(**WIDE, **EXPERTS, rope_parameters=ROPE | SECTIONS),
    "qwen3next": Qwen3Next.tiny(**WIDE | EXPERTS, rope_parameters=ROPE),
}
SCRIPT = Path(__file__).with_name("llama_cpp_logprobs.py")
COUNT = 50


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("arch", PEER)
def test_answers_are_llama_cpp_s(arch: str, kind: str, tmp_path: Path) -> None:
    """Log-probabilities of every token at the 50 places of an answer. With fewer bits llama.cpp rounds tokens to 8 bits
    and whorl does not, which moves logits of a random model; value heads in a wrong order give a divergence of 2."""
    config = PEER[arch]
    path = tmp_path / "model.gguf"
    write(path, arch, config, numbers(save(tmp_path / "hf", config), config), kind)
    prompts = [[(7 * i * i + 3 * i + 5) % 300 for i in range(length)] for length in (3, 90)]
    done = client_environments.run("llama-cpp", "python", str(SCRIPT), str(path), str(COUNT), json.dumps(prompts))
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    models = [load(path, unpack=True), load(path)]
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = prompt + answer["tokens"]
        rows = [[row[str(token)] for token in range(config["vocab_size"])] for row in answer["logprobs"]]
        theirs = torch.tensor(rows)
        assert theirs.shape == (COUNT, config["vocab_size"])
        for model in models:
            ours = Runner(model, 256).run(ids[:-1]).log_softmax(-1)[len(prompt) - 1 :]
            if kind == "F32":
                close(ours, theirs, 1e-5)
                continue
            divergence = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
            equal = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            assert divergence < 0.2, divergence
            assert equal >= 30, equal
