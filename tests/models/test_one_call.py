"""The layers of a model in one call of the CPU kernels, against their operators one by one: the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from one_sequence import PROMPT, Runner
from schedules import tiny
from test_models import save
from torch import Tensor

from whorl.engine import weights
from whorl.models.llama import Llama
from whorl.models.one_call import OneCall
from whorl.models.qwen3 import Qwen3
from whorl.ops.cpu import library, moe
from whorl.ops.cpu.library import Routing

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"CPU kernels: {library.missing()}")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_experts": 8, "moe_intermediate_size": 64}
PARTS = (list(PROMPT), [PROMPT[:8], PROMPT[8:9], PROMPT[9:]], [[token] for token in PROMPT])


def packed_experts(folder: Path) -> Any:
    save(folder, Qwen3.tiny(**SIZES, num_experts_per_tok=3))
    return weights.load_model(folder, device="cpu", progress=False, quantize="cpu4")


MODELS = {
    "llama": lambda folder: tiny(Llama),
    "qwen3": lambda folder: tiny(Qwen3),
    "experts": lambda folder: tiny(Qwen3, num_experts=8, num_experts_per_tok=3),
    "experts with weights of all choices": lambda folder: tiny(Qwen3, num_experts=8, norm_topk_prob=True),
    "packed experts": packed_experts,
}


def run(model: Any, parts: Any) -> Tensor:
    runner = Runner(model)
    return torch.cat([runner.run(part if isinstance(part, list) else [part]) for part in parts])


@pytest.mark.parametrize("name", MODELS)
def test_one_call_has_the_bits_of_its_operators(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name](tmp_path)
    whole, *cut = (run(model, parts) for parts in ([PARTS[0]], *PARTS[1:]))
    assert model.one_call._stack is not None
    assert all(torch.equal(each, whole) for each in cut), "a token alone, or in another chunk, has other bits"
    monkeypatch.setattr(OneCall, "__call__", lambda self, step, caches: None)
    assert torch.equal(run(model, [PARTS[0]]), whole)


def test_a_hook_that_comes_later_is_called() -> None:
    model = tiny(Qwen3, num_experts=8, num_experts_per_tok=3)
    whole, seen = run(model, [PARTS[0]]), []
    hook = model.decoder.layers[0].mlp.experts.register_forward_pre_hook(lambda *_: seen.append(1))
    assert torch.equal(run(model, [PARTS[0]]), whole)
    assert seen
    hook.remove()


def test_a_fault_in_the_router_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the operator's choices are planted not to be divided by their sum."""
    model = tiny(Qwen3, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True)
    whole = run(model, [PARTS[0]])
    monkeypatch.setattr(OneCall, "__call__", lambda self, step, caches: None)
    monkeypatch.setattr(moe, "Routing", lambda *fields: Routing(*fields[:4], not fields[4], *fields[5:]))
    assert not torch.equal(run(model, [PARTS[0]]), whole)
