"""Cases beside an operator's own: those that only the documented limits of torch_npu let through, and its branches."""

from typing import Any

_SMALL = {"heads": 4, "kv_heads": 2, "dim": 32, "block": 128}
_WIDE = {"heads": 4, "kv_heads": 1, "dim": 128, "block": 128}
_ABSORBED = {"dim": 576, "value_dim": 512}
_SELECTIONS: list[dict[str, Any]] = [
    {"tokens": (5,), "keys": 80, "topk": 70, "heads": 4, "counts": (70, 20, 0, 1, 64), **_ABSORBED},
    {"tokens": (3,), "keys": 9, "topk": 12, "heads": 16, **_ABSORBED},
]

_DENSE = {"topk": 9, "dim": 192, "value_dim": 128, "dense": True}
_CAUSAL: list[dict[str, Any]] = [
    {"tokens": (9,), "keys": 9, "heads": 4, **_DENSE},
    {"tokens": (5,), "keys": 40, "heads": 4, "kv_heads": 2, **_DENSE},
]
_LATENT = {"dim": 576, "value_dim": 512, "split": True}
_INDEX = {"heads": 8, "dim": 128, "main_heads": 32}

MORE_CASES: dict[str, list[dict[str, Any]]] = {
    "lightning_indexer": [
        {"tokens": (5,), "keys": 40, "heads": 4, "dim": 128, "topk": 7},
        {"tokens": (6,), "keys": 6, "heads": 8, "dim": 128, "topk": 20},
        {"tokens": (6,), "keys": 9, "heads": 8, "dim": 128, "topk": 4, "with_scores": False},
    ],
    "sparse_attention": _SELECTIONS,
    "masked_attention": _CAUSAL,
    "masked_attention_backward": _CAUSAL,
    "indexer_kl_gradients": [
        {"tokens": (6,), "keys": 40, "k": 17, "main_dim": 576, "causal": True, **_INDEX},
        {"tokens": (9,), "keys": 9, "k": 9, "main_dim": 576, "causal": True, "grad_scale": 0.25, **_INDEX},
        {"tokens": (6,), "keys": 40, "main_dim": 192, "key_heads": 32, **_INDEX},
        {"tokens": (9,), "keys": 9, "main_dim": 192, "key_heads": 32, "grad_scale": 0.25, **_INDEX},
    ],
    "sparse_attention_backward": [*_SELECTIONS, {**_SELECTIONS[0], "deterministic": True}],
    "paged_attention": [
        {"queries": (1,), "contexts": (5,), **_SMALL},  # one query: no mask
        {"queries": (1, 1), "contexts": (300, 7), **_SMALL},
        {"queries": (2, 2), "contexts": (130, 9), **_SMALL},  # a mask of our own
        {"queries": (1, 3, 0), "contexts": (300, 70, 4), **_WIDE},
        {"queries": (1, 1), "contexts": (300, 20), "window": 150, **_SMALL},
        {"queries": (2, 1), "contexts": (300, 20), "window": 150, **_WIDE},
        {"queries": (1, 1), "contexts": (9, 20), "window": 20, **_SMALL},
        {"queries": (5, 1, 2), "contexts": (5, 200, 300), **_SMALL},  # the compressed triangle, padded
        {"queries": (35,), "contexts": (170,), **_WIDE},  # and packed
        {"queries": (5, 1, 0, 2), "contexts": (5, 200, 3, 300), **_WIDE, "block": 256},
        {"queries": (5, 2), "contexts": (140, 2), "window": 4, **_SMALL},  # a band of it
        {"queries": (5, 2), "contexts": (140, 2), "window": 4, **_WIDE},
        {"queries": (5, 2), "contexts": (140, 2), "idle_rows": 2, **_SMALL},
        {"queries": (5, 2), "contexts": (140, 2), "idle_rows": 1, **_WIDE},
        {"queries": (5, 0, 2), "contexts": (300, 300, 200), "shared": True, **_SMALL},
        {"queries": (1, 1, 1), "contexts": (300, 300, 260), "shared": True, "idle_rows": 1, **_SMALL},
    ],
    "head_linear": [
        {"tokens": (7,), "heads": 3, "size": (48, 32)},
        {"tokens": (5,), "heads": 2, "size": (512, 128), "swapped": True},
        {"tokens": (2,), "heads": 128, "size": (16, 512)},  # rows of 65536: heads go first
    ],
    "latent_write": [{"tokens": (7,), "latent_dim": 512, "rotary": 64, "block": 16, "skipped": True, "split": True}],
    "index_write": [{"tokens": (7,), "dim": 128, "rotary": 64, "block": 16, "skipped": True}],
    "paged_indexer": [
        {"queries": (1,), "contexts": (300,), "heads": 8, "dim": 128, "topk": 33, "block": 128},
        {"queries": (3, 0, 1, 9), "contexts": (3, 4, 70, 200), "heads": 64, "dim": 128, "topk": 64, "block": 16},
        {"queries": (2, 1), "contexts": (30, 7), "heads": 4, "dim": 128, "topk": 16, "block": 64, "idle_rows": 2},
    ],
    "latent_attention": [
        {"queries": (1,), "contexts": (300,), "topk": 70, "heads": 16, "block": 128, **_LATENT},
        {"queries": (3, 0, 1, 9), "contexts": (3, 4, 70, 200), "topk": 64, "heads": 4, "block": 16, **_LATENT},
        {"queries": (2, 1), "contexts": (30, 7), "topk": 16, "heads": 4, "block": 64, "idle_rows": 2, **_LATENT},
        {"queries": (1, 9, 0), "contexts": (300, 9, 3), "heads": 4, "block": 128, **_LATENT},  # every key
        {"queries": (35, 1), "contexts": (70, 40), "heads": 2, "block": 48, "idle_rows": 1, **_LATENT},
    ],
    "write_kv": [{"tokens": (3,), "kv_heads": 2, "dim": 16, "skipped": 3}],
    "linear": [{"tokens": (70,), "size": (24, 40)}, {"tokens": (515,), "size": (8, 16)}],
    "sample": [
        {"tokens": (8,), "vocab": 3000, "scale": 0.01, "top_k": 1100},
        {"tokens": (3,), "vocab": 100, "top_k": 200},
    ],
}
