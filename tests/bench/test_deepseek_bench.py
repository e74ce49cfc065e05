"""What `whorl bench decode` measures DeepSeek-V3.2 with: sizes, random FP8 weights and caches that are full."""

from typing import Any

import pytest
import torch
from one_sequence import PROMPT, Runner
from test_one_arithmetic import engine

from whorl.bench.filled_cache import fill
from whorl.bench.random_config import PRESETS
from whorl.engine import weights
from whorl.models.deepseek import DeepSeek

H200 = 141e9  # bytes
STATED = {"4L": 74e9, "4L-FP8": 39e9, "8L-FP8": 86e9, "8L-128E": 87e9}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"}


@pytest.mark.parametrize("name", STATED)
def test_presets_fit_as_stated(name: str) -> None:
    model: Any = weights.build(PRESETS[f"DeepSeek-V3.2-{name}"], device="meta", dtype=torch.bfloat16)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert held == pytest.approx(STATED[name], rel=0.02)
    cache = 131072 * sum(spec.token_bytes for spec in model.cache_specs())
    assert held + cache < 0.9 * H200
    assert model.decoder.layers[0].self_attn.indexer.sizes == (8192, 128, 64)


def test_random_weights_in_fp8_are_multiplied() -> None:
    """Those that are used by head are held as numbers, as a checkpoint's are."""
    model: Any = weights.random_model(DeepSeek.tiny(quantization_config=FP8), device="cpu", dtype=torch.float32)
    layer = model.decoder.layers[1].self_attn
    assert layer.q_b_proj.weight.dtype == torch.float8_e4m3fn
    assert layer.kv_b_proj.weight.dtype == torch.float32
    logits = Runner(model).run(PROMPT)
    assert logits.isfinite().all()
    assert float(logits.std()) > 0.1


def test_pages_of_bytes_are_filled_with_numbers() -> None:
    """Of which every key is as good as another, and none is not a number."""
    model = weights.random_model(DeepSeek.tiny(), device="cpu", dtype=torch.float32)
    llm = engine(model, kv_cache_dtype="fp8")
    fill(llm)
    cache = llm.runner.caches[0]
    assert cache.latent.dtype == torch.uint8
    for kind in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        values = cache.latent.view(kind).float()
        assert 0.009 < float(values.abs().min()) < float(values.abs().max()) < 2
        assert 0.4 < float((values > 0).float().mean()) < 0.6
    assert len(cache.index.view(torch.float32).unique()) > 100
