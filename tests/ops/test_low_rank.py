"""Low-rank updates that rows choose: bits of a row, columns of a part, and what PEFT's own layer computes."""

import pytest
import torch
from torch import Tensor

from whorl import ops
from whorl.device import unavailable

BACKENDS = ["torch", *(name for name in ("cpp", "triton") if unavailable(name, "cpu", by_name=True) is None)]
ON_HOST = [name for name in BACKENDS if name != "triton"]
SIZES = [24, 8]


def drawn(rows: int, dtype: torch.dtype = torch.bfloat16, groups: int = 5, rank: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(1)
    width, inner = sum(SIZES), 40
    return {
        "y": torch.randn(rows, width).to(dtype),
        "x": torch.randn(rows, inner).to(dtype),
        "a": (torch.randn(groups, len(SIZES), rank, inner) * inner**-0.5).to(dtype),
        "b": (torch.randn(groups, width, rank) * rank**-0.5).to(dtype),
        "groups": (torch.arange(rows) * 7 % (groups + 1) - 1).int(),
        "ranks": torch.full((groups, len(SIZES)), rank).int(),
        "scales": torch.rand(groups, len(SIZES)) + 0.5,
    }


@pytest.mark.parametrize("backend", BACKENDS if torch.cuda.is_available() else ON_HOST)  # numpy interprets
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_does_not_depend_on_the_others(backend: str, dtype: torch.dtype) -> None:
    """Nor on their order, nor on the room that other updates make."""
    values = drawn(23, dtype)
    together = ops.low_rank(**values, sizes=SIZES, backend=backend)
    order = torch.randperm(23)
    rows = {name: values[name][order] for name in ("y", "x", "groups")}
    assert torch.equal(ops.low_rank(**{**values, **rows}, sizes=SIZES, backend=backend), together[order])
    for row in (0, 1, 9, 22):
        one = {name: values[name][row : row + 1] for name in ("y", "x", "groups")}
        assert torch.equal(ops.low_rank(**{**values, **one}, sizes=SIZES, backend=backend), together[row : row + 1])
    wide = {name: torch.nn.functional.pad(values[name], pad, value=3.0) for name, pad in _ROOM.items()}
    assert torch.equal(ops.low_rank(**{**values, **wide}, sizes=SIZES, backend=backend), together)


_ROOM = {"a": (0, 0, 0, 9), "b": (0, 9)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_an_update_are_copied(backend: str) -> None:
    values = drawn(19, torch.float32)
    actual = ops.low_rank(**values, sizes=SIZES, backend=backend)
    has_none = values["groups"] < 0
    assert torch.equal(actual[has_none], values["y"][has_none])
    assert not torch.equal(actual[~has_none], values["y"][~has_none])
    values["ranks"][:, 1] = 0
    actual = ops.low_rank(**values, sizes=SIZES, backend=backend)
    assert torch.equal(actual[:, SIZES[0] :], values["y"][:, SIZES[0] :])
    assert not torch.equal(actual[:, : SIZES[0]], values["y"][:, : SIZES[0]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_rounds_where_a_layer_of_peft_does(backend: str, dtype: torch.dtype) -> None:
    """result + lora_B(lora_A(x)) * scaling, with the products of `linear`."""
    values = drawn(6, dtype, groups=1)
    values["groups"].zero_()
    x, a, b = values["x"], values["a"][0], values["b"][0]
    same = backend if backend in ON_HOST else "torch"
    first = 0
    for part, size in enumerate(SIZES):
        columns = slice(first, first + size)
        hidden = ops.linear(x, a[part].contiguous(), backend=same)
        update = ops.linear(hidden, b[columns].contiguous(), backend=same) * float(values["scales"][0, part])
        expected = values["y"][:, columns] + update
        actual = ops.low_rank(**values, sizes=SIZES, backend=backend)[:, columns]
        if backend in ON_HOST:
            assert torch.equal(actual, expected)
        else:  # the interpreter's products are numpy's
            torch.testing.assert_close(actual, expected)
        first += size


def test_wrong_arguments_are_errors() -> None:
    values = drawn(3)
    with pytest.raises(ValueError, match=r"low_rank: sizes are \[24\], expected 2 positive numbers with a sum of 32"):
        ops.low_rank(**values, sizes=[24])
    values["ranks"][0, 0] = 9
    with pytest.raises(ValueError, match=r"low_rank: ranks are .*, expected 0 to 8"):
        ops.low_rank(**values, sizes=SIZES)
