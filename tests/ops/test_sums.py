"""Sums along a row: one answer, whatever the kernel's layout."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

import triton
import triton.language as tl

from whorl.device import unavailable
from whorl.ops._sums_triton import row_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(bool(unavailable("triton", DEVICE, by_name=True)), reason="no Triton here")


@triton.jit
def _kernel(x_ptr, y_ptr, ROWS: tl.constexpr, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, LENGTH)[None, :]
    x = tl.load(x_ptr + rows * LENGTH + columns).to(tl.float32)
    tl.store(y_ptr + tl.arange(0, ROWS), row_sum(x, ROWS, LENGTH))


def tree(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same in numpy."""
    runs = max(1, x.shape[1] // 8)
    while x.shape[1] > runs:
        x = x[:, 0::2] + x[:, 1::2]
    while x.shape[1] > 32:
        x = x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :]
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x[:, 0]


@pytest.mark.parametrize("length", [1, 2, 8, 16, 128, 256, 1024, 4096])
@pytest.mark.parametrize("num_warps", [1, 4])
def test_the_order_is_the_one_written(length: int, num_warps: int) -> None:
    for rows, dtype in ((1, torch.float32), (4, torch.bfloat16)):
        x = torch.randn(rows, length).to(DEVICE, dtype)
        y = torch.empty(rows, device=DEVICE)
        _kernel[(1,)](x, y, ROWS=rows, LENGTH=length, num_warps=num_warps)
        assert np.array_equal(y.cpu().numpy(), tree(x.float().cpu().numpy()))
        if length >= 1024 and dtype == torch.float32:
            assert not np.array_equal(y.cpu().numpy(), x.cpu().numpy().cumsum(1)[:, -1])
