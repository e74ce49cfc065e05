"""What users of other engines report of batch invariance does not happen here."""

from typing import Any

import pytest
import torch
from kernels import without_cpu_kernels
from schedules import tiny

from bench.reported_failures import FAILURES
from whorl import ops
from whorl.engine.llm import LLM
from whorl.models.qwen3 import Qwen3


def engines(dtype: torch.dtype) -> Any:
    model = tiny(Qwen3, dtype, num_experts=8)
    settings = {"device": "cpu", "num_blocks": 512, "block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return lambda **changes: LLM(model=model, **{**settings, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAILURES)
def test_reported_failures(name: str, dtype: torch.dtype) -> None:
    assert FAILURES[name](engines(dtype)) == 0


@pytest.mark.parametrize("name", [name for name in FAILURES if "44" in name])
def test_they_would_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own products, which sum a row alone in another order than a row among others."""
    plain = lambda x, weight, bias=None: torch.nn.functional.linear(x, weight, bias)  # noqa: E731
    monkeypatch.setattr(ops.linear, "reference", plain)
    with without_cpu_kernels():
        assert FAILURES[name](engines(torch.float32)) > 0
