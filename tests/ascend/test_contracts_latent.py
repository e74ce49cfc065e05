"""Documented limits of the operators that latent attention calls on Ascend, over pages; see test_contracts.py."""

from typing import Any

import pytest

from whorl import contracts

PAGED_INDEXER: dict[str, Any] = {"query_shape": (7, 64, 128), "key_shape": (9, 128, 1, 128), "dtype": "bfloat16"}
PAGED_INDEXER |= {"sparse_count": 2048, "sparse_mode": 3, "block_size": 128}
PAGED_SPARSE: dict[str, Any] = {"query_shape": (7, 128, 512), "rope_shape": (7, 128, 64), "dtype": "bfloat16"}
PAGED_SPARSE |= {"attention_mode": 2, "topk": 2048, "block_size": 128}
ROWS: dict[str, Any] = {"shape": (512, 576), "index_shape": (7, 1), "updates_shape": (7, 576), "dtype": "bfloat16"}
HEADS: dict[str, Any] = {"shape": (7, 128, 128), "weight_shape": (128, 128, 512), "dtype": "bfloat16"}
HEADS |= {"weight_dtype": "bfloat16", "is_transposed": True}

FIT = [
    ("lightning_indexer", PAGED_INDEXER),
    ("sparse_flash_attention", PAGED_SPARSE),
    ("sparse_flash_attention", PAGED_SPARSE | {"sparse_block_size": 128, "topk": 3}),
    ("scatter_nd_update", ROWS),
    ("transpose_batchmatmul", HEADS),
    ("transpose_batchmatmul", HEADS | {"weight_shape": (128, 512, 128), "is_transposed": False}),
]
BREAK = [
    ("lightning_indexer", PAGED_INDEXER | {"block_size": 24}, "multiple of 16 up to 1024, got 24"),
    ("lightning_indexer", PAGED_INDEXER | {"contiguous": False}, "contiguous"),
    ("lightning_indexer", PAGED_INDEXER | {"sparse_count": 2049}, "got 2049"),
    ("sparse_flash_attention", PAGED_SPARSE | {"block_size": 2048}, "up to 1024, got 2048"),
    ("sparse_flash_attention", PAGED_SPARSE | {"contiguous": False}, "contiguous"),
    ("sparse_flash_attention", PAGED_SPARSE | {"block_size": 48, "sparse_block_size": 32}, "divides 48, got 32"),
    ("sparse_flash_attention", PAGED_SPARSE | {"topk": 0}, "a column"),
    ("sparse_flash_attention", PAGED_SPARSE | {"query_shape": (7, 96, 512)}, "power of two"),
    ("scatter_nd_update", ROWS | {"dtype": "uint8"}, "got uint8"),
    ("scatter_nd_update", ROWS | {"updates_shape": (7, 64)}, "do not fit"),
    ("scatter_nd_update", ROWS | {"index_shape": (0, 1), "updates_shape": (0, 576)}, "empty"),
    ("transpose_batchmatmul", HEADS | {"weight_shape": (128, 512, 128)}, "K * B must be below 65536"),
    ("transpose_batchmatmul", HEADS | {"weight_shape": (128, 128, 40)}, "multiples of 16"),
    ("transpose_batchmatmul", HEADS | {"weight_dtype": "float32"}, "input's dtype"),
    ("transpose_batchmatmul", HEADS | {"shape": (7, 128)}, "3-D"),
]


@pytest.mark.parametrize(("name", "arguments"), FIT)
def test_what_fits(name: str, arguments: dict[str, Any]) -> None:
    assert getattr(contracts, f"{name}_limit")(**arguments) is None


@pytest.mark.parametrize(("name", "arguments", "says"), BREAK)
def test_what_breaks_a_limit(name: str, arguments: dict[str, Any], says: str) -> None:
    assert says in str(getattr(contracts, f"{name}_limit")(**arguments))
