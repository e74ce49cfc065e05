"""`whorl bench vision`: what it counts, what it refuses, and that a small one runs whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from whorl.bench import vision, vision_report, vision_tower
from whorl.bench.random_config import PRESETS
from whorl.cli import app
from whorl.engine.roofline import num_values
from whorl.engine.weights import build, random_model
from whorl.models.qwen3_vl import Qwen3VL

SMALL = ["--device", "cpu", "--pictures", "2", "--side", "16", "--frames", "4", "--frame", "16x8", "--batch", "1,2"]
SMALL += ["--tokens", "2", "--repeats", "1", "--processes", "1"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "vision", *arguments])


def test_products_and_outputs_of_the_tower() -> None:
    pytest.importorskip("transformers")
    config = Qwen3VL.tiny()
    model: Any = random_model(config, device="cpu", dtype=torch.float32)
    peer = vision_tower.Peer(model, config, "cpu")
    for grids in ([(1, 4, 6)], [(2, 4, 4), (1, 8, 2)]):
        patches = torch.cat([vision_tower.patches(model.tower.config, grid, "cpu") for grid in grids])
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:  # others are not counted
            peer.features(patches, grids)
        assert vision_tower.flops(model.tower.config, grids) == counted.get_total_flops()
    assert peer.compare(model.tower)["is_right"]
    with torch.inference_mode():
        model.tower.blocks[2].mlp.linear_fc2.bias[3] += 0.01  # of one channel: norms take away what all have
    assert not peer.compare(model.tower)["is_right"]


@pytest.mark.parametrize("name", ["Qwen3-VL-8B", "Qwen3-VL-30B-A3B"])
def test_presets_have_the_weights_of_transformers_models(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    values = {key: value for key, value in PRESETS[name].items() if key not in ("architectures", "dtype")}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(config)
    ours: Any = build(PRESETS[name], device="meta", dtype=torch.bfloat16)
    assert num_values(ours) == sum(parameter.numel() for parameter in theirs.parameters())
    text = build(vision.text_config(PRESETS[name]), device="meta", dtype=torch.bfloat16)
    assert num_values(text) == num_values(ours) - num_values(ours.tower)


def test_a_small_one_runs_whole(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    result = run(*SMALL, "--json", "--out", str(tmp_path / "found.json"))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "found.json").read_text())
    (entry,) = document["models"]
    assert entry["model"] == "tiny"
    assert all(entry["tower"][part]["seconds"] > 0 for part in ("pictures", "video"))
    assert all(entry["preprocessing"][part] > 0 for part in ("preprocessing_s", "tower_s", "both_s"))
    assert [row["pictures"] for row in entry["engine"]["first_token"]] == [1, 2]
    assert [row["prompt_tokens"] for row in entry["engine"]["first_token"]] == [32 + 5, 32 + 10]
    assert [row["batch"] for row in entry["text_model"]["decode"]] == [1, 2]
    text = vision_report.render(document)
    assert "2 of 16x16" in text
    assert "FLOPs count 16 channels" in text


REFUSED = {
    ("--side", "30"): "multiples of 8 pixels",
    ("--frame", "640"): "expected pixels such as 640x480",
    ("--random-config", "Qwen3-0.6B"): "is not a vision model",
    ("--peer", "vllm"): "expected transformers",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...]) -> None:
    result = run("--device", "cpu", *arguments)
    assert result.exit_code == 2, result.output
    assert REFUSED[arguments] in " ".join(result.output.split())
