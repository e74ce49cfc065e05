"""GGUF files of Qwen3.5 and Qwen3-Next: values as transformers computes with them, packed with the bits of unpacked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from delta_gguf import write
from one_sequence import PROMPT, close
from test_models import hf_logits
from test_qwen3_5 import save
from test_weights import load, logits

from whorl import nn
from whorl.models.qwen3_5 import Qwen3_5Text
from whorl.models.qwen3_next import Qwen3Next

pytest.importorskip("gguf")
pytest.importorskip("transformers")

# Three value heads for each of two key heads: an order that is undone twice is another one.
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen35", Qwen3_5Text.tiny(**HEADS)),
    "equal heads, tied": ("qwen35", Qwen3_5Text.tiny(**HEADS | {"linear_num_value_heads": 2}, tie_word_embeddings=True)),
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
