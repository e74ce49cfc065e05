"""Sums of chunks of K: programs that share the chunks of a tile give the bits of one that adds them itself."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


from whorl import ops
from whorl.ops import _chunks_triton, linear_fp32_triton
from whorl.ops.quantised import packed_linear_triton
from whorl.ops.quantised.layout import packed_int4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, COLUMNS = 2500, 40  # whole chunks and a part of one
COUNTS = (1, 3, 16, 17, 40)  # up to 16 tokens programs share chunks under the interpreter


def fp32_values(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (max(COUNTS), LENGTH), "weight": (COLUMNS, LENGTH), "bias": (COLUMNS,)}
    return {n: torch.randn(shape, generator=generator).to(DEVICE, dtype) for n, shape in shapes.items()}


def fp32(values: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    return ops.linear(values["x"][:count], values["weight"], values["bias"], backend="triton")


def packed(count: int, columns: int = 128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    length = 2560
    codes = torch.randint(0, 16, (COLUMNS, length), generator=generator, dtype=torch.uint8)
    scales = torch.rand(COLUMNS, length // columns, generator=generator).to(DEVICE, torch.float16) / 8
    x = torch.randn(max(COUNTS), length, generator=generator).to(DEVICE, torch.float16)
    bias = torch.randn(COLUMNS, generator=generator).to(DEVICE, torch.float16)
    return ops.packed_linear(
        x[:count],
        packed_int4(codes).to(DEVICE),
        scales,
        None,
        bias,
        columns=columns,
        layout="int4_tiled",
        backend="triton",
    )


def launches(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[int]:
    """Record by how many programs tiles are shared."""
    programs: list[int] = []
    original = _chunks_triton.shared_chunks

    def shared_chunks(*args: Any) -> int:
        programs.append(original(*args))
        return programs[-1]

    monkeypatch.setattr(module, "shared_chunks", shared_chunks)
    return programs


def test_fp32_rows_do_not_depend_on_who_adds_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    programs, values = launches(monkeypatch, linear_fp32_triton), fp32_values()
    whole = fp32(values, max(COUNTS))
    for count in COUNTS:
        assert torch.equal(fp32(values, count), whole[:count]), count
    if DEVICE == "cpu":
        assert programs == [1, 10, 10, 10, 1, 1]
    exact = torch.nn.functional.linear(*fp32_values(torch.float64).values())
    reference = ops.linear(**values, backend="torch")
    assert (whole - exact).abs().max() <= 2 * (reference - exact).abs().max()


@pytest.mark.slow
def test_packed_rows_do_not_depend_on_who_adds_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = launches(monkeypatch, packed_linear_triton)
    whole = packed(max(COUNTS))
    for count in COUNTS:
        assert torch.equal(packed(count), whole[:count]), count
    if DEVICE == "cpu":
        assert programs == [1, 3, 3, 3, 1, 1]


def test_it_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are added from last to first have other bits."""
    add, values = _chunks_triton.add_chunks, fp32_values()
    right = fp32(values, 3)
    monkeypatch.setattr(linear_fp32_triton, "add_chunks", lambda parts, *rest: add(parts.flip(0).contiguous(), *rest))
    assert not torch.equal(fp32(values, 3), right)
