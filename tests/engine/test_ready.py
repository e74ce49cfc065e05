"""Ready means ready: after a full warm-up a mixed load compiles no kernel and tries no library product."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from whorl.engine.call import field_offsets
from whorl.ops import OPS
from whorl.ops._varied import varied

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


def run(**options: Any) -> dict[str, Any]:
    """Run tests/engine/ready.py, which needs Triton without its interpreter and so a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("ready.py")), json.dumps(options)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"WHORL_CPU_KERNELS": "none"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_a_mixed_load_needs_nothing_new() -> None:
    document = run()
    assert document["late"] == []
    assert document["warmed"] > 80, "kernels are recorded at all"
    assert document["most_decoding"] == 40, "the load runs as many sequences as the settings allow"
    assert document["most_tokens"] == 700, "and steps of as many prompt tokens"
    assert document["most_prompts"] > 32


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"model": "dense"},
        {
            "settings": {
                "kv_cache_dtype": "fp8",
                "max_num_seqs": 300,
                "max_num_batched_tokens": 1100,
                "max_prompt_tokens": 1100,
                "max_model_len": 200,
                "num_blocks": 3900,
            }
        },
    ],
    ids=["dense", "many sequences and a cache of codes"],
)
def test_nor_do_other_models_and_settings(options: dict[str, Any]) -> None:
    assert run(**options)["late"] == []


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["prompt", "33 longer prompts", "scores of", "decode 8"])
def test_a_size_that_the_warm_up_leaves_out_is_noticed(left_out: str) -> None:
    assert run(without=left_out)["late"]


@pytest.mark.parametrize("size", [(1, 1, 1), (3, 2, 1), (17, 5, 0), (128, 128, 128)], ids=str)
def test_every_array_of_a_call_begins_at_a_multiple_of_16_bytes(size: tuple[int, int, int]) -> None:
    fields, num_bytes = field_offsets(size)
    assert all(start % 16 == 0 for _, _, start, _ in fields)
    ends = [start + int(kind[1]) * count for _, kind, start, count in fields]
    assert all(end <= start for end, (_, _, start, _) in zip(ends, fields[1:], strict=False))
    assert ends[-1] <= num_bytes


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("paged_attention", 1),
        pytest.param("paged_attention", 3, marks=pytest.mark.slow),
        pytest.param("paged_attention", 7, marks=pytest.mark.slow),
        ("experts", 5),
    ],
)
def test_kernels_that_suit_all_sizes_give_equal_bits(name: str, number: int, device: str) -> None:
    op = OPS[name]
    values = op.make(**op.cases[number], dtype=torch.bfloat16, device=device)
    expected = op(**values, backend="triton")
    with varied():
        assert torch.equal(op(**values, backend="triton"), expected)
