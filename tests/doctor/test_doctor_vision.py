"""What the doctor says of whorl's own engine: the rotary operators of text and tower, on CUDA and on Ascend."""

import json
from pathlib import Path
from typing import Any

import pytest

from whorl import doctor
from whorl.models.llama import Llama
from whorl.models.qwen3_vl import Qwen3VL


def published(**vision: Any) -> dict[str, Any]:
    """The head sizes of Qwen3-VL-8B."""
    config = Qwen3VL.tiny({"hidden_size": 1152, "num_heads": 16, **vision})
    config["text_config"] |= {"head_dim": 128}
    config["text_config"]["rope_parameters"] |= {"mrope_section": [24, 20, 20]}
    return config


SAYS = {
    # As tests/ascend/test_engine_npu.py sees them called, of the same head sizes.
    ("npu", "published"): {"text": "npu_mrope", "tower": "npu_rotary_mul"},
    ("npu", "heads of 64"): {"text": "npu_mrope", "tower": "npu_mrope"},
    ("npu", "llama"): {"text": "npu_rotary_mul"},
    ("cuda", "published"): {"text": "whorl", "tower": "whorl"},
    ("cuda", "llama"): {"text": "whorl"},
}
MODELS = {
    "published": published(),
    "heads of 64": published(hidden_size=1024),
    "llama": Llama.tiny(head_dim=64),
}


@pytest.mark.parametrize(("device", "name"), SAYS)
def test_the_operators_of_text_and_tower(tmp_path: Path, device: str, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    report = doctor.check(tmp_path, framework="whorl", device=device)
    assert {path.branch: path.operator for path in report.paths} == SAYS[device, name]
    assert not [finding for finding in report.findings if finding.severity != "note"]


def test_others_have_no_tower_of_ours(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["published"]))
    report = doctor.check(tmp_path, framework="hf", device="npu")
    assert len(report.paths) == 1
