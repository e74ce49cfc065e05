"""What files say of DeepSeek-V3.2, read once for all: against transformers and TorchTitan, without torch."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whorl.models.deepseek_v32 import NAMES, TRAINED, DeepSeekV32Config, layer_of

PUBLISHED = replace(DeepSeekV32Config(), rope_factor=40.0)


def test_the_defaults_are_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    values = transformers.DeepseekV32Config().to_dict()
    assert replace(DeepSeekV32Config.from_hf(values), num_nextn_predict_layers=0) == DeepSeekV32Config()


def test_every_field_comes_back() -> None:
    """Also through transformers, which fills in what it misses and drops what it does not know."""
    transformers = pytest.importorskip("transformers")
    floats = {"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.5, "rope_theta": 5e4, "rope_factor": 8.0}
    floats |= {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.6}
    changed: dict[str, Any] = {"norm_topk_prob": False, "trained_seq_len": 96, **floats}
    default = DeepSeekV32Config()
    changed |= {f.name: getattr(default, f.name) + 4 for f in fields(default) if f.name not in changed}
    config = replace(default, **changed)
    assert [f.name for f in fields(config) if getattr(config, f.name) == getattr(default, f.name)] == []
    assert DeepSeekV32Config.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert DeepSeekV32Config.from_hf(transformers.DeepseekV32Config(**config.to_hf()).to_dict()) == config


def test_the_rotation_of_attention_and_indexer() -> None:
    rope, index = PUBLISHED.rope, PUBLISHED.index_rope
    assert (rope.style, rope.where, rope.head_dim, rope.rotary_dim) == ("pairs", "trailing", 192, 64)
    assert (index.style, index.where, index.head_dim, index.rotary_dim) == ("half", "leading", 128, 64)
    assert np.array_equal(rope.frequencies(), index.frequencies())
    assert rope.attention_factor == 1.0  # YaRN's factor is in the softmax scale
    assert PUBLISHED.softmax_scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert DeepSeekV32Config().softmax_scale == 192**-0.5
    assert PUBLISHED.yarn_reach == PUBLISHED.max_position_embeddings
    assert DeepSeekV32Config().yarn_reach == 0


def test_the_older_spelling_of_a_rotation() -> None:
    values = PUBLISHED.to_hf()
    rope = values.pop("rope_parameters")
    old = values | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": rope.pop("rope_type")}}
    assert DeepSeekV32Config.from_hf(old) == PUBLISHED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"hidden_size": "7168"}, "hidden_size is '7168', expected a whole number"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1, expected a whole number, 0 or more"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes', expected true or false"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a number above 0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn without a factor"),
        ({TRAINED: -1}, f"{TRAINED} is -1"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DeepSeekV32Config.from_hf(PUBLISHED.to_hf() | change)


def test_names_are_torchtitans_where_it_has_the_tensor() -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
    from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter

    theirs = DeepSeekV3StateDictAdapter(DeepSeekV3ModelArgs(q_lora_rank=1536), None).from_hf_map
    assert theirs.items() <= NAMES.items()
    more = {name.removeprefix("layers.{}.").split(".")[-2] for name in {*NAMES.values()} - {*theirs.values()}}
    assert more == {"wq_b", "wk", "k_norm", "weights_proj", "enorm", "hnorm", "eh_proj", "norm"}
    assert len({*NAMES.values()}) == len(NAMES), "two tensors of a file would be one here"


def test_the_layer_of_a_name() -> None:
    assert layer_of("model.layers.61.self_attn.indexer.wk.weight") == 61
    assert layer_of("model.norm.weight") is None


def test_it_is_read_without_torch() -> None:
    """The planner does; the engine reads a configuration before it builds anything."""
    code = "import sys, whorl.models.deepseek_v32 as d; d.DeepSeekV32Config().rope; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
