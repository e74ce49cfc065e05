"""Attention at inference. The result is the formula's, sequence by sequence: to compare with, not to be fast."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from whorl import contracts
from whorl.ops._torch_npu import dtype_name

from .calling import call_torch_npu, is_npu, refuse, refuse_arguments, refuse_gradient

_NAME = "npu_fused_infer_attention_score"
_UNLIMITED = 2**31 - 1
_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND")
_NPU_ONLY = (
    *("pse_shift", "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2"),
    *("antiquant_scale", "antiquant_offset", "key_antiquant_scale", "key_antiquant_offset", "value_antiquant_scale"),
    *("value_antiquant_offset", "query_padding_size", "kv_padding_size", "key_shared_prefix", "value_shared_prefix"),
    *("actual_shared_prefix_len", "query_rope", "key_rope", "key_rope_antiquant_scale"),
    *("antiquant_mode", "key_antiquant_mode", "value_antiquant_mode"),
)


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    key_antiquant_scale: Tensor | None = None,
    key_antiquant_offset: Tensor | None = None,
    value_antiquant_scale: Tensor | None = None,
    value_antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None,
    query_padding_size: Tensor | None = None,
    kv_padding_size: Tensor | None = None,
    key_shared_prefix: Tensor | None = None,
    value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: list[int] | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    key_rope_antiquant_scale: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = _UNLIMITED,
    next_tokens: int = _UNLIMITED,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * query @ key) @ value, in fp32, one rounding; and the logarithm of the softmax's sum if asked for.

    Layouts BSH, BSND, BNSD, BNSD_BSND and TND; value, and so the result, may have heads of another size; pages with
    block_table [B, blocks], key and value then [blocks, block_size, HK * D] or [blocks, HK, block_size, D]. True in
    atten_mask hides. sparse_mode 0: atten_mask, and pre_tokens before to next_tokens after, counted from the first
    query; 1: atten_mask alone; 2, 3: causal, counted from the first or from the last query; 4: pre_tokens to
    next_tokens, counted from the last. With one query only the atten_mask of modes 0 and 1 counts. Lengths are per
    sequence; in TND cumulative, but not those of pages. A query that sees nothing gives zeros. lse: fp32 [B, N, S, 1],
    TND [T, N, 1], or empty. No gradient: torch_npu drops it silently. Off the NPU the other arguments are refused by
    name.
    """
    given = dict(locals())
    refuse_gradient(_NAME, query, key, value)
    if is_npu(query):
        return call_torch_npu(_NAME, **given)
    asked = _Asked(
        layout=input_layout,
        heads=num_heads,
        kv_heads=num_key_value_heads or num_heads,
        lengths=actual_seq_lengths,
        kv_lengths=actual_seq_lengths_kv,
        mask=atten_mask,
        sparse_mode=sparse_mode,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        block_table=block_table,
        block_size=block_size,
    )
    more = {n: v for n in _NPU_ONLY if (v := given[n]) is not None and not (isinstance(v, int) and v == 0)}
    refuse(_NAME, None if more or input_layout not in _LAYOUTS else _limit(query, key, value, asked))
    refuse_arguments(_NAME, **more)
    if input_layout not in _LAYOUTS:
        raise ValueError(f"{_NAME}: input_layout is {input_layout!r}, expected one of {', '.join(_LAYOUTS)}")
    return _compute(query, key, value, asked, scale, softmax_lse_flag)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    layout: str
    heads: int
    kv_heads: int
    lengths: list[int] | None
    kv_lengths: list[int] | None
    mask: Tensor | None
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    block_table: Tensor | None
    block_size: int


def _limit(query: Tensor, key: Tensor, value: Tensor, asked: _Asked) -> str | None:
    lengths = _counts(query, asked)
    return contracts.fused_infer_attention_limit(
        num_heads=asked.heads,
        num_kv_heads=asked.kv_heads,
        head_size=query.shape[-1] // (asked.heads if asked.layout == "BSH" else 1),
        value_size=_head_size(value, asked),
        dtype=dtype_name(query),
        input_layout=asked.layout,
        batch=len(lengths),
        queries=max(lengths, default=0),
        block_size=0 if asked.block_table is None else asked.block_size,
        sparse_mode=asked.sparse_mode,
        mask_shape=None if asked.mask is None else asked.mask.shape,
        contiguous=all(t.is_contiguous() for t in (query, key, value, asked.mask) if t is not None),
    )


def _head_size(x: Tensor, asked: _Asked) -> int:
    """Of key or value: heads and channels are one dim in BSH, and in pages of three dims."""
    is_joined = x.dim() == 3 and (asked.layout == "BSH" or asked.block_table is not None)
    return x.shape[-1] // asked.kv_heads if is_joined else x.shape[-1]


def _counts(query: Tensor, asked: _Asked) -> list[int]:
    """Queries of each sequence."""
    if asked.layout == "TND":
        if asked.lengths is None:
            raise ValueError(f"{_NAME}: TND needs actual_seq_lengths, where the queries of each sequence end")
        return [end - start for start, end in itertools.pairwise([0, *asked.lengths])]
    most = query.shape[2 if asked.layout.startswith("BNSD") else 1]
    return _each(asked.lengths if most > 1 else None, query.shape[0], most)


def _each(lengths: list[int] | None, batch: int, most: int) -> list[int]:
    """One length may stand for all, and none for all there is."""
    if lengths is None:
        return [most] * batch
    return lengths * batch if len(lengths) == 1 else lengths[:batch]


def _compute(
    query: Tensor, key: Tensor, value: Tensor, asked: _Asked, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor]:
    if asked.heads % asked.kv_heads:
        raise ValueError(f"{_NAME}: {asked.heads} heads are not a multiple of {asked.kv_heads} key heads")
    q = _tokens_first(query, asked.layout, asked.heads)
    if _head_size(key, asked) != q.shape[-1]:
        raise ValueError(
            f"{_NAME}: query has heads of {q.shape[-1]}, key of {_head_size(key, asked)}; expected one size"
        )
    out = torch.zeros(*q.shape[:-1], _head_size(value, asked), dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:-1], torch.inf, device=q.device)
    is_packed, start = asked.layout == "TND", 0
    for b, count in enumerate(_counts(query, asked)):
        at = (0, slice(start, start + count)) if is_packed else (b, slice(0, count))
        start += count
        k, v = (_keys(t, asked, b) for t in (key, value))
        hidden = _hidden(asked, b, count, k.shape[0], is_single=not is_packed and q.shape[1] == 1).to(q.device)
        found, total = _attend(q[at], k, v, hidden, scale)
        out[at], lse[at] = found.to(q.dtype), total.float()
    if is_packed:
        return out[0], lse[0].unsqueeze(-1) if with_lse else lse.new_empty(0)
    if asked.layout == "BNSD":
        out = out.transpose(1, 2).contiguous()
    out = out.flatten(2) if asked.layout == "BSH" else out
    return out, lse.transpose(1, 2).unsqueeze(-1).contiguous() if with_lse else lse.new_empty(0)


def _tokens_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """[B, S, N, D], TND as one row of B."""
    if layout == "TND":
        return x.unsqueeze(0)
    if layout == "BSH":
        return x.unflatten(-1, (heads, -1))
    return x if layout == "BSND" else x.transpose(1, 2)


def _keys(x: Tensor, asked: _Asked, b: int) -> Tensor:
    """[S, HK, D] of sequence b."""
    lengths, table = asked.kv_lengths, asked.block_table
    if table is None:
        if asked.layout == "TND":
            if lengths is None:
                raise ValueError(f"{_NAME}: TND needs actual_seq_lengths_kv, where the keys of each sequence end")
            return x[lengths[b - 1] if b else 0 : lengths[b]]
        rows = _tokens_first(x, asked.layout, asked.kv_heads)
        return rows[b, : _each(lengths, rows.shape[0], rows.shape[1])[b]]
    if lengths is None:
        raise ValueError(f"{_NAME}: block_table needs actual_seq_lengths_kv, the keys of each sequence")
    pages = x.transpose(1, 2) if x.dim() == 4 else x.unflatten(-1, (asked.kv_heads, -1))
    if pages.shape[1] != asked.block_size:
        raise ValueError(f"{_NAME}: block_size is {asked.block_size}, key has blocks of {pages.shape[1]}")
    length = _each(lengths, table.shape[0], 0)[b]
    return pages[table[b, : -(-length // asked.block_size)].long()].flatten(0, 1)[:length]


def _hidden(asked: _Asked, b: int, count: int, keys: int, *, is_single: bool) -> Tensor:
    """[count, keys] bool: which keys a query does not see. With one query only a mask of mode 0 or 1 counts."""
    query, key = torch.arange(count)[:, None], torch.arange(keys)
    last = query + keys - count
    if is_single or asked.sparse_mode in (0, 1):
        if asked.mask is None or asked.sparse_mode > 1:
            return torch.zeros(count, keys, dtype=torch.bool)
        mask = asked.mask
        mask = mask.unsqueeze(1 if is_single else 0) if mask.dim() == 2 else mask.flatten(0, -3)
        hidden = mask[b if mask.shape[0] > 1 else 0, :count, :keys].bool().cpu()
        if is_single or asked.sparse_mode == 1:
            return hidden
        return hidden | (key < query - asked.pre_tokens) | (key > query + asked.next_tokens)
    if asked.sparse_mode == 4:
        return (key < last - asked.pre_tokens) | (key > last + asked.next_tokens)
    if asked.sparse_mode not in (2, 3):
        raise ValueError(f"{_NAME}: sparse_mode is {asked.sparse_mode}, expected 0 to 4")
    return key > (query if asked.sparse_mode == 2 else last)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q: [n, HQ, D], k: [s, HK, D], v: [s, HK, DV]: out [n, HQ, DV] and lse [n, HQ], in the dtype of accumulation."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("nhgd,shd->nhgs", grouped, k.to(wide)) * scale
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0)  # all hidden: zeros
    return torch.einsum("nhgs,shd->nhgd", weights, v.to(wide)).flatten(1, 2), torch.logsumexp(scores, -1).flatten(1)
