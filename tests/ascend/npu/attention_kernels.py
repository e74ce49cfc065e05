"""The vendor's formulas of inference operators in plain torch: linear, cache, attention, sampling. See kernels.py."""

from typing import Any

import torch
from npu.bound import Call, by_schema
from torch import Tensor

UNLIMITED = 2**31 - 1


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = input.double() @ weight.double().t()  # in which order it adds is not what is compared
    return (y if bias is None else y + bias.double()).to(input.dtype)


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
) -> None:
    assert cache_mode == "Norm", cache_mode
    size = key_cache.shape[1]
    first: dict[int, int] = {}
    for t, slot in enumerate(slot_mapping.tolist()):
        assert 0 <= slot < key_cache.shape[0] * size, slot
        same = first.setdefault(slot, t)  # of two in one slot either may win
        assert torch.equal(key[t], key[same]), slot
        assert torch.equal(value[t], value[same]), slot
        key_cache[slot // size, slot % size] = key[t]
        value_cache[slot // size, slot % size] = value[t]


def scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    first: dict[int, int] = {}
    for t, (row,) in enumerate(indices.tolist()):
        assert 0 <= row < len(input), row
        assert torch.equal(updates[t], updates[first.setdefault(row, t)]), row  # of two in one place either may win
        input[row] = updates[t]
    return input


@by_schema("npu_transpose_batchmatmul")
def transpose_batchmatmul(call: Call) -> Tensor:
    assert call.perm_x1 in ([0, 1, 2], [1, 0, 2])
    assert call.perm_x2 == [0, 1, 2]
    assert call.perm_y == [1, 0, 2]
    x = call.input.permute(call.perm_x1)  # [B, M, K]
    return (x.double() @ call.weight.double()).transpose(0, 1).to(x.dtype).contiguous()


def hidden_keys(
    queries: int, keys: int, mode: int, mask: Tensor | None, pre: int, after: int, is_single: bool
) -> Tensor:
    """[queries, keys] bool. With one query a sequence sparse_mode, its compressed mask and the limits do not count."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    if is_single or mode in (0, 1):
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        if mask is not None and mode in (0, 1):
            hidden = hidden | mask[:queries, :keys].bool()
            if mode == 0 and not is_single:
                hidden = hidden | (j < i - pre) | (j > i + after)
        return hidden
    assert mask is not None
    assert torch.equal(mask.bool(), torch.ones(2048, 2048).triu(1).bool()), "not the compressed mask"
    if mode == 2:
        return j > i
    end = i + keys - queries
    return j > end if mode == 3 else (j > end + after) | (j < end - pre)


def attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q: [n, HQ, D], k and v: [s, HK, D], sink: [HQ]: out [n, HQ, D] fp32 and lse [n, HQ]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,shd->hns", q.float(), k) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        column = sink.float()[:, None, None].expand(-1, len(q), 1)
        shares = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
        return torch.einsum("hns,shd->nhd", shares, v), torch.zeros(len(q), q.shape[1])
    out = torch.einsum("hns,shd->nhd", torch.softmax(scores, -1).nan_to_num(0), v)
    return out, torch.logsumexp(scores, -1).t()


def pages(cache: Tensor, table: Tensor, length: int, heads: int) -> Tensor:
    """[length, heads, D] of a cache [blocks, block size, heads * D] or [blocks, heads, block size, D]."""
    cache = cache.transpose(1, 2) if cache.dim() == 4 else cache.unflatten(-1, (heads, -1))
    return torch.cat([cache[block] for block in table.tolist()])[:length]


def paged_scales(scales: Tensor, mode: int, table: Tensor, length: int, cache: Tensor) -> Tensor:
    """[length, heads, 1] of scales [blocks, heads, block size]."""
    assert mode == 5, mode
    assert cache.dtype == torch.int8, cache.dtype
    assert scales.dtype == torch.float32, scales.dtype
    assert scales.shape[0] == cache.shape[0], scales.shape
    return torch.cat([scales[block].t() for block in table.tolist()])[:length, :, None]


@by_schema("npu_fused_infer_attention_score")
def fused_infer_attention_score(call: Call) -> tuple[Tensor, Tensor]:
    return paged_scores(call)


class Renamed:
    """A call of the second version by the names of the first."""

    NAMES = {  # noqa: RUF012
        "num_heads": "num_query_heads",
        "actual_seq_lengths": "actual_seq_qlen",
        "actual_seq_lengths_kv": "actual_seq_kvlen",
        "scale": "softmax_scale",
        "softmax_lse_flag": "return_softmax_lse",
        "key_antiquant_scale": "dequant_scale_key",
    }

    def __init__(self, call: Call) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, self.NAMES.get(name, name))


@by_schema("npu_fused_infer_attention_score_v2")
def fused_infer_attention_score_v2(call: Call) -> tuple[Tensor, Tensor]:
    return paged_scores(Renamed(call), call.learnable_sink)


def paged_scores(call: Any, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    query, key, value, block_table, block_size = call.query, call.key, call.value, call.block_table, call.block_size
    queries, kv_lengths, sparse_mode = call.actual_seq_lengths, call.actual_seq_lengths_kv, call.sparse_mode
    limits, scale = (call.pre_tokens, call.next_tokens), call.scale
    assert call.inner_precise in range(4)  # in which arithmetic the device computes; here it is always the formula
    heads = call.num_key_value_heads or call.num_heads
    layout = call.input_layout.split("_")[0]

    def tokens_first(x: Tensor, count: int) -> Tensor:
        """[B, S, N, D], TND as one sequence."""
        return {
            "BSH": lambda: x.unflatten(-1, (count, -1)),
            "BSND": lambda: x,
            "BNSD": lambda: x.transpose(1, 2),
            "TND": lambda: x[None],
        }[layout]()

    q = tokens_first(query, call.num_heads)
    is_packed, is_single = layout == "TND", layout != "TND" and q.shape[1] == 1
    if is_packed:
        assert queries is not None
        starts = [0, *queries[:-1]]
        lengths = [end - start for start, end in zip(starts, queries, strict=True)]
    else:
        query_lens = queries if queries and not is_single else [q.shape[1]]
        starts, lengths = [0] * q.shape[0], list(query_lens) * (q.shape[0] if len(query_lens) == 1 else 1)
    if block_table is not None and kv_lengths is not None:
        assert sum(-(-n // block_size) for n in kv_lengths) <= key.shape[0], "too few blocks"
    joined = value.dim() == 3 and (layout == "BSH" or block_table is not None)
    out = torch.zeros(*q.shape[:-1], value.shape[-1] // heads if joined else value.shape[-1])
    lse = torch.full(q.shape[:-1], torch.inf)
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        row = 0 if is_packed else b
        if block_table is not None:
            assert kv_lengths is not None
            assert block_size == key.shape[1 if key.dim() == 3 else 2]
            size = kv_lengths[b]
            blocks = block_table[b][: -(-size // block_size)]
            k, v = (pages(x, blocks, size, heads) for x in (key, value))
            if call.key_antiquant_scale is not None:
                k = k * paged_scales(call.key_antiquant_scale, call.key_antiquant_mode, blocks, size, key)
                v = v * paged_scales(call.value_antiquant_scale, call.value_antiquant_mode, blocks, size, value)
        else:
            k, v = (tokens_first(x, heads)[row] for x in (key, value))
            ends = kv_lengths or [k.shape[0]]
            first = ends[b - 1] if is_packed and b else 0
            k, v = (x[first : ends[b if len(ends) > 1 else 0]] for x in (k, v))
        mask = call.atten_mask
        if mask is not None:
            if mask.dim() == 2 and is_single:
                mask = mask[:, None]  # [B, KV_S]
            mask = mask.reshape(-1, *mask.shape[-2:])
            mask = mask[b if mask.shape[0] > 1 else 0]
            if block_table is not None and sparse_mode in (0, 1):
                assert mask.shape[1] >= block_table.shape[1] * block_size, mask.shape
        hidden = hidden_keys(length, k.shape[0], sparse_mode, mask, *limits, is_single)
        out[row, start : start + length], lse[row, start : start + length] = attend(
            q[row, start : start + length], k, v, hidden, scale, sink
        )
    wide = {
        "BSH": lambda: out.flatten(2),
        "BSND": lambda: out,
        "BNSD": lambda: out.transpose(1, 2),
        "TND": lambda: out[0],
    }[call.input_layout.split("_")[-1]]()
    lse = lse[0, ..., None] if is_packed else lse.transpose(1, 2)[..., None]
    return wide.to(query.dtype).contiguous(), lse if call.softmax_lse_flag else torch.empty(0)


def top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    assert p is not None or k is not None
    values, order = torch.sort(logits.float(), dim=-1, stable=True)
    if k is not None:
        assert k.dtype == torch.int32, k.dtype
        assert all(1 <= n <= min(1024, logits.shape[1]) for n in k.tolist()), k
        least = values.gather(1, (logits.shape[1] - k.long())[:, None])
        values = values.masked_fill(values < least, -torch.inf)
    if p is not None:
        assert p.dtype == logits.dtype, p.dtype
        is_cut = values.softmax(-1).cumsum(-1) <= 1 - p[:, None]
        is_cut[:, -1] = False
        values = values.masked_fill(is_cut, -torch.inf)
    return torch.empty_like(values).scatter_(1, order, values).to(logits.dtype)


KERNELS = {
    "npu_linear": linear,
    "npu_fused_infer_attention_score": fused_infer_attention_score,
    "npu_fused_infer_attention_score_v2": fused_infer_attention_score_v2,
    "npu_top_k_top_p": top_k_top_p,
    "npu_transpose_batchmatmul": transpose_batchmatmul,
}
IN_PLACE = {"npu_scatter_pa_kv_cache": scatter_pa_kv_cache, "npu_scatter_nd_update_": scatter_nd_update}
