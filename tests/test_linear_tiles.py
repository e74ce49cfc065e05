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
