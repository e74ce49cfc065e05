"""What a signature states of an operator's arguments: sizes, dtypes, ranges, and the errors and fakes that follow."""

import re
from typing import Annotated, Any, Literal

import pytest
import torch
from torch import Tensor

from whorl.ops import OPS
from whorl.ops._op import operator
from whorl.ops._spec import Expression, spec_of


@operator()
def spread(
    q: Annotated[Tensor, "[T, G*HK, D] float"],
    k: Annotated[Tensor, "[S, HK, D] q"],
    ids: Annotated[Tensor, "[T + 1] int, from -1 to S - 1"],
    scales: Annotated[Tensor | None, "[HK] fp32, contiguous, constant"] = None,
    slots: Annotated[Tensor | None, "[M>0] int32, up to S"] = None,
    *,
    width: int = 2,
    share: Annotated[float, "> 0"] = 1.0,
    first: Annotated[int, "0 to width"] = 0,
) -> tuple[Annotated[Tensor, "[T, G*HK, width] q"], Annotated[Tensor, "[S, HK*D - 1] int32"]]:
    """A contract with all that a signature can state."""
    return q.new_zeros(*q.shape[:2], width), k.new_zeros(len(k), k.shape[1] * k.shape[2] - 1, dtype=torch.int32)


del OPS["spread"]


def arguments(**changes: Any) -> dict[str, Any]:
    ids = torch.tensor([0, 1, -1, 6])
    return {"q": torch.zeros(3, 4, 8), "k": torch.zeros(7, 2, 8), "ids": ids, "scales": torch.ones(2)} | changes


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"q": torch.zeros(3, 8)}, "q is [3, 8] torch.float32, expected [T, G*HK, D] floating point"),
    "dtype": ({"k": torch.zeros(7, 2, 8).half()}, "k is [7, 2, 8] torch.float16, expected [7, 2, 8] torch.float32"),
    "a letter": ({"k": torch.zeros(7, 2, 9)}, "k is [7, 2, 9] torch.float32, expected [S, HK, 8] torch.float32"),
    "a sum": ({"ids": torch.zeros(3).long()}, "ids is [3] torch.int64, expected [4] torch.int32 or torch.int64"),
    "no multiple": (
        {"k": torch.zeros(7, 3, 8), "scales": None},
        "q is [3, 4, 8] torch.float32, expected [3, G*3, 8] floating point",
    ),
    "no floating point dtype": ({"q": torch.zeros(3, 4, 8).int()}, "q is [3, 4, 8] torch.int32, expected"),
    "above": ({"ids": torch.tensor([0, 1, 7, 0])}, "ids has values from 0 to 7, expected -1 to 6"),
    "below": ({"ids": torch.tensor([0, 1, -2, 0])}, "ids has values from -2 to 1, expected -1 to 6"),
    "what may be absent": ({"scales": torch.ones(3)}, "scales is [3] torch.float32, expected [2] torch.float32"),
    "absent": ({"k": None}, "k is None, expected a tensor"),
    "strides": ({"scales": torch.ones(4)[::2]}, "scales has strides [2], expected a contiguous tensor"),
    "gradient": ({"scales": torch.ones(2).requires_grad_()}, "scales requires a gradient, expected a constant"),
    "empty": ({"slots": torch.zeros(0).int()}, "slots is [0] torch.int32, expected [M > 0] torch.int32"),
    "past the end": ({"slots": torch.tensor([-9, 8]).int()}, "slots has values from -9 to 8, expected 7 at most"),
    "number": ({"share": 0.0}, "share is 0.0, expected a positive number"),
    "NaN": ({"share": float("nan")}, "share is nan, expected a positive number"),
    "range": ({"first": 3}, "first is 3, expected 0 to 2"),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_error_says_what_was_found_and_what_was_expected(what: str) -> None:
    changes, message = WRONG[what]
    with pytest.raises(ValueError, match=f"^spread: {re.escape(message)}"):
        spread(**arguments(**changes))


def test_what_fits_runs() -> None:
    spread(**arguments())
    spread(**arguments(scales=None))
    spread(**arguments(q=torch.zeros(0, 4, 8), ids=torch.tensor([0])))
    wide = {name: value.double() for name, value in arguments().items() if value.is_floating_point()}
    spread(**arguments(**wide))  # fp32 is fp64 beside tensors in fp64


def test_a_product_of_sizes_that_an_absent_argument_would_give_is_any_size() -> None:
    def grouped(
        q: Annotated[Tensor, "[T, G*HK] float"], k: Annotated[Tensor | None, "[T, HK] q"] = None
    ) -> Annotated[Tensor, "[T] q"]: ...

    spec = spec_of(grouped)
    spec.check({"q": torch.zeros(2, 6), "k": None})
    with pytest.raises(ValueError, match=r"grouped: q is \[2, 6\] .*, expected \[2, G\*4\]"):
        spec.check({"q": torch.zeros(2, 6), "k": torch.zeros(2, 4)})


def test_values_are_compared_in_every_call() -> None:
    values = arguments()
    spread(**values)
    values["ids"][0] = 7
    with pytest.raises(ValueError, match="ids has values from -1 to 7"):
        spread(**values)


def test_a_check_that_reads_no_values_runs_once_for_equal_shapes() -> None:
    checks: list[Tensor] = []

    @operator(check=lambda x, ids: checks.append(x))
    def keep(
        x: Annotated[Tensor, "[T] float"], ids: Annotated[Tensor, "[T] int, from 0 to T"]
    ) -> Annotated[Tensor, "[T] x"]:
        """x, where ids is read in every call."""
        return x.clone()

    del OPS["keep"]
    x, ids = torch.zeros(2), torch.tensor([0, 1])
    for _ in range(3):
        keep(x, ids)
    assert len(checks) == 1


def test_the_fake_follows_from_the_outputs() -> None:
    expected = spread(**arguments())
    fakes = spread(**{name: value.to("meta") for name, value in arguments().items()})
    assert [(f.shape, f.dtype) for f in fakes] == [(e.shape, e.dtype) for e in expected]


@operator(absent={1: "y"})
def looked_up(
    x: Annotated[Tensor, "[..., D] float"],
    y: Annotated[Tensor | None, "[..., E] x"],
    table: Annotated[Tensor, "[*P, D] x"],
    index: Annotated[Tensor, "[*P, 1] int"],
    *,
    order: Literal["up", None] = None,
) -> tuple[Annotated[Tensor, "[..., D] x"], Annotated[Tensor | None, "[..., E] x"]]:
    """A contract with two groups of leading dims, an absent output and an option that may be None."""
    return x.clone(), None if y is None else y.clone()


del OPS["looked_up"]


def test_leading_dims_of_a_name_are_the_same_ones() -> None:
    x, table = torch.zeros(5, 2, 8), torch.zeros(3, 4, 8)
    looked_up(x, None, table, torch.zeros(3, 4, 1).long())
    looked_up(x, x, table[0, 0], torch.zeros(1).long(), order="up")
    with pytest.raises(ValueError, match=re.escape("looked_up: table is [3, 4, 8] torch.float32, expected [3, 8] ")):
        looked_up(x, None, table, torch.zeros(3, 1).long())
    with pytest.raises(ValueError, match="looked_up: order is 'down', expected one of up, None"):
        looked_up(x, None, table, torch.zeros(3, 4, 1).long(), order="down")


@pytest.mark.parametrize("y", [None, torch.zeros(5, 3, device="meta")])
def test_the_fake_of_an_absent_output_is_none(y: Tensor | None) -> None:
    x, index = torch.zeros(5, 8, device="meta"), torch.zeros(2, 1, device="meta").long()
    first, second = looked_up(x, y, x[:2], index)
    assert first.shape == (5, 8)
    assert (second is None) == (y is None)
    assert y is None or second.shape == y.shape


def test_a_statement_that_cannot_be_read_is_refused_where_it_stands() -> None:
    def shapeless(x: Annotated[Tensor, "T, K float"]) -> Tensor: ...

    def divided(x: Annotated[Tensor, "[T / 2] float"]) -> Tensor: ...

    def unbounded(x: Tensor, eps: Annotated[float, "small"]) -> Tensor: ...

    for function, message in ((shapeless, "x is stated as"), (divided, "'T / 2' is no sum"), (unbounded, "'small'")):
        with pytest.raises(SyntaxError, match=message):
            spec_of(function)


@pytest.mark.parametrize(
    ("text", "sizes", "size", "expected"),
    [
        ("2*F", {}, 6, 3),
        ("2*F", {}, 7, None),
        ("(HQ + 2*HK)*D", {"HQ": 4, "HK": 1}, 48, 8),
        ("N - R", {"R": 3}, 5, 8),
        ("B + 1", {}, 0, None),
    ],
)
def test_a_size_is_solved_for_the_unknown_letter(
    text: str, sizes: dict[str, int], size: int, expected: int | None
) -> None:
    expression = Expression.parse(text)
    (unknown,) = set(expression.unknowns(sizes))
    known = dict(sizes)
    assert expression.solve(size, known) == (expected is not None)
    assert known.get(unknown) == expected
