"""With sequence parallelism and without, the same bits: models, random graphs, any number of tokens, on gloo ranks."""

import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from passes_cases import (
    another_graph,
    compiled_dtensor,
    compiled_toy,
    gated_in_bf16,
    guarded_toy,
    only_rank_0_compiles,
    probed_inputs,
    run_model,
    run_program,
    wire_against_report,
)
from passes_models import Shape
from passes_programs import STEPS
from passes_rows import C, run_masked
from ranks import shared

MODELS = {
    "llama": Shape(layers=1),
    "llama-bf16": Shape(layers=1, dtype=torch.bfloat16),
    "qwen3": Shape(layers=1, kind="qwen3", eps=1e-5),
    "qwen3-int8": Shape(kind="qwen3", int8=True),
    "qwen3-moe": Shape(layers=1, kind="qwen3", experts=8, exact=True),
    "qwen3-moe-expert-parallel": Shape(kind="qwen3", experts=8, expert_parallel=True, exact=True),
    "qwen3-vl": Shape(layers=1, kind="qwen3", vl=True),
    "qwen3-vl-int8": Shape(kind="qwen3", vl=True, int8=True),
    "deepseek-mla": Shape(kind="mla", exact=True),
    "deepseek-mla-moe-bf16": Shape(layers=1, kind="mla", experts=8, exact=True, dtype=torch.bfloat16),
}
RATIOS = {"qwen3-int8": 0.75, "qwen3-vl-int8": 0.8, "deepseek-mla": 0.96, "qwen3-moe-expert-parallel": 0.9}


def equal(size: int, shape: Shape, tokens: tuple[int, ...], dynamic: bool = False, **options: Any) -> dict[str, Any]:
    results = shared(size).run(run_model, shape, tokens, dynamic, options, timeout=300)
    assert all(each["equal"] for each in results), results[0]
    assert len({each["hash"] for each in results}) == 1
    assert results[0]["rewrites"] > 0
    return results[0]


# The others have what they show beside something else.
QUICK = {"llama", "qwen3-int8", "qwen3-moe-expert-parallel", "qwen3-vl-int8", "deepseek-mla", "deepseek-mla-moe-bf16"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_models(name: str) -> None:
    result = equal(2, MODELS[name], (7,))
    assert result["ratio"] <= RATIOS.get(name, 1.0) + 1e-3
    assert result["exactness"] == "bitwise"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_on_four_ranks(name: str) -> None:
    """A product runs on a rank's rows alone: with ours a row has its bits on every machine, with aten's on some."""
    shape = MODELS[name]
    wide = {"kv_heads": 4, "hidden": 64, "heads": 8, "layers": 2, "exact": True}
    equal(4, Shape(**{**vars(shape), **wide}), (13, 8), dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "mla"])
def test_real_widths(kind: str, dtype: torch.dtype) -> None:
    """Hidden sizes of Qwen3 (2048 and up) and DeepSeek's latent next to them."""
    shape = Shape(
        kind=kind, hidden=2048, inner=1024, heads=4, head_dim=128, latent=512, layers=1, exact=True, dtype=dtype
    )
    equal(2, shape, (33,))


@pytest.mark.slow
def test_any_number_of_tokens() -> None:
    """One graph with symbolic tokens: none, one, fewer than ranks, odd, even."""
    equal(2, Shape(kind="qwen3", vl=True, int8=True, layers=1), (8, 7, 33, 3, 2, 1, 0), dynamic=True)


@pytest.mark.parametrize("tokens", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_fixed_small_numbers_of_tokens(tokens: int) -> None:
    equal(2, Shape(layers=1), (tokens,))


def test_aten_products_are_bounded() -> None:
    """A product of aten's that sees fewer rows may differ in its last bits, and the report says so."""
    result = shared(2).run(run_model, Shape(kind="mla", hidden=64, latent=8), (33,), False, {})[0]
    assert result["gemms"]
    assert "does not depend on the rows beside it" in result["exactness"]
    assert result["error"] <= 16 * torch.finfo(torch.float32).eps * result["scale"]


@pytest.mark.parametrize("format", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_quantised_gather(format: str) -> None:
    """Gathering in 8 bits rounds each activation by half a step of its row's scale; the result moves by little."""
    shape = Shape(kind="qwen3", hidden=128, layers=2, vl=True)
    results = shared(2).run(run_model, shape, (9,), False, {"quantize": format})
    assert not results[0]["equal"]
    assert len({each["error"] for each in results}) == 1, "every rank rounds alike"
    # int8: half of 1/127 a gather, fp8: 1/16; four gathers behind norms
    assert results[0]["error"] <= {"int8": 0.04, "fp8": 0.2}[format] * results[0]["scale"]
    assert results[0]["ratio"] < 0.75
    assert results[0]["exactness"].startswith("rounds")
    assert results[0]["gathers"] == [(format, 128 + 4)] * 4


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=3, max_size=9), tokens=st.integers(0, 9))
def test_random_graphs(steps: list[str], tokens: int) -> None:
    check_program(2, steps, tokens)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=3, max_size=16), tokens=st.integers(0, 19))
def test_random_graphs_on_four_ranks(steps: list[str], tokens: int) -> None:
    check_program(4, steps, tokens)


def check_program(size: int, steps: list[str], tokens: int) -> None:
    results = shared(size).run(run_program, steps, tokens)
    assert all(each["equal"] for each in results), (steps, tokens, results[0])
    assert results[0]["ratio"] <= 1 + 1e-9, "a rewrite never sends more"


@pytest.mark.parametrize(
    ("name", "shape", "chosen", "sliced"),
    [
        ("added", (2, 7), 5, 3),  # the residual, the mask, and what is taken where it is true
        ("added", (7,), 1, 3),
        ("scaled", (7,), 3, 4),
        ("replaced", (7,), 3, 3),
        ("scattered", (2, 7), 5, 3),
    ],
)
def test_rows_chosen_by_a_mask(name: str, shape: tuple[int, ...], chosen: int, sliced: int) -> None:
    for result in shared(2).run(run_masked, name, shape, chosen):
        assert result["equal"]
        assert result["gathers"] == [("float32", 4 * C)]
        assert result["kinds"]["ordered_reduce_scatter"] == result["kinds"]["add_rms_norm"] == 1
        assert len(result["sliced"]) == sliced


# ---- through torch.compile


def test_one_capture_two_graphs() -> None:
    """A toy of a reader's own: a chain nobody has a pattern for, an unusual epsilon, odd numbers of tokens."""
    results = shared(2).run(compiled_toy, (41, 31, 32, 5, 33), "eager", 32)
    assert all(each["equal"] for each in results), results[0]
    assert results[0]["runs"] == ["rewritten", "plain", "rewritten", "plain", "rewritten"]
    assert results[0]["captures"] == 1
    assert results[0]["rewrites"] == 1


def test_the_threshold_is_measured_and_the_same_on_every_rank() -> None:
    results = shared(2).run(compiled_toy, (5, 9), "eager", "auto")
    assert all(each["equal"] for each in results), results[0]
    assert results[0]["text"] == results[1]["text"]
    assert "predicted: communication" in results[0]["text"]


def test_the_capture_gets_no_guard() -> None:
    result = shared(2).run(guarded_toy)[0]
    assert result["without"]
    assert result["with"] == result["without"]


@pytest.mark.slow
def test_inductor_rounds_both_graphs_alike() -> None:
    """Left to itself it keeps bf16 in fp32 inside a kernel, and rounds where a graph is cut."""
    for result in shared(2).run(gated_in_bf16, 7, timeout=600):
        assert result["runs"] == ["rewritten", "plain", "rewritten"]
        assert result["equal"] == [True, True]


@pytest.mark.slow
def test_inductor() -> None:
    """The toy, compiled to machine code."""
    results = shared(2).run(compiled_toy, (11, 3, 2, 16), "inductor", 3, timeout=600)
    assert all(each["equal"] for each in results), results[0]
    assert results[0]["runs"] == ["rewritten", "rewritten", "plain", "rewritten"]
    assert results[0]["captures"] == 1


def test_a_dtensor_model_is_captured_and_rewritten() -> None:
    results = shared(2).run(compiled_dtensor, 7)
    assert all(each["equal"] for each in results), results[0]
    assert results[0]["rewrites"] == 2
    assert results[0]["close_to_one_process"]


# ---- ranks that disagree


def test_different_graphs_stop_with_an_error() -> None:
    outcomes = shared(2).outcomes(another_graph)
    assert all(status == "error" for status, _, _ in outcomes), outcomes
    assert all("the captured graph is not the same on all ranks: hashes" in message for _, message, _ in outcomes)


def test_a_rank_that_does_not_come_is_an_error() -> None:
    alone, absent = shared(2).outcomes(only_rank_0_compiles)
    assert alone[0] == "error"
    assert "waited 2 s for ranks [1] to publish their captured graph" in alone[1]
    assert absent[0] == "ok"


def test_weights_are_compared_and_what_is_written_to_is_not_trusted() -> None:
    first, second = shared(2).run(probed_inputs)
    assert first == second
    assert first["probe"] == {"sharded": "varying", "whole": "replicated", "empty": "varying", "norm": "replicated"}
    assert first["written"] == "varying", "a buffer that the graph writes to was equal only by chance"
    assert first["ids"] == "replicated"


def test_bytes_on_the_wire_are_those_of_the_report() -> None:
    """What the kernel counts on gloo's sockets, against the report; gloo adds a few dozen bytes a message."""
    for name, (sent, said) in shared(2).run(wire_against_report, 512)[0].items():
        if sent is None and sys.platform != "linux":
            pytest.skip(f"{sys.platform} does not count the bytes of a socket")
        assert said <= sent <= 1.02 * said + 4096, (name, sent, said)
