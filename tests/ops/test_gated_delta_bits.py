"""Gated delta layers have one arithmetic: a token's bits do not depend on how its sequence is cut and on the batch."""

import random

import pytest
import torch
from delta_runs import RULE, D, Values, draw, in_cuts, new_lanes, same
from torch import Tensor

from whorl import ops
from whorl.ops.gated_delta import CHUNK

LENGTH = 200
DTYPES = [torch.float32, torch.bfloat16]
ROW_BY_ROW = list(range(1, LENGTH + 1))
MIXED = [64, 65, 66, 70, 86, 102, 118, 127, 128, 144, 150, 166, 182, 192, 200]


def random_cuts(seed: int) -> list[int]:
    generator, cuts = random.Random(seed), [0]
    while cuts[-1] < LENGTH:
        start = cuts[-1]
        end = min(LENGTH, start + generator.randint(1, 90))
        cuts.append(min(end, start + CHUNK - start % CHUNK) if start % CHUNK else end)
    return cuts[1:]


CUTS = {"rows": ROW_BY_ROW, "chunks": [64, 128, 192, 200], "mixed": MIXED, "whole": [LENGTH]}
CUTS |= {f"random {seed}": random_cuts(seed) for seed in range(3)}


def packed(values: Values) -> Tensor:
    starts = torch.tensor([0, len(values["q"])], dtype=torch.int32)
    return ops.gated_delta(**values, starts=starts, scale=D**-0.5)


def written(states: Values) -> dict[str, Tensor]:
    """What a lane holds of 200 tokens: the state and the rows since token 192."""
    rows = {name: x[0, :, : LENGTH % CHUNK] for name, x in states.items() if name in RULE}
    return rows | {name: states[name][0] for name in ("state", "rounded")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_any_cut_gives_the_bits_of_training(cuts: list[int], dtype: torch.dtype) -> None:
    values, states, other = draw(LENGTH, dtype), new_lanes(1, dtype), new_lanes(1, dtype)
    assert same(in_cuts("rule", values, cuts, states), packed(values))
    in_cuts("rule", values, [LENGTH], other)
    expected = written(other)
    assert all(same(x, expected[name]) for name, x in written(states).items())
