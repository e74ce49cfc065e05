"""Every pattern that vllm-ascend's passes had, and Flash Comm V1, on two ranks: found by rule, equal bit for bit."""

import itertools
from typing import Any

import pytest
import torch
from passes_cases import compiled_model
from passes_models import Shape
from passes_rows import LATENT, C, run_row
from ranks import shared

ALL = 4 * C  # bytes of a row in fp32


def row(name: str, tokens: int = 7, **options: Any) -> dict[str, Any]:
    first, *others = shared(2).run(run_row, name, tokens, options)
    assert all(other["hash"] == first["hash"] for other in others)
    assert all(found["equal"] for found in (first, *others)), first
    return first


def expect(found: dict[str, Any], **counts: int) -> None:
    kinds = found["kinds"]
    assert {name: kinds.get(name, 0) for name in counts} == counts, kinds


@pytest.mark.parametrize("tokens", [8, 7])
def test_middle_all_reduce_rms_norm(tokens: int) -> None:
    found = row("MiddleAllReduceRMSNorm", tokens)
    expect(found, ordered_reduce_scatter=2, all_gather=2, ordered_all_reduce=0, local_rows=1, add_rms_norm=2)
    assert found["rewrites"] == 2


def test_last_all_reduce_rms_norm() -> None:
    found = row("LastAllReduceRMSNorm")
    expect(found, ordered_reduce_scatter=1, all_gather=1, ordered_all_reduce=0, local_rows=1)


def test_qwen3_vl_middle_all_reduce_rms_norm() -> None:
    found = row("Qwen3VLMiddleAllReduceRMSNorm")
    expect(found, ordered_reduce_scatter=2, all_gather=2, ordered_all_reduce=0, local_rows=2)
    assert len(found["sliced"]) == 2, "the residual and the vision embeddings, each once"


@pytest.mark.parametrize("tokens", [8, 7])
def test_middle_layer_allgather_add_rms_norm(tokens: int) -> None:
    found = row("MiddleLayerAllgatherAddRMSNorm", tokens)
    expect(found, ordered_reduce_scatter=2, all_gather=2, local_rows=1, all_gather_into_tensor=0)


def test_last_layer_allgather_rms_norm() -> None:
    found = row("LastLayerAllgatherRMSNorm")
    expect(found, ordered_reduce_scatter=1, all_gather=1, local_rows=1)


def test_qwen3_vl_middle_layer_allgather_add_rms_norm() -> None:
    found = row("Qwen3VLMiddleLayerAllgatherAddRMSNorm")
    expect(found, ordered_reduce_scatter=2, all_gather=2, local_rows=2)


@pytest.mark.parametrize(("tokens", "padded"), [(8, 0), (7, 1)])
def test_all_gather_chunk_no_op(tokens: int, padded: int) -> None:
    found = row("AllGatherChunkNoOp", tokens)
    expect(found, all_gather=0, all_gather_into_tensor=0, local_rows=0, zero_padding=padded)


def test_flash_comm_mla_gathers_after_the_down_projection() -> None:
    found = row("FlashCommMLA")
    assert found["gathers"][0] == ("float32", 4 * LATENT)
    assert found["exactness"] == "bitwise"


def test_flash_comm_moe_gathers_after_gating_and_quantisation() -> None:
    found = row("FlashCommMoE")
    behind, returned = found["gathers"][:-1], found["gathers"][-1]
    assert sorted(behind) == [("float32", 4), ("float32", 8), ("int32", 8), ("int8", C)]
    assert returned == ("float32", ALL), "the graph's own output is not quantised"
    assert found["ratio"] < 0.9


@pytest.mark.parametrize("name", ["MiddleAllReduceRMSNorm", "MiddleLayerAllgatherAddRMSNorm", "FlashCommMLA"])
def test_torchs_own_collectives(name: str) -> None:
    """With `ordered` off both graphs sum as the backend likes; two ranks have one order."""
    found = row(name, 7, ordered=False)
    expect(found, ordered_reduce_scatter=0, all_gather=0, reduce_scatter_tensor=2, all_gather_into_tensor=2)


def test_products_and_collectives_as_one() -> None:
    """A product that is cut by rank sees fewer rows: aten's may differ in its last bits, here by none to 3 eps."""
    found = shared(2).run(run_row, "MiddleAllReduceRMSNorm", 7, {"fuse": True})[0]
    expect(found, matmul_reduce_scatter=2, all_gather_matmul=1)
    assert found["error"] <= 16 * torch.finfo(torch.float32).eps * found["scale"]
    assert found["exactness"].startswith("bitwise where")


# ---- the support matrix

QUICK = {(0, True, True), (4, False, True), (4, True, False), (0, False, False)}  # in every run; the others are slow


def cells(quick: set[tuple[int, bool, bool]]) -> list[Any]:
    found = []
    for experts, vl, int8 in itertools.product((0, 4), (True, False), (False, True)):
        name = f"{'moe' if experts else 'dense'}-{'vl' if vl else 'text'}-{'int8' if int8 else 'plain'}"
        marks = () if (experts, vl, int8) in quick else pytest.mark.slow
        found.append(pytest.param(experts, vl, int8, id=name, marks=marks))
    return found


def cell(experts: int, vl: bool, int8: bool, backend: str, counts: tuple[int, ...]) -> dict[str, Any]:
    shape = Shape(kind="qwen3", experts=experts, vl=vl, int8=int8, exact=True, layers=1, hidden=64)
    found = shared(2).run(compiled_model, shape, counts, backend, {"min_tokens": 4}, timeout=600)
    assert all(each["equal"] for each in found), found[0]
    assert found[0]["rewrites"] == (2 if vl else 3)
    assert any(dtype == "int8" for dtype, _ in found[0]["gathers"]) == int8
    return found[0]


@pytest.mark.parametrize(("experts", "vl", "int8"), cells(QUICK))
def test_matrix_eager(experts: int, vl: bool, int8: bool) -> None:
    found = cell(experts, vl, int8, "eager", (9, 3, 8))
    assert found["runs"] == ["rewritten", "plain", "rewritten"]
    assert found["captures"] == 1


@pytest.mark.parametrize(("experts", "vl", "int8"), cells(set()))
def test_matrix_inductor(experts: int, vl: bool, int8: bool) -> None:
    found = cell(experts, vl, int8, "inductor", (9, 3, 8))
    assert found["runs"] == ["rewritten", "plain", "rewritten"]
    assert found["captures"] == 1
