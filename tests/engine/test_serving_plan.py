"""`whorl plan`: its bytes against those of models that are built for a rank, and what it says where nothing fits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from whorl import nn
from whorl.cli import app
from whorl.engine.memory import cache_specs, token_bytes, weight_bytes
from whorl.engine.settings import EngineSettings
from whorl.engine.tensor_parallel import shards
from whorl.engine.weights import build
from whorl.models.qwen3 import Qwen3
from whorl.plan import serving
from whorl.plan.hardware import HARDWARE
from whorl.plan.model_shape import from_hugging_face
from whorl.plan.options import ServingOptions

MOE = Qwen3.tiny(num_experts=8, num_attention_heads=8, num_key_value_heads=4, hidden_size=128, vocab_size=512)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (4, 1), (1, 4), (4, 4)])
def test_bytes_of_a_rank(tp: int, ep: int) -> None:
    shape = from_hugging_face(MOE, "moe")
    settings = EngineSettings(tp=tp, ep=ep if ep > 1 else None)
    place = shards(settings, 0, max(tp, ep))
    model = build(MOE, device="meta", dtype=torch.bfloat16, tp=place, max_length=64)
    parameters = sum(p.nbytes for p in model.parameters())  # type: ignore[attr-defined]
    assert serving.weight_bytes(shape, tp, ep=ep) == pytest.approx(parameters, rel=0.01)
    assert weight_bytes(model, unpack=False) >= parameters  # type: ignore[arg-type]
    assert serving.cache_bytes(shape, tp) == token_bytes(cache_specs(model))


def plan(**options: Any) -> serving.ServingPlan:
    return serving.build_serving_plan(ServingOptions(serve="deepseek-v3.2", **options))


def test_layouts_fit_and_fill_the_cluster() -> None:
    listed = plan(cards=16, kind="910C", weights="int8")
    assert listed.layouts
    assert listed.problem is None
    for layout in listed.layouts:
        assert layout.engines * layout.ranks == 32
        assert layout.weights + layout.cache < HARDWARE["a3"].memory
        assert layout.batch * 4096 * layout.engines <= layout.tokens
    speeds = [layout.all for layout in listed.layouts]
    assert speeds == sorted(speeds, reverse=True)


def test_a_longer_cache_or_more_bits_are_slower() -> None:
    base = plan(cards=16, weights="fp8").layouts[0]
    assert plan(cards=16, weights="bf16").layouts[0].all < base.all
    assert plan(cards=16, weights="fp8", seq=65536).layouts[0].all < base.all
    assert plan(cards=16, weights="fp8", batch=1).layouts[0].all < base.all


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    run = CliRunner().invoke(app, ["plan", "--serve", str(tmp_path), "--cards", "4", "--json"])
    assert run.exit_code == 0, run.output
    assert {layout["options"] for layout in json.loads(run.output)["layouts"]} >= {"one rank", "--tp 4", "--ep 4"}
    run = CliRunner().invoke(app, ["plan", "--serve", "deepseek-v3.2", "--cards", "1"])
    assert run.exit_code == 1
    assert "no layout fits" in run.output
    with pytest.raises(ValueError, match="kind is 'A100', expected H200 or 910C"):
        plan(cards=1, kind="A100")
    with pytest.raises(ValueError, match="give --serve MODEL and --cards N"):
        plan()


def test_ranks_without_experts_are_those_of_tensor_parallelism() -> None:
    place = shards(EngineSettings(tp=4), 2, 4)
    assert place == nn.Ranks(rank=2, size=4)
    assert shards(EngineSettings(ep=4), 2, 4) == nn.Ranks(experts=nn.Ranks(rank=2, size=4))
