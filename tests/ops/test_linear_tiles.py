"""Products on the CPU: a large one stands for several tiles only where it gives their bits."""

import importlib

import pytest
import torch

from whorl.ops import linear

# The module: in the package its name is the operator's.
TILES = importlib.import_module("whorl.ops.linear")


def test_rows_of_a_large_product_are_those_of_a_tile() -> None:
    x, weight = torch.randn(700, 768), torch.randn(320, 768)
    tiles = torch.cat([linear(part, weight) for part in x.split(1)])
    for count in (2, 16, 17, 33, 64, 65, 500, 700):
        assert torch.equal(linear(x[:count], weight), tiles[:count]), f"{count} rows"


def test_tiles_stay_apart_where_a_large_product_sums_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = TILES._sizes.__wrapped__
    arguments = torch.Size((16, 64)), torch.float32, "cpu", 1
    assert trial(*arguments)[-1] == TILES.TILE
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    assert trial(*arguments) == (TILES.TILE,)


# ---- weights in a library's order


def packed_weight(rows: int = 320, columns: int = 768) -> torch.Tensor:
    weight = torch.randn(rows, columns)
    TILES.pack(weight)
    return weight


@pytest.mark.parametrize("size", [(320, 768), (33, 40), (1000, 1536)])
def test_a_packed_weight_has_the_bits_of_the_plain_one(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TILES, "free_memory", lambda: None)
    weight, x = packed_weight(*size), torch.randn(530, size[1])
    fit = [library for library in TILES.LIBRARIES if library.is_available() and library.has_equal_bits(weight)]
    assert [weight.packed.library] == fit[:1] if fit else not hasattr(weight, "packed")
    plain = weight.clone()
    assert not hasattr(plain, "packed")
    for count in (1, 2, 3, 7, 16, 17, 100, 530):
        assert torch.equal(linear(x[:count], weight), linear(x[:count], plain)), f"{count} rows"


def test_a_packed_weight_that_changes_is_not_used() -> None:
    weight, x = packed_weight(), torch.randn(2, 768)
    weight.mul_(2)
    assert torch.equal(linear(x, weight), linear(x, weight.clone()))
    weight = packed_weight()
    weight.data = torch.randn(320, 768)
    assert torch.equal(linear(x, weight), linear(x, weight.clone()))


def other_library(error: float) -> object:
    def multiply(x: torch.Tensor, ordered: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = TILES.multiply(x, ordered)
        y[..., -1] *= 1 + error
        return y

    return TILES.Library(f"other by {error}", is_available=lambda: True, order=torch.clone, multiply=multiply)


@pytest.mark.parametrize("error", [0.0, 1e-6])
def test_a_library_is_used_only_where_its_bits_are_equal(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TILES, "LIBRARIES", (other_library(error),))
    monkeypatch.setattr(TILES._STORE, "outcome", lambda name, device, trial: trial())
    assert hasattr(packed_weight(), "packed") is (error == 0)


def test_nothing_is_packed_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TILES, "LIBRARIES", (other_library(0.0),))
    monkeypatch.setattr(TILES._STORE, "outcome", lambda name, device, trial: trial())
    TILES._warn_of_memory.cache_clear()
    size = 320 * 768 * 4
    for free, is_packed in ((None, True), (TILES.RESERVE + size, True), (TILES.RESERVE + size - 1, False), (0, False)):
        monkeypatch.setattr(TILES, "free_memory", lambda free=free: free)
        assert hasattr(packed_weight(), "packed") is is_packed
    assert caplog.text.count("decoding is slower") == 1


def test_other_devices_dtypes_and_inference_tensors_are_not_packed() -> None:
    with torch.inference_mode():
        frozen = torch.randn(8, 8)
    for weight in (frozen, torch.randn(8, 8).bfloat16(), torch.randn(8, 8, device="meta")):
        TILES.pack(weight)
        assert not hasattr(weight, "packed")
