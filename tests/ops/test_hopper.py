"""Machine code for Hopper, made and read without a GPU: no spills, 16-byte reads and writes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import runs_slow

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


@pytest.fixture(scope="module")
def builds(pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    """Each kernel, and with the slow tests in every way that it is launched."""
    command = [sys.executable, str(Path(__file__).with_name("hopper.py"))]
    command += [] if runs_slow(pytestconfig) else ["--once"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_triton_operator_is_built(builds: list[dict[str, Any]]) -> None:
    kernels = {row["kernel"] for row in builds}
    assert kernels >= {
        "_rms_norm_kernel",
        "_rms_norm_backward_kernel",
        "_sum_kernel",
        "_rope_kernel",
        "_qk_norm_rope_kernel",
        "_qk_norm_rope_backward_kernel",
        "_glu_kernel",
        "_glu_backward_kernel",
        "_log_softmax_kernel",
        "_log_softmax_backward_kernel",
        "_token_logprobs_kernel",
        "_token_logprobs_backward_kernel",
        "_few_kernel",
        "_one_warp_kernel",
        "_warpgroup_kernel",
        "_ring_kernel",
        "_tile_kernel",
        "_fp32_kernel",
        "_add_chunks_kernel",
        "_write_kv_kernel",
        "_write_kv_kernel of codes",
        "_decode_kernel",
        "_decode_kernel with a softcap",
        "_prompt_kernel",
        "_prompt_kernel with a softcap",
        "_prompt_gluon_kernel",
        "_bidirectional_kernel",
        "_bidirectional_gluon_kernel",
        "_fold_kernel",
        "_fold_many_kernel",
        "_combine_kernel",
        "_route_kernel",
        "_gate_up_few_kernel",
        "_down_few_kernel",
        "_down_combine_kernel",
        "_gate_up_kernel",
        "_down_kernel",
        "_many_rows_kernel",
        "_sort_kernel",
        "_places_kernel",
        "_gather_rows_kernel",
        "_sum_rows_kernel",
        "_dots_kernel",
        "_product_kernel",
        "_weight_kernel",
        "_route_backward_kernel",
        "_top_kernel",
        "_draw_kernel",
        "_quantize_kernel",
        "_dequantize_kernel",
        "_scores_kernel",
        "_top_k_kernel",
        "_target_kernel",
        "_kl_kernel",
        "_dense_target_kernel",
        "_rows_kernel",
        "_dense_dq_kernel",
        "_dense_dk_kernel",
        "_hadamard_kernel",
        "_packed_kernel",
        "_packed_experts_kernel",
        "_few_packed_kernel",
        "_few_mxfp4_kernel",
        "_int8_kernel",
        "_int8_experts_kernel",
        "_head_kernel",
        "_latent_write_kernel",
        "_index_write_kernel",
        "_round_kernel",
        "_paged_scores_kernel",
        "_paged_scores_kernel that decodes",
        "_latent_kernel",
        "_latent_fold_kernel",
        "_adamw_int8_kernel",
        "_delta_chunk_kernel",
        "_delta_state_kernel",
        "_delta_rows_kernel",
        "_delta_reverse_kernel",
        "_delta_gradients_kernel",
        "_heads_kernel",
        "_heads_backward_kernel",
        "_gates_kernel",
        "_gates_backward_kernel",
        "_conv_kernel",
        "_conv_keep_kernel",
        "_conv_backward_kernel",
    }


def test_sparse_attention_runs_on_the_tensor_cores(builds: list[dict[str, Any]]) -> None:
    gluon = {"_sparse_forward_gluon_kernel", "_sparse_dq_gluon_kernel", "_sparse_dkv_gluon_kernel"}
    plain = {"_masked_forward_kernel", "_masked_dq_kernel", "_masked_dkv_kernel"}
    plain |= {f"{name} of wide heads" for name in plain}
    rows = [row for row in builds if row["kernel"] in gluon | plain]
    assert {row["kernel"] for row in rows} == gluon | plain
    assert all(row["tensor_core_products"] for row in rows), rows


def test_latent_attention_runs_on_the_tensor_cores(builds: list[dict[str, Any]]) -> None:
    """Few heads of one token alone are multiplied by a warp's instructions."""
    kernels = {"_head_kernel", "_paged_scores_kernel", "_paged_scores_kernel that decodes"}
    rows = [row for row in builds if row["kernel"] in kernels]
    assert len(rows) >= 4
    assert all(row["tensor_core_products"] for row in rows), rows
    assert {row["kernel"] for row in builds if row["kernel"].startswith("_latent_") and row["op"] == "latent_attention"}


def test_attention_inside_segments_runs_on_the_tensor_cores(builds: list[dict[str, Any]]) -> None:
    rows = [row for row in builds if row["kernel"] in ("_bidirectional_kernel", "_bidirectional_gluon_kernel")]
    assert rows
    assert all(row["tensor_core_products"] for row in rows), rows


def test_the_gated_delta_rule_runs_on_the_tensor_cores(builds: list[dict[str, Any]]) -> None:
    kernels = {f"_delta_{name}_kernel" for name in ("chunk", "state", "rows", "reverse", "gradients")}
    rows = [row for row in builds if row["kernel"] in kernels]
    assert {row["kernel"] for row in rows} == kernels
    for row in rows:  # a decode step has tiles of 16 rows, which one warp multiplies
        assert row["warp_products" if row["kernel"] == "_delta_rows_kernel" else "tensor_core_products"], row


def test_the_indexer_runs_on_the_tensor_cores(builds: list[dict[str, Any]]) -> None:
    kernels = {"_scores_kernel", "_target_kernel", "_kl_kernel", "_dense_target_kernel", "_dense_dq_kernel"}
    rows = [row for row in builds if row["kernel"] in kernels | {"_dense_dk_kernel", "_hadamard_kernel"}]
    assert len(rows) > len(kernels)
    assert all(row["tensor_core_products"] for row in rows), rows


def test_columns_are_added_in_order(builds: list[dict[str, Any]]) -> None:
    """With mma.sync as with wgmma, and packed as plain: a few tokens have the bits of many."""
    permuted = [row for row in builds if row["permuted"]]
    assert not permuted, permuted


SHARED = 232448  # bytes of shared memory that one program may have on an H200


def test_shared_memory_is_large_enough(builds: list[dict[str, Any]]) -> None:
    too_large = [row for row in builds if row["shared"] > SHARED]
    assert not too_large, too_large


# Instructions that move registers to memory and back. Of the target's variants this one is the fastest all the same:
# 341 TFLOP/s on an H200, 277 for the best without. Of the prompt's, too, with 208 registers for its consumers: 454
# TFLOP/s, 443 with 216 and 438 with 224, which spill less. Of latent attention, lists that are walked by 64 heads:
# counted with Triton 3.9, and 82 with 3.6: loads are issued early, 209 TFLOP/s on an H200 and 164 without. With 32
# heads each key is read twice as often.
# Of the gated delta rule, what a backward keeps, and lanes: 2 and none with Triton 3.9, none and 16 with 3.6.
# Of prompts over a cache of codes, where the number of sequences is no constant: with one sequence as a constant none.
SPILLS = {
    "_target_kernel": 40,
    "_prompt_gluon_kernel": 120,
    "_latent_kernel": 430,
    "_prompt_kernel": 6,
    "_delta_state_kernel": 16,
}
SPILLS |= {"_masked_dkv_kernel of wide heads": 80}  # the fewest of five plans


def test_nothing_spills(builds: list[dict[str, Any]]) -> None:
    spilling = [row for row in builds if row["spills"] > SPILLS.get(row["kernel"], 0)]
    spilling += [row for row in builds if row["stack"] and row["kernel"] not in SPILLS]
    assert not spilling, spilling


# What they read or write is a few numbers for each program: sums, chosen experts, a token.
SMALL_READS = {"_route_kernel", "_route_backward_kernel", "_sort_kernel", "_fold_kernel"}
SMALL_READS |= {"_add_chunks_kernel", "_delta_inputs_kernel"}  # the sums of one token; its inputs
SMALL_READS |= {"_sum_kernel"}  # without a GPU there are 4 shares, of which a program reads 32 columns each
SMALL_WRITES = {
    "_sum_kernel",
    *("_warpgroup_kernel", "_one_warp_kernel", "_ring_kernel"),  # 16 to 64 columns of up to 8 rows
    "_write_kv_kernel of codes",  # what is read 16 bytes at a time is written in 8 bits
    "_route_kernel",
    "_route_backward_kernel",
    "_places_kernel",
    "_few_kernel",
    "_tile_kernel",  # 16 columns at a time for a narrow weight
    "_fp32_kernel",
    "_add_chunks_kernel",
    "_dots_kernel",
    "_token_logprobs_kernel",
    "_top_kernel",
    "_draw_kernel",
    "_combine_kernel",
    *("_fold_kernel", "_fold_many_kernel"),  # a channel a thread: the sums of each wait for one another
    "_sort_kernel",
    "_gate_up_few_kernel",
    "_down_few_kernel",
    "_down_combine_kernel",  # 8 channels a program
    *("_few_packed_kernel", "_few_mxfp4_kernel"),
    "_scores_kernel",
    "_paged_scores_kernel",
    "_paged_scores_kernel that decodes",
    "_index_write_kernel",  # 128 channels among the lanes of a warp
    "_latent_fold_kernel",
    "_target_kernel",
    "_top_k_kernel",
    "delta_kernel",
    "_sparse_entries_kernel",
    "_selection_kernel",
    "_extent_kernel",
    *("_gates_backward_kernel", "_delta_inputs_kernel"),  # a head a thread; one token
}
# No shared memory is left to turn what the tensor cores hold; shares are added in place, 16 bytes at a time.
SMALL_WRITES |= {"_gate_up_kernel", "_down_kernel"}  # of one token, and low-rank updates: 16 columns a program
SMALL_WRITES |= {
    "_prompt_gluon_kernel",
    "_bidirectional_gluon_kernel",
    "_sparse_forward_gluon_kernel",
    "_sparse_dkv_kernel",
    "_sparse_dkv_gluon_kernel",
}


def test_memory_is_read_and_written_16_bytes_at_a_time(builds: list[dict[str, Any]]) -> None:
    narrow = {
        (row["op"], row["case"], row["kernel"], "reads" if not row["wide_loads"] else "writes")
        for row in builds
        if not (row["wide_loads"] or row["kernel"] in SMALL_READS)
        or not (row["wide_stores"] or row["kernel"] in SMALL_WRITES)
    }
    assert not narrow, narrow
