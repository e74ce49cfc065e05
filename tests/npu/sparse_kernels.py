"""The lightning indexer behind torch_npu's schema, written from the vendor's formula: highest score first."""

from typing import Any

import torch
from torch import Tensor


def lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, *, sparse_count: int = 2048, sparse_mode: int = 3, **given: Any
) -> tuple[Tensor, Tensor]:
    assert given.get("layout_query", "BSND") == given.get("layout_key", "BSND") == "BSND"
    assert all(x.is_contiguous() and x.dtype == query.dtype for x in (query, key, weights))
    batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    dots = torch.einsum("bqnd,bkd->bqnk", query.float(), key[:, :, 0].float()).relu()
    scores = torch.einsum("bqnk,bqn->bqk", dots, weights.float())
    if sparse_mode == 3:
        later = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    best = torch.sort(scores, dim=-1, descending=True, stable=True)
    count = min(sparse_count, keys)
    indices = torch.full((batch, queries, 1, sparse_count), -1, dtype=torch.int32)
    chosen = best.indices[..., :count].masked_fill(best.values[..., :count] == -torch.inf, -1)
    indices[:, :, 0, :count] = chosen.int()
    return indices, query.new_empty(0)


KERNELS = {"npu_lightning_indexer": lightning_indexer}
