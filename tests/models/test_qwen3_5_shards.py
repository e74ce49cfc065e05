"""Qwen3.5 and Qwen3-Next over ranks, and from quantised checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from checkpoints import write_checkpoints
from one_sequence import Runner, close
from quant_checkpoints import CASES, write
from safetensors.torch import load_file, save_file
from test_quant_formats import load
from torch import Tensor

from whorl import nn
from whorl.models.qwen3_5 import Qwen3_5, Qwen3_5Text
from whorl.models.qwen3_next import Qwen3Next

LONG = [(7 * i + 3) % 89 + 1 for i in range(75)]
# Three key heads for six value heads are shared unevenly by two ranks; KV heads are fewer than four ranks.
UNEVEN = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "linear_num_key_heads": 3}
UNEVEN |= {"linear_num_value_heads": 6}
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
FAMILIES: dict[str, Callable[..., dict[str, Any]]] = {
    "next": Qwen3Next.tiny,
    "dense": lambda **sizes: Qwen3_5Text.tiny(attention_bias=True, **sizes),
    "experts": lambda **sizes: Qwen3_5Text.tiny(num_experts=4, **sizes),
}


def on_a_rank(paths: dict[str, Path]) -> dict[str, Tensor]:
    mine = nn.Ranks(rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())
    models = {name: load(path, tp=mine, unpack=None) for name, path in paths.items()}
    return {name: sequence(model) for name, model in models.items()}


def sequence(model: Any) -> Tensor:
    """Logits of a prompt, and of tokens behind it that are past the end of its second chunk."""
    runner = Runner(model, 160)
    return torch.cat([runner.run(LONG), *(runner.run([token]) for token in LONG[:55])])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "sizes"), [(2, UNEVEN), (4, WIDE)], ids=["2", "4"])
def test_ranks_equal_one(size: int, sizes: dict[str, Any], tmp_path: Path) -> None:
    paths = write_checkpoints(tmp_path, {name: make(**sizes) for name, make in FAMILIES.items()})
    one = {name: sequence(load(path, unpack=None)) for name, path in paths.items()}
    for result in ranks.shared(size).run(on_a_rank, paths):
        for name, expected in one.items():
            close(result[name], expected)


def test_each_rank_reads_its_rows() -> None:
    """Together the ranks read every row of every tensor, and of those of heads no row twice."""
    config = Qwen3_5Text.config_class.from_hf(Qwen3_5Text.tiny(**WIDE))
    rows: dict[str, list[int]] = {}
    shapes: dict[str, int] = {}
    for rank in range(4):
        with torch.device("meta"):
            model = Qwen3_5Text(config, ranks=nn.Ranks(rank=rank, size=4))
            nn.create_parameters(model, nn.weights.ALL_DENSE, torch.float32)
        for name, slot in nn.destinations(model).items():
            for part in slot.parts:
                rows.setdefault(name, []).extend(range(slot.shape[0])[part.index[0]])
            shapes[name] = slot.shape[0]
    for name, read in rows.items():
        assert set(read) == set(range(shapes[name])), name
        is_of_heads = "linear_attn" in name and not name.endswith(("out_proj.weight", "norm.weight"))
        if is_of_heads or "q_proj" in name:
            assert len(read) == shapes[name], name


# Modules that no quantiser of the family converts: a few rows each, or one.
KEPT = ("conv1d", "in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert_gate", "mlp.gate")
HEADS = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16}


class WideExperts(Qwen3Next):
    """With experts that groups of columns divide."""

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        return super().tiny(moe_intermediate_size=64, shared_expert_intermediate_size=80, **changes)


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", pytest.param("gptq", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Qwen3_5Text, WideExperts], ids=["dense", "next"])
def test_quantised_weights_are_those_of_the_dequantised_model(name: str, kind: Any, tmp_path: Path) -> None:
    """Rows of q, k and v, of queries and their gates, are blocks of their own in the files of both forms."""
    case = CASES[name]
    case = replace(case, kept=(*case.kept, *KEPT), sizes=case.sizes | HEADS)
    path, dense = write(tmp_path, case, kind)
    assert torch.equal(sequence(load(path)), sequence(load(dense)))


def test_a_projection_that_cannot_be_cut_says_so(tmp_path: Path) -> None:
    """AWQ packs eight rows into a word, and a key has twelve."""
    case = CASES["awq"]
    heads = {**HEADS, "linear_key_head_dim": 12, "linear_value_head_dim": 8}
    path, _ = write(tmp_path, replace(case, kept=(*case.kept, *KEPT), sizes=case.sizes | heads), WideExperts)
    with pytest.raises(
        ValueError, match=r"in_proj_qkvz: this rank's share, or a part of that share, is rows 0 to 12 of"
    ):
        load(path)


def test_weights_rounded_while_they_are_read(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, **HEADS}
    (path,) = write_checkpoints(tmp_path, {"dense": Qwen3_5Text.tiny(**sizes)}).values()
    rounded, plain = (sequence(load(path, quantize=scheme)) for scheme in ("w4a16", None))
    error = float((rounded - plain).norm() / plain.norm())
    assert 1e-3 < error < 0.9, error


@pytest.mark.parametrize("make", [Qwen3Next.tiny, Qwen3_5Text.tiny])
def test_low_rank_updates_are_those_of_merged_weights(make: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Of projections whose rows are in another order than in the checkpoint."""
    (path,) = write_checkpoints(tmp_path, {"base": make()}).values()
    model = load(path)
    low_ranks, generator = nn.LowRanks(model, 1), torch.Generator().manual_seed(0)
    updates, tensors = {}, load_file(path / "model.safetensors")
    for name, target in low_ranks.targets.items():
        if "linear_attn" in name or "self_attn" in name:
            rows, columns = target.shape
            a, b = torch.randn(3, columns, generator=generator), torch.randn(rows, 3, generator=generator)
            updates[name] = nn.Update(a=0.1 * a, b=0.1 * b, scale=2.0)
            tensors[f"{name}.weight"] += 0.02 * b @ a
    assert {name.rpartition(".")[2] for name in updates} > {"q_proj", "o_proj", "out_proj"}
    low_ranks.load(0, updates)
    with low_ranks.chosen(0):
        actual = sequence(model)
    save_file(tensors, path / "model.safetensors")
    close(actual, sequence(load(path)))


@pytest.mark.parametrize("make", [Qwen3Next.tiny, Qwen3_5Text.tiny, Qwen3_5.tiny])
def test_published_forms_of_a_config(make: Callable[..., dict[str, Any]]) -> None:
    """By default every fourth layer has attention, and heads have 256 channels of which a quarter rotates."""
    from whorl.models import find

    values = make()
    text = values.get("text_config", values)
    for name in ("full_attention_interval", "head_dim", "rope_parameters", "mtp_num_hidden_layers"):
        del text[name]
    config = find(values).config_class.from_hf(values)
    assert config.kinds == ("linear_attention",) * 3 + ("full_attention",)
    assert (config.head_dim, config.rope.rotary_dim, config.num_nextn_predict_layers) == (256, 64, 1)
    text["layer_types"] = ["full_attention"] * 4
    assert find(values).config_class.from_hf(values).kinds == ("full_attention",) * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "expected 4 of linear_attention, full_attention"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads is 5, expected a multiple of linear_num_key_heads, 2"),
        ({"attn_output_gate": False}, "attn_output_gate is false, expected true"),
        ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh', expected silu"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3', expected qwen3_next, qwen3_5, qwen3_5_moe"),
    ],
)
def test_configurations_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen3_5Text.config_class.from_hf(Qwen3_5Text.tiny() | change)
