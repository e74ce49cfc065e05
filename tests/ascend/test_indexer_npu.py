"""The indexer's losses on Ascend: when one fused call computes them, and when it would not compute the same.

The vendor's formulas stand behind its names here; test_torch_npu.py puts them behind the real schemas.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from npu import losses, sparse_kernels
from npu.here import cpu_is_npu

from whorl import device as devices
from whorl.ops import _torch_npu
from whorl.ops.indexer import kl_torch_npu


@pytest.fixture
def npu_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """CPU tensors as if they were on an NPU, the vendor's formulas behind its names; which of them are called."""
    called: list[str] = []
    monkeypatch.setattr(devices, "is_installed", lambda package: package == "torch_npu")
    monkeypatch.setattr(_torch_npu, "missing", lambda name, **_: None)
    monkeypatch.setattr(
        _torch_npu,
        "call",
        lambda name, **arguments: (called.append(name), sparse_kernels.KERNELS[name](**arguments))[1],
    )
    with cpu_is_npu():
        yield called


def absorbed(name: str = "selected keys", tokens: int = 7) -> dict[str, Any]:
    return losses.inputs(name, tokens, 12)


def test_a_causal_choice_is_one_call_on_the_npu(npu_here: list[str]) -> None:
    losses.gradients(absorbed())
    losses.gradients(absorbed("visible keys"))
    assert npu_here == [
        "npu_sparse_lightning_indexer_grad_kl_loss",
        "npu_dense_lightning_indexer_softmax_lse",
        "npu_dense_lightning_indexer_grad_kl_loss",
    ]


@pytest.mark.parametrize("why", ["later keys", "an empty row", "more queries than keys", "a fixed order", "ranks"])
def test_what_the_npu_does_not_compute_is_computed_here(why: str, npu_here: list[str]) -> None:
    """Its fused loss is causal, the last query at the last key, and says nothing of rows without keys."""
    values, options = absorbed(tokens=13 if why == "more queries than keys" else 7), {}
    if why == "later keys":
        values["indices"][0, :6] = torch.arange(6, 12)
    if why == "an empty row":
        values["indices"][2] = -1
    if why == "a fixed order":
        options = {"deterministic": True}
    if why == "ranks":
        options = {"reduce_target": lambda target: target}
    actual = losses.gradients(values, **options)
    assert npu_here == []
    for got, right in zip(actual, losses.gradients(values, deterministic=True), strict=True):
        assert torch.equal(got, right)


def test_dense_bounds_are_not_the_npus(npu_here: list[str]) -> None:
    values = absorbed("visible keys")
    losses.gradients(values, **losses.elsewhere("visible keys", values))
    assert npu_here == []


@pytest.mark.parametrize("name", losses.LOSSES)
def test_many_queries_go_to_the_npu_in_parts(name: str, npu_here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the keys up to its last query's own, so that what is causal stays so."""
    monkeypatch.setattr(kl_torch_npu, "MOST_QUERIES", 3)
    values = absorbed(name)
    got = losses.gradients(values)
    assert len(npu_here) == (6 if name == "visible keys" else 3)
    for g, e in zip(got, losses.gradients(values, **losses.elsewhere(name, values)), strict=True):
        torch.testing.assert_close(g, e, rtol=2e-2, atol=1e-2 * e.abs().max().item())
