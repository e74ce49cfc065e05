"""Every pattern that vllm-ascend's passes had, and Flash Comm V1, on two ranks: found by rule, equal bit for bit.

And mistakes planted in the passes, each of which this proof must catch; where others made them is in docs/passes.md.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from passes_cases import Cells, all_cells, compiled_model
from passes_models import Shape
from passes_mutations import MUTATIONS, first_ranks_graph, run_mutation, stale_cache
from passes_rows import LATENT, C, run_row
from ranks import shared

ALL = 4 * C  # bytes of a row in fp32


def row(name: str, tokens: int = 7, **options: Any) -> dict[str, Any]:
    first, *others = shared(2).run(run_row, name, tokens, options)
    assert all(other["hash"] == first["hash"] for other in others)
    assert all(result["equal"] for result in (first, *others)), first
    return first


def expect(result: dict[str, Any], **counts: int) -> None:
    kinds = result["kinds"]
    assert {name: kinds.get(name, 0) for name in counts} == counts, kinds


PATTERNS = {
    "MiddleAllReduceRMSNorm": {"ordered_reduce_scatter": 2, "all_gather": 2, "local_rows": 1, "add_rms_norm": 2},
    "LastAllReduceRMSNorm": {"ordered_reduce_scatter": 1, "all_gather": 1, "local_rows": 1},
    "Qwen3VLMiddleAllReduceRMSNorm": {"ordered_reduce_scatter": 2, "all_gather": 2, "local_rows": 2},
    "MiddleLayerAllgatherAddRMSNorm": {"ordered_reduce_scatter": 2, "all_gather": 2, "local_rows": 1},
    "LastLayerAllgatherRMSNorm": {"ordered_reduce_scatter": 1, "all_gather": 1, "local_rows": 1},
    "Qwen3VLMiddleLayerAllgatherAddRMSNorm": {"ordered_reduce_scatter": 2, "all_gather": 2, "local_rows": 2},
}


EVEN = ("MiddleAllReduceRMSNorm", "MiddleLayerAllgatherAddRMSNorm", "Qwen3VLMiddleAllReduceRMSNorm")


@pytest.mark.parametrize(("name", "tokens"), [*((name, 7) for name in PATTERNS), *((name, 8) for name in EVEN)])
def test_patterns_around_a_norm(name: str, tokens: int) -> None:
    """Of the residual and of the vision embeddings a rank takes its rows, each once."""
    result = row(name, tokens)
    expect(result, **PATTERNS[name], ordered_all_reduce=0, all_gather_into_tensor=0)
    assert len(result["sliced"]) == PATTERNS[name]["local_rows"]
    assert result["rewrites"] == PATTERNS[name]["ordered_reduce_scatter"]


@pytest.mark.parametrize(("tokens", "padded"), [(8, 0), (7, 1)])
def test_all_gather_chunk_no_op(tokens: int, padded: int) -> None:
    result = row("AllGatherChunkNoOp", tokens)
    expect(result, all_gather=0, all_gather_into_tensor=0, local_rows=0, zero_padding=padded)


def test_flash_comm_mla_gathers_after_the_down_projection() -> None:
    result = row("FlashCommMLA")
    assert result["gathers"][0] == ("float32", 4 * LATENT)
    assert result["exactness"] == "bitwise"


def test_flash_comm_moe_gathers_after_gating_and_quantisation() -> None:
    result = row("FlashCommMoE")
    behind, returned = result["gathers"][:-1], result["gathers"][-1]
    assert sorted(behind) == [("float32", 4), ("float32", 8), ("int32", 8), ("int8", C)]
    assert returned == ("float32", ALL), "the graph's own output is not quantised"
    assert result["ratio"] < 0.9


@pytest.mark.parametrize("name", ["MiddleAllReduceRMSNorm", "MiddleLayerAllgatherAddRMSNorm", "FlashCommMLA"])
def test_torchs_own_collectives(name: str) -> None:
    """With `ordered` off both graphs sum as the backend likes; two ranks have one order."""
    result = row(name, 7, ordered=False)
    expect(result, ordered_reduce_scatter=0, all_gather=0, reduce_scatter_tensor=2, all_gather_into_tensor=2)


def test_products_and_collectives_as_one() -> None:
    """A product that is cut by rank sees fewer rows: aten's may differ in its last bits, here by none to 3 eps."""
    result = shared(2).run(run_row, "MiddleAllReduceRMSNorm", 7, {"fuse": True})[0]
    expect(result, matmul_reduce_scatter=2, all_gather_matmul=1)
    assert result["error"] <= 16 * torch.finfo(torch.float32).eps * result["scale"]
    assert result["exactness"].startswith("bitwise where")


# ---- the support matrix


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_matrix_in_one_graph(backend: str) -> None:
    """{dense, MoE} x {VL, text} x {no quantisation, int8} as blocks; the slow tests have a whole model for each."""
    for result in shared(2).run(all_cells, backend, (9, 3, 8), timeout=600):
        assert result["equal"] == [[True] * len(Cells.names)] * 3
        assert result["runs"] == ["rewritten", "plain", "rewritten"]
        assert result["captures"] == 1
        assert result["rewrites"] == 2 * len(Cells.names)
        assert [dtype for dtype, _ in result["gathers"]].count("int8") == 4


CELLS = [
    pytest.param(
        *cell, id=f"{'moe' if cell[0] else 'dense'}-{'vl' if cell[1] else 'text'}-{'int8' if cell[2] else 'plain'}"
    )
    for cell in Cells.names
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(("experts", "vl", "int8"), CELLS)
def test_matrix(experts: int, vl: bool, int8: bool, backend: str) -> None:
    shape = Shape(kind="qwen3", experts=experts, vl=vl, int8=int8, exact=True, layers=1, hidden=64)
    for result in shared(2).run(compiled_model, shape, (9, 3, 8), backend, {"min_tokens": 4}, timeout=600):
        assert result["equal"], result
        assert result["rewrites"] == (2 if vl else 3)
        assert any(dtype == "int8" for dtype, _ in result["gathers"]) == int8
        assert result["runs"] == ["rewritten", "plain", "rewritten"]
        assert result["captures"] == 1


# ---- planted mistakes

RAISES = {"one unmatched norm": "mixes full tensors and a rank's rows"}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str) -> None:
    outcomes = shared(2).outcomes(run_mutation, name)
    if name in RAISES:
        assert all(status == "error" and RAISES[name] in message for status, message, _ in outcomes), outcomes
    else:
        assert all(status == "ok" for status, _, _ in outcomes), outcomes
        assert not all(answer["equal"] for _, answer, _ in outcomes), outcomes


def test_one_ranks_graph_in_the_hands_of_another_is_caught() -> None:
    """A stale compile cache in small: no graph holds its rank, and one that did would show."""
    assert shared(2).run(first_ranks_graph, False) == [True, True]
    assert not all(shared(2).run(first_ranks_graph, True))


@pytest.mark.slow
def test_stale_compile_cache_is_caught(tmp_path: Path) -> None:
    """A rank baked into a cached graph is handed to the other rank; read at run time it cannot be."""
    right = shared(2).run(stale_cache, str(tmp_path / "right"), False, timeout=600)
    wrong = shared(2).run(stale_cache, str(tmp_path / "wrong"), True, timeout=600)
    assert right == [[True, True]] * 2, "a cold and a warm cache, on both ranks"
    assert not all(all(caught) for caught in wrong), wrong
