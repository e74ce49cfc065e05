"""`--quantize cpu4` with whorl's CPU kernels: values against the gguf package, and models that load and answer."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from one_sequence import PROMPT, Runner
from test_models import save

from whorl.engine import weights
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3
from whorl.nn.weights.panel_rounding import PanelRounding
from whorl.nn.weights.panels import GgufPanels
from whorl.ops.cpu import library

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"CPU kernels: {library.missing()}")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize(("passes", "bound"), [(1, 0.11), (2, 0.008)])
def test_blocks_are_what_the_gguf_package_reads(passes: int, bound: float) -> None:
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    rounding = PanelRounding(passes)
    ends, error, norm = rounding.apply(weight)
    values = dequantize(ends["weight"].numpy(), gguf.GGMLQuantizationType[rounding.kind])
    assert float(np.square(values - weight.numpy()).sum()) == pytest.approx(error, rel=1e-4)
    assert (error / norm) ** 0.5 < bound
    assert not values[3].any()


def test_values_of_16_steps_are_kept() -> None:
    weight = torch.arange(16.0).repeat(3, 4) / 8 - 1
    ends, error, _ = PanelRounding().apply(weight)
    assert error == 0
    assert (dequantize(ends["weight"].numpy(), gguf.GGMLQuantizationType.Q4_1) == weight.numpy()).all()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", [Llama, Qwen3])
def test_a_model_is_rounded_while_it_is_loaded(model: Any, tied: bool, tmp_path: Path) -> None:
    save(tmp_path, model.tiny(**SIZES, tie_word_embeddings=tied))
    plain, rounded = (
        weights.load_model(tmp_path, device="cpu", progress=False, quantize=quantize) for quantize in (None, "cpu4")
    )
    formats = {type(layer.format) for _, layer in weights.weighted(rounded) if hasattr(layer, "format")}
    assert formats == {GgufPanels}
    expected, actual = (Runner(each).run(PROMPT) for each in (plain, rounded))
    assert 0 < float((actual - expected).norm() / expected.norm()) < 0.5  # unrelated ones: 1.4
    alone = Runner(rounded).run(PROMPT[:4])
    assert torch.equal(alone, actual[:4])


def test_experts_are_rounded_too(tmp_path: Path) -> None:
    save(tmp_path, Qwen3.tiny(**SIZES, num_experts=4, moe_intermediate_size=64))
    plain, rounded = (
        weights.load_model(tmp_path, device="cpu", progress=False, quantize=quantize) for quantize in (None, "cpu4")
    )
    expected, actual = (Runner(each).run(PROMPT) for each in (plain, rounded))
    assert 0 < float((actual - expected).norm() / expected.norm()) < 0.5


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="cpu4 is for CPUs, and the device is cuda"):
        PanelRounding.check_device("cuda")
