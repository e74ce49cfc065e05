"""The cost model: bytes and steps of the textbook, choices that follow, and what is measured on real ranks."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import shared

from whorl.passes import cost
from whorl.passes.cost import CHOICES, TABLE, CostModel, Range, Traffic

BF16 = torch.bfloat16
WIDE = Traffic.of_norm(8192, BF16)
WIRE = CostModel(name="wire", alpha=0.0, bandwidth=1.0)  # a second a byte: seconds are bytes sent


@pytest.mark.parametrize("world", [2, 4, 8, 16])
def test_bytes_are_those_of_a_ring(world: int) -> None:
    share = (world - 1) / world
    assert WIRE.all_reduce(1000, world) == pytest.approx(2 * share * 1000)
    assert WIRE.reduce_scatter(1000, world) == WIRE.all_gather(1000, world) == pytest.approx(share * 1000)


@pytest.mark.parametrize(
    ("gathered", "choice", "ratio"), [(7168, "sp", 1.0), (7168, "sp_int8", 0.75), (2112, "sp", 0.647)]
)
def test_bytes_against_an_all_reduce(gathered: int, choice: cost.Choice, ratio: float) -> None:
    """1.00, 0.75 and, gathering DeepSeek's 2112 latent channels of 7168, 0.65 of an all-reduce."""
    traffic = Traffic.of_norm(7168, BF16, gathered)
    actual = WIRE.seconds(choice, 4096, 8, traffic) / WIRE.seconds("all_reduce", 4096, 8, traffic)
    assert actual == pytest.approx(ratio, abs=1e-3)


def test_steps() -> None:
    ring = CostModel(name="ring", alpha=1.0, bandwidth=math.inf)
    assert (ring.all_reduce(1, 8), ring.reduce_scatter(1, 8), ring.all_gather(1, 8)) == (14, 7, 7)
    mesh = CostModel(name="mesh", alpha=1.0, bandwidth=math.inf, is_direct=True)
    assert (mesh.all_reduce(1, 8), mesh.reduce_scatter(1, 8)) == (2, 1)


def test_one_shot_wins_when_small_and_loses_when_large() -> None:
    model = CostModel(name="x", alpha=1.0, bandwidth=1.0, has_one_shot=True)
    assert model.all_reduce(0.1, 4) == pytest.approx(1 + 3 * 0.1)
    assert model.all_reduce(1000, 4) == pytest.approx(6 + 1.5 * 1000)


def test_a_mesh_is_as_fast_as_its_links() -> None:
    hccs = TABLE["ascend_910_hccs"]
    num_bytes = 1e9
    for world in (2, 4, 8):  # each link carries one part of p
        assert hccs.reduce_scatter(num_bytes, world) == pytest.approx(hccs.launch + num_bytes / world / 28e9)
    sent = 15 / 16 * num_bytes
    assert hccs.reduce_scatter(num_bytes, 16) == pytest.approx(hccs.launch + sent / (7 * 28e9)), (
        "of eight, 7 links each"
    )


def test_plain_sequence_parallelism_never_wins_by_itself() -> None:
    for model, world in itertools.product(TABLE.values(), (2, 4, 8, 16)):
        parts = model.ranges(world, WIDE, allowed=("all_reduce", "sp"))
        assert parts == (Range(start=1, end=None, choice="all_reduce"),)
        assert model.threshold(world, WIDE, allowed=("all_reduce", "sp")) is None


def test_the_model_gives_the_threshold_that_ascend_found() -> None:
    """About 1000 tokens, by experience, on servers of eight."""
    threshold = TABLE["ascend_910_hccs"].threshold(8, WIDE)
    assert threshold is not None
    assert 500 < threshold < 2000


def test_nvlink_with_summing_switches_needs_more_than_eight_bits() -> None:
    """70B at TP 8 on NVLink was measured at 0.98x (vllm#37489): bytes alone do not pay there, an MLA latent does."""
    model = TABLE["h200_nvlink"]
    assert model.threshold(8, WIDE) is None
    assert model.threshold(8, Traffic.of_norm(7168, BF16, 2112)) is not None


@given(
    alpha=st.floats(0, 1e-3),
    launch=st.floats(0, 1e-3),
    bandwidth=st.floats(1e6, 1e12),
    world=st.integers(2, 16),
    hidden=st.integers(64, 16384),
    gathered=st.integers(64, 16384),
    quantize=st.floats(0, 1e-9),
    direct=st.booleans(),
    one_shot=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_ranges_agree_with_choices(
    alpha: float,
    launch: float,
    bandwidth: float,
    world: int,
    hidden: int,
    gathered: int,
    quantize: float,
    direct: bool,
    one_shot: bool,
) -> None:
    model = CostModel(
        name="any",
        alpha=alpha,
        launch=launch,
        bandwidth=bandwidth,
        is_direct=direct,
        has_one_shot=one_shot,
        quantize=quantize,
    )
    traffic = Traffic.of_norm(hidden, BF16, gathered)
    most = 1 << 14
    parts = model.ranges(world, traffic, most=most)
    assert parts[0].start == 1
    assert parts[-1].end is None
    for part, after in itertools.pairwise(parts):
        assert part.end == after.start - 1
        assert part.choice != after.choice, "neighbours that agree are merged"
    for part in parts:
        for tokens in {part.start, part.end or most, (part.start + (part.end or most)) // 2}:
            took = model.seconds(part.choice, tokens, world, traffic)
            best = min(model.seconds(c, tokens, world, traffic) for c in CHOICES)
            assert took <= best * (1 + 1e-9) + 1e-15
    threshold = model.threshold(world, traffic, most=most)
    if threshold is None:
        assert parts[-1].choice == "all_reduce"
    else:
        assert all(model.choose(t, world, traffic) != "all_reduce" for t in (threshold, most))
        assert threshold == 1 or model.choose(threshold - 1, world, traffic) == "all_reduce"


def test_a_tie_changes_nothing() -> None:
    assert CostModel(name="free", alpha=0, bandwidth=math.inf).choose(4096, 8, WIDE) == "all_reduce"
    assert TABLE["pcie"].choose(4096, 1, WIDE) == "all_reduce"  # one rank: nothing to send
    assert TABLE["pcie"].choose(0, 8, WIDE) == "all_reduce"


def test_what_is_not_on_offer_is_not_chosen() -> None:
    plain = Traffic(reduced=(16384,), gathered=(16384,))
    assert TABLE["ethernet"].choose(4096, 4, plain) == "all_reduce"
    with pytest.raises(ValueError, match="no quantised gathers"):
        TABLE["ethernet"].seconds("sp_int8", 4096, 4, plain)


def test_an_unknown_link_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no link 'carrier pigeon' in the table\. Has: h200_nvlink, "):
        cost.table("carrier pigeon")


def test_a_fit_finds_the_line() -> None:
    seconds, a_byte = cost._fit([(b, 3e-4 + 2e-9 * b) for b in (1e4, 1e6, 1e7)])
    assert seconds == pytest.approx(3e-4)
    assert a_byte == pytest.approx(2e-9)


# ---- the bench


def test_a_fit_has_no_negative_start() -> None:
    """Points that curve upward: a line through them would begin below zero, and small messages would cost less."""
    seconds, a_byte = cost._fit([(1e3, 1e-6), (1e4, 2e-5), (1e5, 4e-4)])
    assert seconds == 0.0
    assert a_byte > 0


# ---- on ranks


def on_a_rank() -> dict[str, object]:
    world = dist.get_world_size()
    model = cost.measure(repeats=3)
    traffic = Traffic.of_norm(2048, BF16)
    return {
        "fitted": {what: list(line) for what, line in model.fitted.items()},
        "world": model.world,
        "seconds": {c: model.seconds(c, 2048, world, traffic) for c in CHOICES},
        "elsewhere": model.seconds("sp", 2048, world + 2, traffic),
    }


def test_measured_on_ranks() -> None:
    measured = shared(2).run(on_a_rank)
    assert measured[0] == measured[1], "every rank must choose alike"
    assert set(measured[0]["fitted"]) == {"all_reduce", "reduce_scatter", "all_gather", "all_gather_quantized"}
    assert all(line[1] > 0 for line in measured[0]["fitted"].values())
    assert all(1e-6 < s < 10 for s in (*measured[0]["seconds"].values(), measured[0]["elsewhere"]))
