"""Products of few rows on Hopper have the bits of the other kernels: with the norm inside or not, read ahead or not."""

import contextlib
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
SIZES = [(2048, 5120), (2048, 128), (4096, 2048), (1024, 4096), (1024, 2064), (3072, 1024), (512, 100), (2048, 6336)]
SIZES += [(1536, 2120), (2048, 4130), (1024, 6144), (1024, 8000)]  # programs of 32, 32, 48 and 64 rows of the weight
# Through the ring: one to four tiles for each program, and a last tile that is partly filled.
RING = [(4096, 6144), (4096, 24576), (12288, 4096), (2560, 9728), (256, 2112), (4096, 6147), (2048, 151936)]
RING += [(2880, 5120), (2880, 32), (320, 2112)]  # a last turn with fewer tiles


@pytest.fixture(scope="module")
def kernels() -> Any:
    from whorl.ops import few_rows_hopper_triton

    return few_rows_hopper_triton


def drawn(count: int, length: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    shapes = (count, length), (count, length), (length,), (columns, length)
    scales = 1.0, 3.0, 0.1, length**-0.5
    x, residual, norm, weight = (
        scale * torch.randn(*shape, device="cuda") for shape, scale in zip(shapes, scales, strict=True)
    )
    return tuple(t.to(dtype) for t in (x, residual, 1 + norm, weight))


def plain(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """By kernels that know nothing of few rows: those of 17, of which the first count."""
    from whorl import ops

    def more(t: torch.Tensor) -> torch.Tensor:
        return torch.cat((t, t.new_zeros(17 - len(t), t.shape[1])))

    normed, total = ops.add_rms_norm(more(x), more(residual), norm, backend="triton")
    y = ops.linear(normed, weight, backend="triton")
    return [t[: len(x)] for t in (y, normed, total)]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bits(dtype: torch.dtype, count: int) -> None:
    from whorl import ops
    from whorl.device import ahead

    torch.manual_seed(count)
    for length, columns in SIZES + RING:
        inputs = drawn(count, length, columns, dtype)
        expected, bias = plain(*inputs), torch.linspace(-3, 3, columns, device="cuda", dtype=dtype)
        rows = torch.cat((expected[1], expected[1].new_zeros(17 - count, length)))
        more = ops.linear(rows, inputs[3], bias, backend="triton")
        for step in (contextlib.nullcontext(), ahead()):
            with step:
                actual = ops.norm_linear(*inputs, backend="triton")
                y = ops.linear(expected[1], inputs[3], backend="triton")
                biased = ops.linear(expected[1], inputs[3], bias, backend="triton")
            assert torch.equal(biased, more[:count]), (length, columns, count)
            for a, b in zip((*actual, y), (*expected, expected[0]), strict=True):
                assert torch.equal(a, b), (length, columns, count)


def test_which_kernel_takes_what(kernels: Any) -> None:
    """One token of Qwen3-30B-A3B: all of its products between norms and experts."""
    x, _, _, qkv = drawn(1, 2048, 5120, torch.bfloat16)
    wide, _, _, out = drawn(1, 4096, 2048, torch.bfloat16)
    assert kernels.fits_one_warp(x, qkv)
    assert kernels.fits_warpgroup(x, qkv, normed=True)
    assert kernels.fits_warpgroup(wide, out)
    assert kernels.fits_warpgroup(x, qkv[:128], normed=True)
    for rows in (2, 8):  # the norm runs before them
        assert kernels.fits_warpgroup(torch.cat([x] * rows), qkv)
        assert kernels.fits_warpgroup(torch.cat([wide] * rows), out)
        assert not kernels.fits_warpgroup(torch.cat([x] * rows), qkv[:128], normed=True)
    short, _, _, both = drawn(1, 1024, 6144, torch.bfloat16)
    assert kernels.fits_one_warp(short, both)
    assert not kernels.fits_warpgroup(short, both, normed=True)
    assert not kernels.fits_warpgroup(torch.cat([wide] * 9), out)
    assert not kernels.fits_warpgroup(torch.cat([x] * 8)[:, :-1], qkv[:, :-1])


def test_which_products_flow_through_the_ring(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl import ops

    ring, taken = kernels.few_rows_large_hopper_triton, []
    linear = ring.linear
    monkeypatch.setattr(ring, "linear", lambda x, weight, bias: taken.append(tuple(weight.shape)) or linear(x, weight))
    for count in (1, 8):
        taken.clear()
        for length, columns in RING:
            ops.linear(*drawn(count, length, columns, torch.bfloat16)[::3], backend="triton")
        assert taken == [(columns, length) for length, columns in RING]
    x, _, _, weight = drawn(9, 4096, 6144, torch.bfloat16)
    assert not ring.fits(x, weight)  # more rows than one instruction multiplies
    assert not ring.fits(x[:8, 1:257], weight[:, 1:257])  # not aligned
    assert not ring.fits(x[:8, :192], weight[:, :192])  # no whole slot
    assert not ring.fits(x[:8], weight[:1000])  # half of the multiprocessors would have nothing to do


def test_it_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of K from the end: another order, other bits."""
    from whorl import ops

    inputs = drawn(1, 2048, 5120, torch.bfloat16)
    x, residual, norm, weight = inputs
    turned = [torch.cat((t[..., 1024:], t[..., :1024]), -1) for t in (x, residual, norm, weight)]
    assert not torch.equal(ops.norm_linear(*turned, backend="triton")[0], plain(*inputs)[0])
