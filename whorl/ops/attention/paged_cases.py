"""Cases of `paged_attention` for tests, the self-test and benchmarks."""

import torch

from .._draw import Draw, Sizes
from .._formats import FORMATS
from .._op import Values
from .write_kv import draw_caches

_HEADS = {"heads": 4, "kv_heads": 2, "dim": 32}
_CASES: list[Values] = [
    {"queries": (1,), "contexts": (5,), "heads": 1, "kv_heads": 1, "dim": 16},
    {"queries": (3, 1, 2), "contexts": (3, 9, 20), **_HEADS},
    {"queries": (1, 2), "contexts": (30, 7), "scale": 0.01, **_HEADS},
    {"queries": (1, 3), "contexts": (300, 70), "heads": 8, "kv_heads": 1, "dim": 64, "sliced": True},
    {"queries": (0,), "contexts": (0,), **_HEADS},
    {"queries": (0,), "contexts": (4,), **_HEADS},
    {"queries": (5, 2), "contexts": (40, 2), "window": 4, "sliced": True, **_HEADS},
    {"queries": (2, 1), "contexts": (300, 20), "window": 150, **_HEADS},
    {"queries": (35,), "contexts": (70,), "heads": 6, "kv_heads": 2, "dim": 40},
    {"queries": (40,), "contexts": (60,), "window": 13, "sliced": True, **_HEADS},
    # Block sizes that every backend takes.
    {"queries": (5, 1), "contexts": (140, 2), "block": 128, **_HEADS},
    {"queries": (2, 1), "contexts": (9, 130), "block": 128, **_HEADS},
    # Quantised caches.
    {"queries": (1, 2), "contexts": (140, 7), "format": "fp8", "window": 60, **_HEADS},
    {"queries": (18,), "contexts": (40,), "heads": 3, "kv_heads": 1, "dim": 40, "format": "int8", "sliced": True},
    {"queries": (1, 1), "contexts": (130, 30), "format": "int8", "block": 128, **_HEADS},
]
_QWEN = {"heads": 32, "kv_heads": 4, "dim": 128, "block": 16}
_BENCH: list[Values] = [
    {"queries": (1,), "contexts": (4096,), **_QWEN},
    {"queries": (1,) * 64, "contexts": (1024,) * 64, **_QWEN},
    {"queries": (8192,), "contexts": (8192,), **_QWEN},
    {"queries": (512,) * 8, "contexts": (4096,) * 8, **_QWEN},
]
_BENCH += [case | {"format": name} for name in FORMATS for case in _BENCH[:3]]
_BENCH += [{"queries": (1,), "contexts": (32768,), **_QWEN}]


def make(
    draw: Draw,
    queries: Sizes,
    contexts: Sizes,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int = 8,
    window: int = 0,
    format: str = "",
    tokens: Sizes = (),
) -> Values:
    """Make the arguments of a case; the blocks of a sequence lie in random order in the cache.

    queries, contexts: new tokens and keys of each sequence; format: "" or that of a quantised cache.
    """
    counts = [-(-c // block) for c in contexts]
    shape = (sum(counts) + 3, block, kv_heads, dim + 8 * draw.sliced)
    caches = draw_caches(draw, shape, format, draw.scale)
    q, device = draw.normal(sum(queries), heads, dim), draw.device
    tables, free = (
        torch.zeros(len(counts), max(counts, default=0) + 1, dtype=torch.int32),
        torch.randperm(sum(counts) + 3).int(),
    )
    for b, count in enumerate(counts):
        tables[b, :count], free = free[:count], free[count:]
    starts = torch.tensor([0, *queries]).cumsum(0)
    return {
        "q": q,
        **caches,
        "k_cache": caches["k_cache"][..., :dim],
        "v_cache": caches["v_cache"][..., :dim],
        "block_tables": tables.to(device),
        "query_starts": starts.int().to(device),
        "context_lens": torch.tensor(contexts, dtype=torch.int32).to(device),
        "scale": dim**-0.5,
        "window": window,
    }


def _with_tokens(case: Values) -> Values:
    return {"tokens": (sum(case["queries"]),), **case}


CASES = [_with_tokens(case) for case in _CASES]
BENCH = [_with_tokens(case) for case in _BENCH]
