"""DeepSeek sparse attention over pages behind torch_npu's schemas: queries one after the other, keys by block table."""

from collections.abc import Iterator

import torch
from npu.bound import Call
from torch import Tensor

NOT_WRITTEN = 12345  # what is in a result's memory where the device writes nothing


def sequences(call: Call, key_lengths: Tensor, *caches: Tensor) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
    """Of each sequence its rows of the query, their positions, and its keys out of each cache [blocks, size, 1, D]."""
    ends, table = call.actual_seq_lengths_query, call.block_table
    assert {ends.dtype, key_lengths.dtype, table.dtype} == {torch.int32}
    assert len(ends) == len(key_lengths) == len(table)
    size, start = caches[0].shape[1], 0
    for b, (end, length) in enumerate(zip(ends.tolist(), key_lengths.tolist(), strict=True)):
        assert start <= end <= len(call.query), "lengths of TND are sums"
        blocks = table[b, : -(-length // size)].long()
        positions = torch.arange(length - (end - start), length)
        yield slice(start, end), positions, [cache[blocks].flatten(0, 1)[:length, 0] for cache in caches]
        start = end


def indexer(call: Call) -> tuple[Tensor, Tensor]:
    """Highest score first, -1 behind the last."""
    query, weights, count = call.query, call.weights, call.sparse_count
    assert call.layout_query == "TND"
    assert all(x.is_contiguous() for x in (query, call.key, weights, call.block_table))
    assert not call.return_value, "not with pages"
    indices = torch.full((len(query), 1, count), NOT_WRITTEN, dtype=torch.int32)
    for rows, positions, (key,) in sequences(call, call.actual_seq_lengths_key, call.key):
        dots = torch.einsum("qnd,kd->qnk", query[rows].float(), key.float()).relu()
        scores = torch.einsum("qnk,qn->qk", dots, weights[rows].float())
        if call.sparse_mode == 3:
            scores = scores.masked_fill(torch.arange(len(key)) > positions[:, None], -torch.inf)
        best = torch.sort(scores, dim=-1, descending=True, stable=True)
        chosen = best.indices.masked_fill(best.values == -torch.inf, -1)[:, :count]
        indices[rows] = -1
        indices[rows, 0, : chosen.shape[1]] = chosen.int()
    return indices, query.new_empty(0)


def attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Over the keys of the runs that are listed. A row without any is not documented; here it is NaN."""
    query, indices, run = call.query, call.sparse_indices, call.sparse_block_size
    assert call.layout_query == "TND"
    assert not call.return_softmax_lse, "not with pages"
    listed = indices >= 0
    q = torch.cat((query, call.query_rope), -1).float()
    out = torch.full(query.shape, float(NOT_WRITTEN))
    for rows, positions, keys in sequences(call, call.actual_seq_lengths_kv, call.key, call.key_rope):
        assert bool((listed[rows, 0, 1:] <= listed[rows, 0, :-1]).all()), "a key after a -1"
        k = torch.cat(keys, -1).float()
        runs = torch.zeros(rows.stop - rows.start, -(-len(k) // run) + 1, dtype=torch.bool)
        at = indices[rows, 0].long()
        assert bool((at < runs.shape[1] - 1).all()), "a key that is not there"
        runs.scatter_(1, torch.where(at < 0, runs.shape[1] - 1, at), True)
        seen = runs[:, :-1].repeat_interleave(run, 1)[:, : len(k)]
        if call.sparse_mode == 3:
            seen = seen & (torch.arange(len(k)) <= positions[:, None])
        scores = torch.einsum("qnd,kd->qnk", q[rows], k) * call.scale_value
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        out[rows] = torch.einsum("qnk,kd->qnd", weights, k[:, : query.shape[-1]])
    return out.to(query.dtype), *(torch.empty(0) for _ in range(2))
