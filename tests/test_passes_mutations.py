"""Planted mistakes, each of which the proofs must catch; where others made them is in docs/passes.md."""

from pathlib import Path

import pytest
from passes_mutations import MUTATIONS, first_ranks_graph, run_mutation, stale_cache
from ranks import shared

RAISES = {"one unmatched norm": "mixes full tensors and a rank's rows"}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str) -> None:
    outcomes = shared(2).outcomes(run_mutation, name)
    if name in RAISES:
        assert all(status == "error" and RAISES[name] in message for status, message, _ in outcomes), outcomes
    else:
        assert all(status == "ok" for status, _, _ in outcomes), outcomes
        assert not all(answer["equal"] for _, answer, _ in outcomes), outcomes


def test_without_a_mutation_nothing_is_caught() -> None:
    from passes_rows import run_row

    assert all(result["equal"] for result in shared(2).run(run_row, "Qwen3VLMiddleAllReduceRMSNorm", 8, {}))


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
