"""Faults that leave results as accurate as they were, and change their bits: the proofs of one arithmetic notice."""

from pathlib import Path

import pytest
import torch
from planted import plant
from torch import Tensor

from whorl.device import is_interpreting
from whorl.ops import OPS, linear, paged_attention

LINEAR = "whorl.ops.linear_triton"
DECODE, FOLD = (f"whorl.ops.attention.{name}_triton" for name in ("decode", "fold"))
LOOP = "    for start in range(0, K, BLOCK_K):\n        k = start + tl.arange(0, BLOCK_K)\n        if EVEN:"


@pytest.fixture
def device() -> str:
    return "cpu" if is_interpreting() else "cuda"


def attend(queries: int, device: str, dtype: torch.dtype, sequences: int = 1, **changes: int) -> Tensor:
    """The last query of sequences of 1024 keys, computed among as many; up to 16 are decoded."""
    torch.manual_seed(0)
    shape = {"heads": 4, "kv_heads": 2, "dim": 32, "block": 16} | changes
    sizes = {"queries": (17,) * sequences, "contexts": (1024,) * sequences}
    values = OPS["paged_attention"].make(**sizes, **shape, dtype=dtype, device=device)
    q = values["q"].unflatten(0, (sequences, 17))[:, -queries:].flatten(0, 1).contiguous()
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device) * queries
    values |= {"q": q, "query_starts": starts}
    return paged_attention(**values, backend="triton")[queries - 1 :: queries]


def multiply(rows: int, device: str) -> Tensor:
    """The first row of a product, computed among as many; up to 16 stand beside the weight's.

    Two large numbers near the beginning cancel: what was added up before them is rounded away, and what comes after
    is not.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(40, 1024), torch.randn(64, 1024)
    x[:, 0], x[:, 40], weight[:, 0], weight[:, 40] = 1e7, -1e7, 1, 1
    x, weight = x.to(device).bfloat16(), weight.to(device).bfloat16()
    return linear(x[:rows].contiguous(), weight, backend="triton")[0]


def test_another_order_of_k(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(multiply(12, device), multiply(40, device))
    turned = LOOP.replace("k = start", "k = K - BLOCK_K - start")
    plant(LINEAR, LOOP, turned, 1, tmp_path, monkeypatch)
    assert not torch.equal(multiply(12, device), multiply(40, device))


@pytest.mark.slow
def test_another_order_of_cuts(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attend(17, device, torch.float32)
    assert torch.equal(attend(1, device, torch.float32), whole)
    stored = "at = row * cuts + "
    plant(DECODE, f"{stored}i", f"{stored}tl.cdiv(end, CUT) - 1 - i", 1, tmp_path, monkeypatch)
    actual = attend(1, device, torch.float32)
    assert not torch.equal(actual, whole)
    torch.testing.assert_close(actual, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_product_and_a_sum_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contraction: of two products that are added one is rounded; the interpreter rounds both.

    `fold_stored` with its sides changed rounds the other. It is so little that few of many results show it in 16 bits.
    """
    many = {"sequences": 16, "heads": 32, "kv_heads": 4, "dim": 128}
    whole = attend(17, "cuda", torch.float16, **many)
    assert torch.equal(attend(1, "cuda", torch.float16, **many), whole)
    written = "tl.fma(cut_outs[ahead], cut_add, out * cut_keep)"
    plant(FOLD, written, "tl.fma(out, cut_keep, cut_outs[ahead] * cut_add)", 1, tmp_path, monkeypatch)
    actual = attend(1, "cuda", torch.float16, **many)
    assert not torch.equal(actual, whole)
    torch.testing.assert_close(actual, whole, rtol=0.002, atol=0.002)
